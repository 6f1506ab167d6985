//! The board as transport: rows are written once, and workers claim slices.

use std::{
    hint::spin_loop,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shmproto::{
    board::{Board, Geometry, Producer, Slice, SliceState},
    fd_passing::{ExecutorEnd, SlotGranted, ToWorker},
};

use super::{
    round_trip::{MessageShape, RoundTrip},
    worker::{Channel, WorkerProcess, WorkerRole},
};

/// Timeout of a trip.
const STUCK: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct BoardTransport {
    producer: Producer,
    slices: Vec<Slice>,
    sums: Vec<f32>,
    _board: Board,
    // Dropped before the workers: each worker ends when its socket closes.
    _sockets: Vec<ExecutorEnd>,
    _workers: Vec<WorkerProcess>,
}

impl BoardTransport {
    pub(super) fn start(shape: MessageShape, cores: &[Option<usize>]) -> Result<Self> {
        let slices = shape.slices(cores.len())?;
        let elements = shape.rows * shape.width;
        let geometry = Geometry {
            x_elements: elements,
            sums_elements: elements,
            slices: slices.len(),
            seats: cores.len(),
        };
        let (board, producer) = Board::new(geometry).context("no board")?;
        let (mut sockets, mut workers) = (Vec::new(), Vec::new());
        for &core in cores {
            let (ours, theirs) = pair()?;
            let role = WorkerRole { channel: Channel::Board, core, receives: 0, sends: 0 };
            workers.push(WorkerProcess::start(role, theirs)?);
            let ours = ExecutorEnd::over(ours);
            seat(&board, &ours)?;
            sockets.push(ours);
        }
        let sums = vec![0.0; elements];
        Ok(Self { producer, slices, sums, _board: board, _sockets: sockets, _workers: workers })
    }

    fn collect(&mut self, index: usize, started: Instant) -> Result<()> {
        let mut looks = 0u32;
        loop {
            match self.producer.state(index) {
                SliceState::Done(_) => break,
                SliceState::Open | SliceState::Claimed(_) => spin_loop(),
                SliceState::Lost | SliceState::Taken => bail!("slice {index} was lost; is a worker gone?"),
            }
            looks += 1;
            // Reading the clock costs as much as dozens of polls.
            if looks.is_multiple_of(1024) {
                ensure!(started.elapsed() < STUCK, "no worker computes slice {index}");
            }
        }
        let Slice { sums_offset, sums_elements, .. } = self.slices[index];
        let first = usize::try_from(sums_offset).context("an offset within the sums")?;
        let sums = &mut self.sums[first..first + sums_elements as usize];
        self.producer
            .done(index)
            .map(|done| done.read(0, sums))
            .with_context(|| format!("the sums of slice {index} are gone"))
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).context("no pair of sockets")
}

fn seat(board: &Board, worker: &ExecutorEnd) -> Result<()> {
    let offer = board.seat().context("no seat at the board")?;
    let [control_bytes, x_bytes, sums_bytes] = offer.bytes().map(|bytes| bytes as u64);
    let (seat, number) = (offer.seat.0, offer.worker.get());
    let seated = SlotGranted { seat, worker: number, control_bytes, x_bytes, sums_bytes };
    let fds = offer.fds().context("a board of regions has descriptors")?;
    worker.send(&ToWorker::Seated(seated), &fds).context("a worker takes no seat")
}

impl RoundTrip for BoardTransport {
    fn begin(&mut self) {
        self.producer.announce(u32::try_from(self.slices.len()).unwrap_or(u32::MAX));
    }

    fn trip(&mut self, x: &[f32]) -> Result<()> {
        let started = Instant::now();
        self.producer.post(x, &self.slices).context("the job does not fit the board")?;
        (0..self.slices.len()).try_for_each(|index| self.collect(index, started))
    }

    fn end(&mut self) {
        self.producer.finish();
        self.producer.rest();
    }

    fn sums(&self, index: usize) -> f32 {
        self.sums[index]
    }
}
