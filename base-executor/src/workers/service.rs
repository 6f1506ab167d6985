//! The thread that admits workers, offers images to them, and detects lost workers.

mod rate;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use kv_cache::ledger::MemoryReservation;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::AsFd as _,
};
use shmproto::{
    board::{Board, WorkerNumber},
    fd_passing::{
        Accepted, AdapterOffered, BoardListener, ExecutorEnd, FromWorker, SendError,
        SlotGranted as SeatedMessage, ToWorker, bounded_text,
    },
    image::Image,
};

use self::rate::AttachRateLimit;
use super::{AttachedWorker, SharedWorkerState};
use crate::adapter_images::ImageRegistry;

/// Maximum interval between two checks of the workers.
const LOOK: Duration = Duration::from_millis(100);

/// Time without a heartbeat after which a worker counts as stuck; a live one sends several per second.
const LIFELESS: Duration = Duration::from_secs(5);

/// Maximum number of messages handled per peer and round.
const MAX_MESSAGES: usize = 64;

/// Time limit for a peer's hello, and for a worker to take an image.
const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum number of peers without a hello; more are disconnected.
const MAX_CALLERS: usize = 32;

/// Pause after the process has run out of descriptors, until others are closed.
const NO_DESCRIPTORS: Duration = Duration::from_millis(50);

pub(super) struct Service {
    listener: BoardListener,
    shared: Arc<SharedWorkerState>,
    board: Board,
    /// Reservation for the board.
    held: MemoryReservation,
    library: ImageRegistry,
    peers: Vec<WorkerPeer>,
    rate: AttachRateLimit,
}

struct WorkerPeer {
    connection: ExecutorEnd,
    pid: u32,
    seat: Option<WorkerNumber>,
    /// Reservation for the worker's sums.
    held: Option<MemoryReservation>,
    /// Core of a peer that has sent its hello and waits for a slot.
    asks: Option<u32>,
    /// Images offered to the worker, mapped or not.
    offered: BTreeSet<u64>,
    /// Time since which the peer is overdue.
    owes_since: Option<Instant>,
    /// Latest heartbeat, and when it changed.
    heartbeat: (u32, Instant),
}

/// State for admitting a worker.
struct WorkerAttachment<'a> {
    board: &'a Board,
    shared: &'a Arc<SharedWorkerState>,
    rate: &'a mut AttachRateLimit,
    held: &'a MemoryReservation,
}

#[derive(Debug, thiserror::Error)]
enum DisconnectReason {
    #[error("the worker disconnected: {0}")]
    Gone(String),
    #[error("the worker was refused: {0}")]
    Refused(String),
    #[error("the worker was fenced because it was stuck or broke the protocol")]
    Fenced,
    #[error("the worker sent no heartbeat for {} s", LIFELESS.as_secs())]
    Lifeless,
    #[error("the worker read no message for {} s", PATIENCE.as_secs())]
    Slow,
}

impl Service {
    pub(super) fn new(
        listener: BoardListener,
        shared: Arc<SharedWorkerState>,
        held: MemoryReservation,
        library: ImageRegistry,
    ) -> Self {
        Self {
            listener,
            board: shared.board.clone(),
            shared,
            held,
            library,
            peers: Vec::new(),
            rate: AttachRateLimit::new(Instant::now()),
        }
    }

    /// Runs until the executor dismisses its workers.
    pub(super) fn run(mut self) {
        while !self.shared.is_let_go.load(Ordering::Relaxed) {
            self.library.note_changes();
            self.accept();
            let images = self.library.images();
            let mut seating = WorkerAttachment {
                board: &self.board,
                shared: &self.shared,
                rate: &mut self.rate,
                held: &self.held,
            };
            let peers = std::mem::take(&mut self.peers);
            self.peers = peers
                .into_iter()
                .filter_map(|mut peer| match peer.serve(&mut seating, &images) {
                    Ok(()) => Some(peer),
                    Err(leave) => {
                        peer.dismiss(seating.board, seating.shared, &leave);
                        None
                    }
                })
                .collect();
            self.wait();
        }
        for peer in &self.peers {
            let _ = peer.connection.send(&ToWorker::Closing, &[]);
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok(Some(Accepted { connection, pid })) => {
                    let callers = self.peers.iter().filter(|peer| peer.seat.is_none()).count();
                    if callers < MAX_CALLERS {
                        self.peers.push(WorkerPeer::new(connection, pid));
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a worker");
                    std::thread::sleep(NO_DESCRIPTORS);
                    return;
                }
            }
        }
    }

