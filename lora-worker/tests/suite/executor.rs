//! The executor's side: a board, a socket for workers, and adapters.

use kernels::{
    Isa,
    lora::{ElementKind, FactorLayout, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes, sum_ranks},
};
use shmproto::{
    board::{
        Board, ConsumerHandle, Geometry, Producer, SUMS_ALIGN, Slice, SliceState, TakeBack, WorkerNumber,
    },
    fd_passing::{
        Accepted, AdapterOffered, BoardListener, ExecutorEnd, FromWorker, ReceiveError, SendError,
        SlotGranted, ToWorker,
    },
    image::{Image, ImageEntry},
    region::{Access, Region},
};

use crate::worker::{WorkerDirectory, until, until_some};

/// Large enough for every test.
pub(crate) const GEOMETRY: Geometry =
    Geometry { x_elements: 1 << 18, sums_elements: 1 << 20, slices: 64, seats: 4 };

pub(crate) struct BoardExecutor {
    listener: BoardListener,
    pub(crate) board: Board,
    pub(crate) producer: Producer,
}

impl BoardExecutor {
    pub(crate) fn new(place: &WorkerDirectory) -> Self {
        let (board, producer) = Board::new(GEOMETRY).unwrap();
        Self { listener: BoardListener::bind(&place.socket()).unwrap(), board, producer }
    }

    pub(crate) fn hear(&self) -> (ExecutorEnd, u32) {
        let accepted = until_some("a worker calls", || self.listener.accept().unwrap());
        match received(&accepted.connection) {
            FromWorker::Hello(hello) => hello.check().unwrap(),
            other => panic!("{other:?} is no hello"),
        }
        (accepted.connection, accepted.pid)
    }

    pub(crate) fn seat(&self) -> AttachedPeer {
        let (connection, pid) = self.hear();
        self.give_seat(connection, pid).unwrap()
    }

    /// As [`BoardExecutor::seat`], with a descriptor of the control region for arbitrary writes.
    pub(crate) fn seat_and_control(&self) -> (AttachedPeer, Region) {
        let (connection, pid) = self.hear();
        let offer = self.board.seat().unwrap();
        let [control, ..] = offer.fds().unwrap();
        let bytes = offer.bytes()[0];
        let control =
            Region::map(control.try_clone_to_owned().unwrap(), bytes..=bytes, Access::ReadWrite).unwrap();
        let worker = offer.worker;
        connection.send(&seated(&offer), &offer.fds().unwrap()).unwrap();
        (AttachedPeer { connection, pid, worker }, control)
    }

    /// Gives a seat to a worker that connects before `given_up`, and may be killed meanwhile.
    pub(crate) fn try_seat(&self, mut given_up: impl FnMut() -> bool) -> Option<AttachedPeer> {
        let mut accepted = None;
        until("a worker calls or dies", || {
            accepted = self.listener.accept().unwrap();
            accepted.is_some() || given_up()
        });
        // The worker may have connected just before it was killed.
        let Accepted { connection, pid } = accepted.or_else(|| self.listener.accept().unwrap())?;
        let mut hello = Ok(None);
        until("it says hello or dies", || {
            hello = connection.receive();
            !matches!(hello, Ok(None))
        });
        hello.ok()?;
        self.give_seat(connection, pid).ok()
    }

    fn give_seat(&self, connection: ExecutorEnd, pid: u32) -> Result<AttachedPeer, SendError> {
        let offer = self.board.seat().unwrap();
        connection.send(&seated(&offer), &offer.fds().unwrap())?;
        Ok(AttachedPeer { connection, pid, worker: offer.worker })
    }

    /// Posts slices over `x` and wakes workers for them.
    pub(crate) fn post(&mut self, x: &[f32], slices: &[Slice]) {
        self.producer.announce(u32::MAX);
        self.producer.post(x, slices).unwrap();
    }

