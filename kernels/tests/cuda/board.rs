//! The board's device end: rows arrive before their signal, waits end when they should, answers are added.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use kernels::{
    cuda::{
        CudaError, CudaStream, HostMapping, Matrix, Pinned,
        board::{
            NativeCopy, RowSpans, Signal, SumsTarget, WaitMethod, add_sums, await_value, copy_and_signal,
            copy_native, has_reached,
        },
    },
    lora::ElementKind,
};

use crate::support::{KINDS, SeededNumbers, assert_close, epsilon, matrix, rounded, stream};

const SLAB: usize = 8192;

#[repr(align(4096))]
struct SharedSlab([AtomicU32; SLAB]);

impl AsRef<[AtomicU32]> for SharedSlab {
    fn as_ref(&self) -> &[AtomicU32] {
        &self.0
    }
}

impl SharedSlab {
    fn new() -> Arc<Self> {
        Arc::new(Self([const { AtomicU32::new(UNWRITTEN) }; SLAB]))
    }

    fn at(&self, index: usize) -> f32 {
        f32::from_bits(self.0[index].load(Ordering::Relaxed))
    }
}

/// Bits that no test writes.
const UNWRITTEN: u32 = 0x7FC0_1234;

/// A limit that no working wait reaches.
const PATIENT: WaitMethod = WaitMethod::Kernel { limit_us: 60_000_000 };

fn register(stream: &CudaStream, slab: &Arc<SharedSlab>) -> HostMapping {
    HostMapping::register(stream.cuda(), Arc::clone(slab) as _).unwrap()
}

fn spin(signal: &Signal, value: u32) {
    while !has_reached(signal.load(), value) {
        thread::yield_now();
    }
}

#[test]
fn spans_of_every_kind_are_packed_as_singles_and_nothing_else_is_written() {
    let Some(stream) = stream() else { return };
    let slab = SharedSlab::new();
    let mapping = register(&stream, &slab);
    let signal = Signal::new(stream.cuda()).unwrap();
    let mut spans = RowSpans::new(stream.cuda()).unwrap();
    let mut native = NativeCopy::new(stream.cuda(), SLAB).unwrap();
    let mut value = 0;
    for kind in KINDS {
        for (width, at) in [(64, 0), (37, 5), (64, 3), (4, 16), (1, 1)] {
            let values = rounded(kind, &SeededNumbers::new(width as u64).normals(40 * width));
            let x = matrix(&stream, kind, width, &values);
            spans.upload(&stream, &[(3, 1), (0, 2), (20, 0), (9, 25)]).unwrap();
            for way in ["fused", "native"] {
                slab.0.iter().for_each(|word| word.store(UNWRITTEN, Ordering::Relaxed));
                value += 1;
                if way == "fused" {
                    copy_and_signal(&stream, &x, &spans, &mapping, at, &signal, value).unwrap();
                } else {
                    copy_native(&stream, &x, &spans, &mut native, &mapping, at, &signal, value).unwrap();
                }
                spin(&signal, value);
                let rows = [3].into_iter().chain(0..2).chain(9..34);
                let want: Vec<f32> = rows.flat_map(|row| &values[row * width..][..width]).copied().collect();
                for (index, want) in want.iter().enumerate() {
                    let got = slab.at(at + index);
                    assert_eq!(got.to_bits(), want.to_bits(), "{way} {kind:?} {width}: number {index}");
                }
                let others = (0..at).chain(at + want.len()..SLAB);
                for index in others {
                    assert_eq!(slab.0[index].load(Ordering::Relaxed), UNWRITTEN, "{way}: word {index}");
                }
            }
        }
    }
}