    /// Sleeps until a message, a change of the images, or the next check.
    fn wait(&self) {
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.library.changed(), PollFlags::IN),
        ];
        fds.extend(self.peers.iter().map(|peer| {
            let full = peer.owes_since.is_some() && peer.seat.is_some();
            let flags = if full { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(peer.connection.as_fd(), flags)
        }));
        let timeout = Timespec::try_from(LOOK).ok();
        // After an interrupt too, the next round checks everything.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

impl WorkerPeer {
    fn new(connection: ExecutorEnd, pid: u32) -> Self {
        let now = Instant::now();
        let (seat, asks, offered) = (None, None, BTreeSet::new());
        Self { connection, pid, seat, held: None, asks, offered, owes_since: Some(now), heartbeat: (0, now) }
    }

    /// Handles the peer's messages, and sends pending ones.
    fn serve(
        &mut self,
        seating: &mut WorkerAttachment<'_>,
        images: &BTreeMap<u64, Image>,
    ) -> Result<(), DisconnectReason> {
        for _ in 0..MAX_MESSAGES {
            let received =
                self.connection.receive().map_err(|error| DisconnectReason::Gone(error.to_string()))?;
            let Some((message, _)) = received else { break };
            self.heard(message)?;
        }
        let now = Instant::now();
        if let Some(core) = self.asks.filter(|_| seating.rate.permits(now)) {
            self.take_seat(core, seating)?;
            seating.rate.count(now);
        }
        if let Some(worker) = self.seat {
            self.feel_pulse(seating.board, worker)?;
            self.reconcile(images, now)?;
        }
        self.check_patience(now)
    }

    /// Fails if the peer is overdue.
    fn check_patience(&self, now: Instant) -> Result<(), DisconnectReason> {
        match self.owes_since {
            Some(since) if now.saturating_duration_since(since) > PATIENCE => Err(DisconnectReason::Slow),
            _ => Ok(()),
        }
    }

    /// Fails if the worker is fenced or lifeless.
    fn feel_pulse(&mut self, board: &Board, worker: WorkerNumber) -> Result<(), DisconnectReason> {
        let seats = board.stats().seats;
        let seat = seats.iter().find(|seat| seat.worker == worker).ok_or(DisconnectReason::Fenced)?;
        let (known, since) = self.heartbeat;
        if known != seat.heartbeat {
            self.heartbeat = (seat.heartbeat, Instant::now());
        } else if since.elapsed() > LIFELESS {
            return Err(DisconnectReason::Lifeless);
        }
        Ok(())
    }

    fn heard(&mut self, message: FromWorker) -> Result<(), DisconnectReason> {
        match message {
            FromWorker::Hello(hello) => {
                failpoint::pass("executor.worker_hello");
                if self.seat.is_some() || self.asks.is_some() {
                    return Err(DisconnectReason::Refused("the worker sent Hello twice".to_owned()));
                }
                hello.check().map_err(|error| DisconnectReason::Refused(error.to_string()))?;
                (self.asks, self.owes_since) = (Some(hello.core), None);
                Ok(())
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
                    "a worker cannot use an adapter image; others compute its part"
                );
                Ok(())
            }
        }
    }

    fn take_seat(&mut self, core: u32, seating: &WorkerAttachment<'_>) -> Result<(), DisconnectReason> {
        let offer = seating.board.seat().map_err(|error| DisconnectReason::Refused(error.to_string()))?;
        let worker = offer.worker;
        (self.seat, self.asks) = (Some(worker), None);
        seating.shared.arrived(AttachedWorker { worker: worker.get(), core, pid: self.pid });
        let [control_bytes, x_bytes, sums_bytes] = offer.bytes().map(|bytes| bytes as u64);
        let held = seating.held.another(sums_bytes);
        self.held = Some(held.map_err(|full| DisconnectReason::Refused(full.to_string()))?);
        let seated =
            SeatedMessage { seat: offer.seat.0, worker: worker.get(), control_bytes, x_bytes, sums_bytes };
        let fds = offer
            .fds()
            .ok_or_else(|| DisconnectReason::Refused("the board belongs to this process only".to_owned()))?;
        self.connection
            .send(&ToWorker::Seated(seated), &fds)
            .map_err(|error| DisconnectReason::Gone(error.to_string()))?;
        failpoint::pass("executor.worker_seated");
        tracing::info!(core, pid = self.pid, %worker, "a worker has a slot");
        self.heartbeat = (0, Instant::now());
        Ok(())
    }

    /// Offers new images and withdraws old ones, as far as the worker takes them.
    fn reconcile(&mut self, images: &BTreeMap<u64, Image>, now: Instant) -> Result<(), DisconnectReason> {
        let mut sent = 0;
        match self.try_reconcile(images, &mut sent) {
            Ok(()) => self.owes_since = None,
            // A worker that takes some of many images is making progress.
            Err(SendError::Full) if sent > 0 => self.owes_since = Some(now),
            Err(SendError::Full) => _ = self.owes_since.get_or_insert(now),
            Err(error) => return Err(DisconnectReason::Gone(error.to_string())),
        }
        Ok(())
    }

    /// Counts the sent messages in `sent`.
    fn try_reconcile(&mut self, images: &BTreeMap<u64, Image>, sent: &mut usize) -> Result<(), SendError> {
        let gone: Vec<u64> =
            self.offered.iter().filter(|number| !images.contains_key(number)).copied().collect();
        for number in gone {
            self.connection.send(&ToWorker::AdapterWithdrawn(number), &[])?;
            self.offered.remove(&number);
            *sent += 1;
        }
        for (&number, image) in images {
            if !self.offered.contains(&number) {
                let bytes = (*image.bytes()).as_ref().len() as u64;
                let offered = ToWorker::AdapterOffered(AdapterOffered { image: number, bytes });
                self.connection.send(&offered, &[image.fd()])?;
                self.offered.insert(number);
                *sent += 1;
                failpoint::pass("executor.image_offered");
            }
        }
        Ok(())
    }

    /// Fences the worker, whose later writes are never read.
    fn dismiss(self, board: &Board, shared: &Arc<SharedWorkerState>, leave: &DisconnectReason) {
        if let DisconnectReason::Refused(reason) = leave {
            let _ = self.connection.send(&ToWorker::Refused(bounded_text(reason).to_owned()), &[]);
        }
        match self.seat {
            Some(worker) => {
                board.fence(worker);
                shared.left(worker.get());
                failpoint::pass("executor.worker_lost");
                tracing::warn!(pid = self.pid, %worker, reason = %leave, "a worker is lost; the executor \
                    computes its part");
            }
            None => {
                tracing::warn!(pid = self.pid, reason = %leave, "a client of the workers' socket \
                    disconnected before it had a slot")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
    use shmproto::{fd_passing::WorkerEnd, image::ImageEntry};

    use super::*;

    fn image() -> Image {
        // Kind 0 is f32.
        let entry = ImageEntry {
            module: 0,
            rank: 16,
            columns: 16,
            rows: 16,
            scale: 1.0,
            a_kind: 0,
            b_kind: 0,
            a_offset: 0,
            b_offset: 1024,
        };
        Image::build(&[entry], &[0; 2048]).unwrap()
    }

    #[test]
    fn a_worker_that_maps_many_images_one_after_the_other_keeps_its_seat() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
        // The worker takes few messages at a time, as if there were many more.
        sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
        let (mut peer, worker) = (WorkerPeer::new(ExecutorEnd::over(ours), 1), WorkerEnd::over(theirs));
        let image = image();
        let images: BTreeMap<u64, Image> = (0..300).map(|number| (number, image.clone())).collect();
        let mut now = Instant::now();
        peer.owes_since = None;
        let mut mapped = 0;
        while mapped < 300 {
            peer.reconcile(&images, now).unwrap();
            peer.check_patience(now).unwrap();
            now += Duration::from_millis(100);
            assert!(matches!(worker.receive(), Ok(Some((ToWorker::AdapterOffered(_), _)))));
            mapped += 1;
        }
        assert_eq!(peer.offered.len(), 300);
        // A worker that takes nothing at all makes no progress.
        let more: BTreeMap<u64, Image> = (300..600).map(|number| (number, image.clone())).collect();
        peer.reconcile(&more, now).unwrap();
        now += PATIENCE + Duration::from_millis(100);
        peer.reconcile(&more, now).unwrap();
        assert!(matches!(peer.check_patience(now), Err(DisconnectReason::Slow)));
    }
}
