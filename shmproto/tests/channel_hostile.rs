//! A hostile client writes arbitrary words into its channel. The executor neither panics nor waits.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a channel that cannot be set up has failed")]

use std::{
    sync::atomic::{
        AtomicBool,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use shmproto::{
    channel::{ClientChannel, Doorbell, ExecutorChannel, Geometry, RingFull, Violation, wait_any},
    layer::{
        CallClass, CallHeader, CallStatus, Dtype, HeaderError, ReplyHeader, RowSource, SiteOp, SitePath,
    },
    region::{Access, Region},
};
use testkit::WATCHDOG;

const GEOMETRY: Geometry = Geometry { slab_bytes: 512, depth: 4 };

/// Words of the head: seven cache lines.
const HEAD_WORDS: usize = 7 * 16;

/// Words of the head and of both rings.
const SLAB_WORD: usize = HEAD_WORDS + 2 * 4 * 16;

/// Offsets of the counters and of the first call, in words.
const SUBMITTED: usize = 16;
const TAKEN: usize = 32;
const REPLIED: usize = 48;
const COLLECTED: usize = 64;

fn channel() -> (ExecutorChannel, ClientChannel, Region) {
    let executor = ExecutorChannel::create(GEOMETRY).unwrap();
    let fd = || executor.fd().unwrap().try_clone_to_owned().unwrap();
    let client = ClientChannel::join(fd(), executor.region_bytes(), GEOMETRY).unwrap();
    let region = Region::map(fd(), 1..=1 << 20, Access::ReadWrite).unwrap();
    (executor, client, region)
}

fn call(sequence: u64) -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 0,
        part: None,
        source: RowSource::Rows,
        sequence,
        rows: 1,
        input: 64,
        output: 256,
    }
}

/// Runs all operations of the executor on a channel, at most as often as an honest ring allows; returns the
/// violation.
fn pass(executor: &mut ExecutorChannel) -> Option<Violation> {
    let bell = Doorbell::default();
    wait_any(&bell, std::iter::once(&*executor), Duration::ZERO, Some(Instant::now()));
    let mut rows = [0.0; 16];
    for _ in 0..GEOMETRY.depth {
        let call = match executor.take() {
            Ok(Some(call)) => call,
            Ok(None) => return None,
            Err(violation) => return Some(violation),
        };
        let answered = executor
            .read_rows(call.input, call.dtype, &mut rows)
            .and_then(|()| executor.write_rows(call.output, call.dtype, &rows))
            .and_then(|()| executor.reply(&ReplyHeader::refusal(&call, CallStatus::Done, 0)));
        if let Err(violation) = answered {
            return Some(violation);
        }
    }
    None
}

/// Runs the client's operations, with an executor in any state.
fn client_pass(client: &mut ClientChannel) -> Option<Violation> {
    let _ = client.submit(&call(9));
    for _ in 0..GEOMETRY.depth {
        match client.wait(Duration::ZERO, Duration::ZERO) {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(violation) => return Some(violation),
        }
    }
    None
}

#[test]
fn every_word_of_the_region_may_be_flipped_at_every_step() {
    let words = channel().2.words().len();
    assert_eq!(words, SLAB_WORD + 128);
    for index in 0..words {
        for step in 0..4 {
            for flip in [u32::MAX, 1, 1 << 31, 0x0101_0101] {
                let (mut executor, mut client, region) = channel();
                let word = &region.words()[index];
                let spoil = |at| {
                    if at == step {
                        word.fetch_xor(flip, SeqCst);
                    }
                };
                spoil(0);
                client.write_rows(64, Dtype::F32, &[1.0; 16]).unwrap();
                let submitted = client.submit(&call(1));
                spoil(1);
                pass(&mut executor);
                spoil(2);
                let _ = client_pass(&mut client);
                spoil(3);
                pass(&mut executor);
                client_pass(&mut client);
                // The executor uses its own copy of these words, so changes of them, or of the client's
                // flags, have no effect.
                assert!(submitted.is_ok() || submitted == Err(RingFull));
            }
        }
    }
}

