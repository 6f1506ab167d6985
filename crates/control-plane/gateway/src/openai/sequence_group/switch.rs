//! The next stage of a sequence: a request of its own, under the adapter of the switch before it.
//!
//! The executor of the last stage runs the next one too, because its prefix cache has the tokens so far. Only
//! the loss of that executor moves a stage, as it moves any lost sequence.

use std::sync::Arc;

use shmproto::message::Finish;
use tokio::time::Instant;

use super::{REDO_WAIT, ROOM_PAUSE, SequenceGroup};
use crate::{
    adapters::{ExecutorPin, Lease, ResidencyError},
    errors::ApiError,
    executor::CallError,
};

impl SequenceGroup {
    /// Ends the stage of a sequence, by `finish`. Returns `None` if another stage follows, and otherwise the
    /// finish of the whole sequence.
    pub(super) fn end_stage(&mut self, index: usize, finish: Finish) -> Option<Finish> {
        let sequence = &mut self.sequences[index];
        sequence.booked = None;
        let (last, generated) = (sequence.emitted.last().copied(), sequence.generated());
        let next = self.switches.get(sequence.stage);
        let follows = next.is_some_and(|next| next.follows(finish, last, generated));
        if follows && sequence.enter_next_stage(&self.switches, self.serving.context_tokens) {
            sequence.place = None;
            self.switching = Some(index);
            return None;
        }
        self.executors.answered(generated.into());
        self.batch.release(index);
        Some(if follows { Finish::Length } else { finish })
    }

    /// Starts the stage that a sequence has entered.
    pub(super) async fn switch(&mut self, index: usize) -> Result<(), ApiError> {
        let sequence = &mut self.sequences[index];
        let (home, epoch) = (sequence.index, sequence.epoch);
        // Stage 0 has no switch before it, and is never entered.
        let entered = sequence.stage.checked_sub(1).and_then(|switch| self.switches.get(switch));
        let lease = entered.and_then(|switch| switch.target.lease.as_ref());
        sequence.place = lease.map(|lease| Arc::new(lease.place(home)));
        self.route.enter_stage(&self.serving, lease.map(Lease::entry), &sequence.generate);
        let until = *self.redo_by.get_or_insert_with(|| Instant::now() + REDO_WAIT);
        loop {
            let error = match self.place_at(index, home).await {
                Ok(place) => match self.start_stage(index, place)? {
                    None => return Ok(()),
                    Some(error) => ResidencyError::from(error),
                },
                Err(error) => error,
            };
            match error {
                ResidencyError::Call(CallError::Unavailable(_)) => return self.redo(index, epoch).await,
                ResidencyError::Busy(_) | ResidencyError::Call(CallError::Busy { .. })
                    if Instant::now() < until =>
                {
                    tokio::time::sleep(ROOM_PAUSE).await;
                }
                error => return Err(error.into()),
            }
        }
    }

    /// Sends the stage that a sequence has entered to the executor of the stage before it; returns why that
    /// executor cannot take the stage.
    fn start_stage(
        &mut self,
        index: usize,
        place: Option<Arc<ExecutorPin>>,
    ) -> Result<Option<CallError>, ApiError> {
        let sequence = &mut self.sequences[index];
        sequence.place = place;
        let (home, epoch) = (sequence.index, sequence.epoch);
        let sent = sequence.again(&self.switches, self.started.elapsed())?;
        let executor = self.executors.member(home).executor();
        if let Err(error) = executor.restart(&mut self.batch, index, epoch, sent.clone()) {
            return Ok(Some(error));
        }
        self.redo_by = None;
        self.route.note(home);
        self.book(index, &sent);
        Ok(None)
    }
}
