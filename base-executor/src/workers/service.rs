//! The thread that seats workers, offers them images, and notices who is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::AsFd as _,
};
use shmproto::{
    board::{Board, Generation},
    handover::{
        Accepted, AdapterOffered, ExecutorEnd, FromWorker, Listener, Seated as SeatedMessage, SendError,
        ToWorker, bounded_text,
    },
    image::Image,
};

use super::{Seated, Staff};
use crate::images::Library;

/// How often workers are looked at, at least.
const LOOK: Duration = Duration::from_millis(100);

/// A worker without a sign of life for so long is stopped, or stuck. One that lives gives several a second.
const LIFELESS: Duration = Duration::from_secs(5);

/// Messages of one guest that are heard before the others have their turn.
const MOST_MESSAGES: usize = 64;

/// How long a caller may take to say hello, and a worker to take an image.
const MANNERS: Duration = Duration::from_secs(5);

/// Callers that have not said hello; more are hung up on.
const MOST_CALLERS: usize = 32;

/// After this the process has no descriptors to spare; others may give some back.
const NO_DESCRIPTORS: Duration = Duration::from_millis(50);

/// Serves one socket.
pub(super) struct Service {
    listener: Listener,
    staff: Arc<Staff>,
    board: Board,
    library: Library,
    guests: Vec<Guest>,
}

/// A connection.
struct Guest {
    connection: ExecutorEnd,
    pid: u32,
    seat: Option<Generation>,
    /// Images it was offered, which it may or may not have mapped.
    offered: BTreeSet<u64>,
    /// Since when it does not do what it should.
    owes_since: Option<Instant>,
    /// Its last sign of life, and when that was new.
    heartbeat: (u32, Instant),
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum Leave {
    #[error("it is gone: {0}")]
    Gone(String),
    #[error("it was refused: {0}")]
    Refused(String),
    #[error("it was fenced: it was stuck, or broke the protocol")]
    Fenced,
    #[error("it gave no sign of life for {} s", LIFELESS.as_secs())]
    Lifeless,
    #[error("it took nothing for {} s", MANNERS.as_secs())]
    Slow,
}

impl Service {
    pub(super) fn new(listener: Listener, staff: Arc<Staff>, board: Board, library: Library) -> Self {
        Self { listener, staff, board, library, guests: Vec::new() }
    }

    /// Runs until the executor is done with its workers.
    pub(super) fn run(mut self) {
        while !self.staff.is_let_go.load(Ordering::Relaxed) {
            self.library.note_changes();
            self.accept();
            let images = self.library.images();
            let (board, staff) = (&self.board, &self.staff);
            let guests = std::mem::take(&mut self.guests);
            self.guests = guests
                .into_iter()
                .filter_map(|mut guest| match guest.serve(board, staff, &images) {
                    Ok(()) => Some(guest),
                    Err(leave) => {
                        guest.dismiss(board, staff, &leave);
                        None
                    }
                })
                .collect();
            self.wait();
        }
        for guest in &self.guests {
            let _ = guest.connection.send(&ToWorker::Closing, &[]);
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok(Some(Accepted { connection, pid })) => {
                    let callers = self.guests.iter().filter(|guest| guest.seat.is_none()).count();
                    if callers < MOST_CALLERS {
                        self.guests.push(Guest::new(connection, pid));
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "a worker was not taken in");
                    std::thread::sleep(NO_DESCRIPTORS);
                    return;
                }
            }
        }
    }