#[test]
fn a_count_that_jumps_is_a_violation_on_both_sides() {
    for count in [5, 6, 1 << 31, u32::MAX] {
        let (mut executor, mut client, region) = channel();
        region.words()[SUBMITTED].store(count, SeqCst);
        assert_eq!(executor.take(), Err(Violation::Jump { count, ours: 0, depth: 4 }));
        // A reader whose counter lags behind only harms itself.
        let behind = count.min(u32::MAX - 4);
        region.words()[COLLECTED].store(behind, SeqCst);
        let reply = ReplyHeader::refusal(&call(1), CallStatus::Done, 0);
        assert!(matches!(executor.reply(&reply), Err(Violation::Jump { .. })));
        region.words()[REPLIED].store(count, SeqCst);
        assert_eq!(client.try_take(), Err(Violation::Jump { count, ours: 0, depth: 4 }));
        region.words()[TAKEN].store(behind, SeqCst);
        assert_eq!(
            client.submit(&call(1)),
            Err(RingFull),
            "an executor that counts what it never got has no room"
        );
    }
    let (mut executor, _client, region) = channel();
    region.words()[SUBMITTED].store(2, SeqCst);
    assert!(matches!(executor.take(), Err(Violation::Header(HeaderError::Magic(0)))), "nothing was written");
}

#[test]
fn a_client_that_never_takes_its_answers_fills_its_own_ring_and_no_more() {
    let (mut executor, mut client, _region) = channel();
    for sequence in 1..=4 {
        client.submit(&call(sequence)).unwrap();
        assert_eq!(pass(&mut executor), None);
    }
    client.submit(&call(5)).unwrap();
    assert_eq!(pass(&mut executor), Some(Violation::Full));
    assert_eq!(client.try_take().unwrap().unwrap().sequence, 1, "and those before are still there");
}

#[test]
fn a_place_outside_the_slab_is_a_violation() {
    for (input, output) in
        [(512, 0), (0, 512), (8, 0), (0, 8), (u64::MAX, 0), (0, u64::MAX - 63), (1 << 63, 0), (1 << 32, 0)]
    {
        let (mut executor, mut client, _region) = channel();
        client.submit(&CallHeader { input, output, ..call(1) }).unwrap();
        assert!(matches!(executor.take(), Err(Violation::Place(_))), "{input} {output}");
    }
    let (mut executor, mut client, _region) = channel();
    client.submit(&CallHeader { input: 448, output: 448, ..call(1) }).unwrap();
    assert_eq!(pass(&mut executor), None, "it may lie over itself");
    let mut rows = [0.0; 17];
    assert!(matches!(executor.read_rows(448, Dtype::F32, &mut rows), Err(Violation::Place(_))));
    assert!(matches!(executor.write_rows(448, Dtype::F32, &rows), Err(Violation::Place(_))));
}

#[test]
fn a_client_that_scribbles_all_the_time_gets_garbage_or_a_violation() {
    let (mut executor, _client, region) = channel();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let scribbler = scope.spawn(|| {
            let mut state = 1_u32;
            while !stop.load(Relaxed) {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let words = region.words();
                words[state as usize / 8 % words.len()].store(state.rotate_left(7), Relaxed);
                words[SUBMITTED].store(words[TAKEN].load(Relaxed).wrapping_add(1), Relaxed);
            }
        });
        let end = Instant::now() + WATCHDOG;
        let (mut passes, mut violations) = (0, 0);
        while passes < 20_000 || (violations == 0 && Instant::now() < end) {
            passes += 1;
            violations += u32::from(pass(&mut executor).is_some());
        }
        stop.store(true, Relaxed);
        scribbler.join().unwrap();
        assert!(violations > 0, "it was not seen at all");
    });
}

#[test]
fn a_client_that_wakes_without_reason_does_not_end_a_wait() {
    let (executor, _client, region) = channel();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let waker = scope.spawn(|| {
            while !stop.load(Relaxed) {
                let _ = rustix::thread::futex::wake(
                    &region.words()[SUBMITTED],
                    rustix::thread::futex::Flags::empty(),
                    1,
                );
            }
        });
        let until = Instant::now() + Duration::from_millis(30);
        let bell = Doorbell::default();
        wait_any(&bell, std::iter::once(&executor), Duration::ZERO, Some(until));
        stop.store(true, Relaxed);
        waker.join().unwrap();
        assert!(Instant::now() >= until);
    });
}

proptest! {
    #[test]
    fn arbitrary_regions_are_calls_or_violations(
        words in prop::collection::vec(any::<u32>(), SLAB_WORD),
        count in 0..8_u32,
    ) {
        let (mut executor, mut client, region) = channel();
        for (word, value) in region.words().iter().zip(words) {
            word.store(value, Relaxed);
        }
        region.words()[SUBMITTED].store(count, SeqCst);
        region.words()[REPLIED].store(count, SeqCst);
        prop_assert_eq!(pass(&mut executor).is_some(), count > 0);
        prop_assert_eq!(client.try_take().is_err(), count > 0);
    }
}