    pub(crate) fn read(&mut self, index: usize, sums: usize) -> Vec<f32> {
        until("a slice is done", || matches!(self.producer.state(index), SliceState::Done(_)));
        let mut values = vec![f32::NAN; sums];
        self.producer.done(index).map(|done| done.read(0, &mut values)).unwrap();
        values
    }

    pub(crate) fn take_back(&mut self, index: usize) {
        assert_eq!(self.producer.take_back(index), TakeBack::Taken);
    }

    pub(crate) fn compute(&mut self, image: u64, work: &SliceWork) -> Vec<f32> {
        let slice = work.slice(image, 0, 0);
        self.post(&work.x, &[slice]);
        let sums = self.read(0, slice.sums_elements as usize);
        self.producer.rest();
        sums
    }
}

pub(crate) struct AttachedPeer {
    pub(crate) connection: ExecutorEnd,
    pub(crate) pid: u32,
    pub(crate) worker: WorkerNumber,
}

impl AttachedPeer {
    /// Offers an adapter and returns the worker's answer: an error with the reason if it is not mapped.
    pub(crate) fn offer(&self, number: u64, image: &Image) -> Result<(), String> {
        let bytes = (*image.bytes()).as_ref().len() as u64;
        self.offer_fd(number, bytes, image.fd())
    }

    pub(crate) fn offer_fd(
        &self,
        number: u64,
        bytes: u64,
        fd: std::os::fd::BorrowedFd<'_>,
    ) -> Result<(), String> {
        let offered = ToWorker::AdapterOffered(AdapterOffered { image: number, bytes });
        self.connection.send(&offered, &[fd]).unwrap();
        match received(&self.connection) {
            FromWorker::AdapterMapped(mapped) if mapped == number => Ok(()),
            FromWorker::AdapterRejected(rejected) if rejected.image == number => Err(rejected.reason),
            other => panic!("{other:?} is no answer to an offer"),
        }
    }

    /// Offers an adapter to a worker that may be killed; returns whether it answers.
    pub(crate) fn try_offer(&self, number: u64, image: &Image) -> bool {
        let bytes = (*image.bytes()).as_ref().len() as u64;
        let offered = ToWorker::AdapterOffered(AdapterOffered { image: number, bytes });
        if self.connection.send(&offered, &[image.fd()]).is_err() {
            return false;
        }
        let mut answer = Ok(None);
        until("it answers or dies", || {
            answer = self.connection.receive();
            !matches!(answer, Ok(None))
        });
        answer.is_ok()
    }

    pub(crate) fn withdraw(&self, number: u64) {
        self.connection.send(&ToWorker::AdapterWithdrawn(number), &[]).unwrap();
    }

    pub(crate) fn until_gone(&self) {
        until("the worker hangs up", || matches!(self.connection.receive(), Err(ReceiveError::Closed)));
    }
}

fn seated(offer: &ConsumerHandle) -> ToWorker {
    let [control_bytes, x_bytes, sums_bytes] = offer.bytes().map(|bytes| bytes as u64);
    let (seat, worker) = (offer.seat.0, offer.worker.get());
    ToWorker::Seated(SlotGranted { seat, worker, control_bytes, x_bytes, sums_bytes })
}

fn received(connection: &ExecutorEnd) -> FromWorker {
    until_some("the worker says something", || connection.receive().unwrap()).0
}

/// Deterministic values in -0.5..0.5.
pub(crate) fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

#[derive(Clone, Copy)]
pub(crate) struct ModuleShape {
    pub(crate) module: u32,
    pub(crate) rank: usize,
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    pub(crate) precision: LoraPrecision,
}

impl ModuleShape {
    pub(crate) fn new(module: u32, rank: usize, columns: usize, rows: usize) -> Self {
        Self { module, rank, columns, rows, precision: LoraPrecision::Exact }
    }
}