    /// Sleeps until somebody says something, the library changes, or it is time to look again.
    fn wait(&self) {
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.library.changed(), PollFlags::IN),
        ];
        fds.extend(self.guests.iter().map(|guest| {
            let full = guest.owes_since.is_some() && guest.seat.is_some();
            let flags = if full { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(guest.connection.as_fd(), flags)
        }));
        let timeout = Timespec::try_from(LOOK).ok();
        // Interrupted or not: the next round looks at everything.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

impl Guest {
    fn new(connection: ExecutorEnd, pid: u32) -> Self {
        let now = Instant::now();
        let offered = BTreeSet::new();
        Self { connection, pid, seat: None, offered, owes_since: Some(now), heartbeat: (0, now) }
    }

    /// Takes in what it said and sends it what it does not know.
    fn serve(
        &mut self,
        board: &Board,
        staff: &Arc<Staff>,
        images: &BTreeMap<u64, Image>,
    ) -> Result<(), Leave> {
        for _ in 0..MOST_MESSAGES {
            let received = self.connection.receive().map_err(|error| Leave::Gone(error.to_string()))?;
            let Some((message, _)) = received else { break };
            self.heard(message, board, staff)?;
        }
        if let Some(generation) = self.seat {
            self.feel_pulse(board, generation)?;
            self.reconcile(images)?;
        }
        match self.owes_since {
            Some(since) if since.elapsed() > MANNERS => Err(Leave::Slow),
            _ => Ok(()),
        }
    }

    /// It is still admitted, and lives.
    fn feel_pulse(&mut self, board: &Board, generation: Generation) -> Result<(), Leave> {
        let seats = board.figures().seats;
        let seat = seats.iter().find(|seat| seat.generation == generation).ok_or(Leave::Fenced)?;
        let (known, since) = self.heartbeat;
        if known != seat.heartbeat {
            self.heartbeat = (seat.heartbeat, Instant::now());
        } else if since.elapsed() > LIFELESS {
            return Err(Leave::Lifeless);
        }
        Ok(())
    }

    fn heard(&mut self, message: FromWorker, board: &Board, staff: &Arc<Staff>) -> Result<(), Leave> {
        match message {
            FromWorker::Hello(hello) => {
                failpoint::pass("executor.worker_hello");
                if self.seat.is_some() {
                    return Err(Leave::Refused("it said hello twice".to_owned()));
                }
                hello.check().map_err(|error| Leave::Refused(error.to_string()))?;
                self.take_seat(hello.core, board, staff)
            }
            FromWorker::AdapterMapped(image) => {
                tracing::debug!(image, pid = self.pid, "a worker has mapped an image");
                Ok(())
            }
            FromWorker::AdapterRejected(rejected) => {
                let (image, reason) = (rejected.image, &*rejected.reason);
                tracing::warn!(
                    image,
                    reason,
                    pid = self.pid,
                    "a worker cannot use an image; others do its part"
                );
                Ok(())
            }
        }
    }

    fn take_seat(&mut self, core: u32, board: &Board, staff: &Arc<Staff>) -> Result<(), Leave> {
        let offer = board.seat().map_err(|error| Leave::Refused(error.to_string()))?;
        let generation = offer.generation;
        self.seat = Some(generation);
        staff.arrived(Seated { generation: generation.get(), core, pid: self.pid });
        let [control_bytes, x_bytes, sums_bytes] = offer.bytes().map(|bytes| bytes as u64);
        let seated = SeatedMessage {
            seat: offer.seat.0,
            generation: generation.get(),
            control_bytes,
            x_bytes,
            sums_bytes,
        };
        let fds =
            offer.fds().ok_or_else(|| Leave::Refused("the board is of this process alone".to_owned()))?;
        self.connection
            .send(&ToWorker::Seated(seated), &fds)
            .map_err(|error| Leave::Gone(error.to_string()))?;
        failpoint::pass("executor.worker_seated");
        tracing::info!(core, pid = self.pid, %generation, "a worker is seated");
        self.owes_since = None;
        self.heartbeat = (0, Instant::now());
        Ok(())
    }

    /// Offers what is new and withdraws what is gone, as far as it takes that.
    fn reconcile(&mut self, images: &BTreeMap<u64, Image>) -> Result<(), Leave> {
        match self.try_reconcile(images) {
            Ok(()) => self.owes_since = None,
            Err(SendError::Full) => {
                self.owes_since.get_or_insert_with(Instant::now);
            }
            Err(error) => return Err(Leave::Gone(error.to_string())),
        }
        Ok(())
    }

    fn try_reconcile(&mut self, images: &BTreeMap<u64, Image>) -> Result<(), SendError> {
        let gone: Vec<u64> =
            self.offered.iter().filter(|number| !images.contains_key(number)).copied().collect();
        for number in gone {
            self.connection.send(&ToWorker::AdapterWithdrawn(number), &[])?;
            self.offered.remove(&number);
        }
        for (&number, image) in images {
            if !self.offered.contains(&number) {
                let bytes = (*image.bytes()).as_ref().len() as u64;
                let offered = ToWorker::AdapterOffered(AdapterOffered { image: number, bytes });
                self.connection.send(&offered, &[image.fd()])?;
                self.offered.insert(number);
                failpoint::pass("executor.image_offered");
            }
        }
        Ok(())
    }

    /// Nothing it writes is read any more.
    fn dismiss(self, board: &Board, staff: &Arc<Staff>, leave: &Leave) {
        if let Leave::Refused(reason) = leave {
            let _ = self.connection.send(&ToWorker::Refused(bounded_text(reason).to_owned()), &[]);
        }
        match self.seat {
            Some(generation) => {
                board.fence(generation);
                staff.left(generation.get());
                failpoint::pass("executor.worker_lost");
                tracing::warn!(pid = self.pid, %generation, reason = %leave, "a worker is lost; its part is computed here");
            }
            None => tracing::warn!(pid = self.pid, reason = %leave, "a caller at the workers' socket left"),
        }
    }
}