#[test]
fn rows_reach_memory_that_the_driver_does_not_know_by_the_native_way() {
    let Some(stream) = stream() else { return };
    let slab = SharedSlab::new();
    let mapping = HostMapping::unregistered(stream.cuda(), Arc::clone(&slab) as _);
    assert!(!mapping.is_registered());
    let signal = Signal::new(stream.cuda()).unwrap();
    let mut spans = RowSpans::new(stream.cuda()).unwrap();
    spans.upload(&stream, &[(1, 2)]).unwrap();
    let values = SeededNumbers::new(5).normals(4 * 24);
    let x = matrix(&stream, ElementKind::F32, 24, &values);
    let mut native = NativeCopy::new(stream.cuda(), 48).unwrap();
    copy_native(&stream, &x, &spans, &mut native, &mapping, 7, &signal, 1).unwrap();
    assert_eq!(signal.load(), 1);
    (0..48).for_each(|index| assert_eq!(slab.at(7 + index), values[24 + index]));
    assert_eq!(slab.0[6].load(Ordering::Relaxed), UNWRITTEN);
}

#[test]
fn a_copy_without_rows_still_signals() {
    let Some(stream) = stream() else { return };
    let mapping = register(&stream, &SharedSlab::new());
    let signal = Signal::new(stream.cuda()).unwrap();
    let spans = RowSpans::new(stream.cuda()).unwrap();
    let x = matrix(&stream, ElementKind::Bf16, 8, &[1.0; 8]);
    copy_and_signal(&stream, &x, &spans, &mapping, 0, &signal, 1).unwrap();
    spin(&signal, 1);
    let mut native = NativeCopy::new(stream.cuda(), 0).unwrap();
    copy_native(&stream, &x, &spans, &mut native, &mapping, 0, &signal, 2).unwrap();
    assert_eq!(signal.load(), 2);
}

/// Rows of the conversation, and values of each.
const ROWS: usize = 12;
const WIDTH: usize = 512;

/// Device and host alternate requests and answers for `rounds` rounds, synchronized only by signals.
fn converse(stream: &CudaStream, rounds: u32, rows: usize, way: WaitMethod) {
    let slab = SharedSlab::new();
    let mapping = register(stream, &slab);
    let (asked, answered) = (Signal::new(stream.cuda()).unwrap(), Signal::new(stream.cuda()).unwrap());
    let sums = Pinned::<f32>::new(stream.cuda(), rows * WIDTH).unwrap();
    let mut spans = RowSpans::new(stream.cuda()).unwrap();
    spans.upload(stream, &[(0, rows)]).unwrap();
    // Each round has another matrix than the one before.
    let number = |version: u32, index: usize| (version * 1000) as f32 + (index % 97) as f32;
    let asks: Vec<Matrix> = (0..4)
        .map(|version| {
            let values: Vec<f32> = (0..rows * WIDTH).map(|index| number(version, index)).collect();
            matrix(stream, ElementKind::F32, WIDTH, &values)
        })
        .collect();
    let mut out = matrix(stream, ElementKind::F32, WIDTH, &vec![0.0; rows * WIDTH]);
    let place = SumsTarget { at: 0, rows, width: WIDTH, first_row: 0, column: 0 };
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut answer = vec![0.0; rows * WIDTH];
            for round in 1..=rounds {
                spin(&asked, round);
                for (index, answer) in answer.iter_mut().enumerate() {
                    let (got, want) = (slab.at(index), number(round % 4, index));
                    // A panic here would block the device, so the answer reports the error.
                    *answer = if got == want { ((index + round as usize) % 3) as f32 } else { f32::NAN };
                }
                sums.write(0, &answer);
                answered.store(round);
            }
        });
        for round in 1..=rounds {
            copy_and_signal(stream, &asks[round as usize % 4], &spans, &mapping, 0, &asked, round).unwrap();
            await_value(stream, &answered, round, way).unwrap();
            add_sums(stream, &sums, place, &mut out).unwrap();
        }
        stream.synchronize().unwrap();
    });
    answered.take_fault().unwrap();
    for (index, got) in out.to_vec(stream).unwrap().into_iter().enumerate() {
        let want: usize = (1..=rounds as usize).map(|round| (index + round) % 3).sum();
        assert_eq!(got, want as f32, "number {index}: rows came late, or an answer was lost");
    }
}