/// An adapter of these modules with random values of `seed`.
pub(crate) fn adapter(seed: u32, shapes: &[ModuleShape]) -> Image {
    let (mut data, mut entries) = (Vec::new(), Vec::new());
    for shape in shapes {
        let &ModuleShape { module, rank, columns, rows, precision } = shape;
        let a = numbers(seed ^ module, rank * columns);
        let b = numbers(seed ^ module ^ 0xB, rows * rank);
        let layout = MatrixLayout::append(&mut data, rank, columns, rows, 0.5, &a, &b, precision);
        entries.push(entry(module, &layout));
    }
    Image::build(&entries, &data).unwrap()
}

pub(crate) fn entry(module: u32, layout: &MatrixLayout) -> ImageEntry {
    let word = |number: usize| u32::try_from(number).unwrap();
    ImageEntry {
        module,
        rank: word(layout.rank),
        columns: word(layout.columns),
        rows: word(layout.rows),
        scale: layout.scale,
        a_kind: layout.a.kind as u8,
        b_kind: layout.b.kind as u8,
        a_offset: layout.a.offset as u64,
        b_offset: layout.b.offset as u64,
    }
}

fn matrix(image: &Image, module: u32) -> LoraMatrix {
    let entry = image.entry(module).unwrap();
    let factor = |kind, offset: u64| FactorLayout {
        kind: ElementKind::from_code(kind).unwrap(),
        offset: usize::try_from(offset).unwrap(),
    };
    let layout = MatrixLayout {
        rank: entry.rank as usize,
        columns: entry.columns as usize,
        rows: entry.rows as usize,
        scale: entry.scale,
        a: factor(entry.a_kind, entry.a_offset),
        b: factor(entry.b_kind, entry.b_offset),
    };
    let bytes: SharedBytes = image.bytes();
    LoraMatrix::over(&bytes, layout).unwrap()
}

/// Rows of x for the first ranks of one module.
pub(crate) struct SliceWork {
    pub(crate) x: Vec<f32>,
    module: u32,
    rows: usize,
    columns: usize,
    outputs: usize,
    ranks: usize,
}

impl SliceWork {
    pub(crate) fn of(shape: &ModuleShape, rows: usize) -> Self {
        let &ModuleShape { module, rank, columns, rows: outputs, .. } = shape;
        Self { x: numbers(module + 77, rows * columns), module, rows, columns, outputs, ranks: rank }
    }

    pub(crate) fn with_ranks(self, ranks: usize) -> Self {
        Self { ranks, ..self }
    }

    pub(crate) fn slice(&self, image: u64, x_offset: usize, sums_offset: usize) -> Slice {
        let word = |number: usize| u32::try_from(number).unwrap();
        Slice {
            image,
            module: self.module,
            first_row: 0,
            rows: word(self.rows),
            width: word(self.columns),
            first_rank: 0,
            last_rank: word(self.ranks),
            x_offset: word(x_offset),
            sums_offset: sums_offset as u64,
            sums_elements: word(self.rows * self.outputs),
        }
    }

    /// Expected sums, bit for bit.
    pub(crate) fn expected(&self, image: &Image) -> Vec<f32> {
        let matrix = matrix(image, self.module);
        let mut sums = vec![0.0; self.rows * self.outputs];
        sum_ranks(Isa::best(), &self.x, &matrix, 0..self.ranks, &mut sums);
        sums
    }
}

/// Several works as one job: all rows of x, and the slices.
pub(crate) fn job(image: u64, works: &[SliceWork]) -> (Vec<f32>, Vec<Slice>) {
    let (mut x, mut slices, mut sums) = (Vec::new(), Vec::new(), 0usize);
    for work in works {
        let slice = work.slice(image, x.len(), sums);
        sums = (sums + slice.sums_elements as usize).next_multiple_of(SUMS_ALIGN);
        x.extend(&work.x);
        slices.push(slice);
    }
    (x, slices)
}

/// Bits of the values, so that NaN can be compared.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
