//! The layer service in the compute thread: calls between steps, within passes, and in idle time.

use std::{
    task::{Context, Poll, Waker},
    time::Duration,
};

use model::forward::ForwardPass;
use tokio::sync::mpsc;

pub(crate) use super::model_runner::LayerService;
use super::{event::EngineEvent, model_runner::ModelRunner};

impl<P: ForwardPass> ModelRunner<P> {
    /// Computes due calls for at most the duration of the step, so that neither starves the other.
    pub(super) fn serve_layers(&mut self, step: Duration) {
        if let Some(layers) = &mut self.layers {
            layers.dispatcher.poll();
            layers.dispatcher.run_beside(step, (layers.base)(&mut self.pass));
        }
    }

    /// Answers the accepted calls, which become due soon, since no new ones are accepted.
    pub(super) fn finish_layers(&mut self) {
        let Some(layers) = &mut self.layers else { return };
        loop {
            layers.dispatcher.poll();
            let ran = layers.dispatcher.run_due((layers.base)(&mut self.pass));
            if layers.dispatcher.is_idle() {
                return;
            }
            if ran.rows == 0 {
                layers.dispatcher.wait(None);
            }
        }
    }

    /// Returns the next event, and computes calls until then. `None` if all senders are gone.
    pub(super) fn next_event(
        &mut self,
        events: &mut mpsc::Receiver<EngineEvent<P::Adapter>>,
    ) -> Option<EngineEvent<P::Adapter>> {
        let Some(layers) = &mut self.layers else { return events.blocking_recv() };
        let waker = Waker::from(layers.dispatcher.doorbell());
        loop {
            if let Poll::Ready(event) = events.poll_recv(&mut Context::from_waker(&waker)) {
                return event;
            }
            layers.dispatcher.poll();
            if layers.dispatcher.run_due((layers.base)(&mut self.pass)).rows == 0 {
                layers.dispatcher.wait(None);
            }
        }
    }
}