#[test]
fn rows_arrive_before_their_signal_and_answers_before_they_are_added() {
    let Some(stream) = stream() else { return };
    for way in [WaitMethod::StreamMemory, PATIENT] {
        converse(&stream, 200, ROWS, way);
    }
}

#[test]
fn ten_thousand_rounds_lose_nothing() {
    let Some(stream) = stream() else { return };
    converse(&stream, 5_000, 1, WaitMethod::StreamMemory);
    converse(&stream, 5_000, 1, PATIENT);
}

#[test]
fn a_wait_that_nobody_answers_ends_and_is_reported_once() {
    let Some(stream) = stream() else { return };
    let signal = Signal::new(stream.cuda()).unwrap();
    for value in 1..100 {
        // With a limit for each wait this would take 20 s.
        await_value(&stream, &signal, value, WaitMethod::Kernel { limit_us: 200_000 }).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(signal.take_fault(), Err(CudaError::Unanswered));
    assert_eq!(signal.take_fault(), Ok(()));
    signal.store(7);
    await_value(&stream, &signal, 7, WaitMethod::Kernel { limit_us: 0 }).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(signal.take_fault(), Ok(()), "what was answered before needs no wait");
}

#[test]
fn numbers_may_wrap() {
    let Some(stream) = stream() else { return };
    let signal = Signal::new(stream.cuda()).unwrap();
    signal.store(u32::MAX - 1);
    for way in [WaitMethod::StreamMemory, PATIENT] {
        for value in [u32::MAX - 5, u32::MAX - 1] {
            await_value(&stream, &signal, value, way).unwrap();
        }
        stream.synchronize().unwrap();
    }
    assert!(!has_reached(signal.load(), u32::MAX) && !has_reached(signal.load(), 3));
    signal.store(3);
    assert!(has_reached(signal.load(), u32::MAX) && has_reached(signal.load(), 3));
    for way in [WaitMethod::StreamMemory, PATIENT] {
        await_value(&stream, &signal, u32::MAX, way).unwrap();
        stream.synchronize().unwrap();
    }
    signal.take_fault().unwrap();
}

#[test]
fn sums_are_added_where_they_belong_and_nowhere_else() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(5);
    for kind in KINDS {
        for place in [
            SumsTarget { at: 0, rows: 3, width: 16, first_row: 2, column: 8 },
            SumsTarget { at: 5, rows: 3, width: 16, first_row: 0, column: 24 },
            SumsTarget { at: 8, rows: 1, width: 7, first_row: 4, column: 3 },
            SumsTarget { at: 0, rows: 5, width: 40, first_row: 0, column: 0 },
            SumsTarget { at: 0, rows: 0, width: 40, first_row: 5, column: 0 },
        ] {
            let SumsTarget { at, rows, width, first_row, column } = place;
            let values = rounded(kind, &random.normals(5 * 40));
            let add = random.normals(rows * width);
            let sums = Pinned::<f32>::new(stream.cuda(), 256).unwrap();
            sums.write(at, &add);
            let mut out = matrix(&stream, kind, 40, &values);
            add_sums(&stream, &sums, place, &mut out).unwrap();
            let got = out.to_vec(&stream).unwrap();
            let mut want = values.clone();
            for index in 0..rows * width {
                want[(first_row + index / width) * 40 + column + index % width] += add[index];
            }
            assert_close(&format!("{kind:?} {place:?}"), &got, &want, epsilon(kind));
            for index in 0..5 * 40 {
                let (row, col) = (index / 40, index % 40);
                let inside =
                    (first_row..first_row + rows).contains(&row) && (column..column + width).contains(&col);
                assert!(inside || got[index].to_bits() == values[index].to_bits(), "number {index}");
            }
        }
    }
}
