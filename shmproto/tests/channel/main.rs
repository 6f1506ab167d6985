//! One set of tests for every transport of the channel: the heap of one process, and a region mapped twice.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a channel that cannot be set up has failed")]

use std::{
    sync::Arc,
    task::Waker,
    thread,
    time::{Duration, Instant},
};

use shmproto::{
    channel::{
        ChannelError, ClientChannel, Doorbell, ExecutorChannel, Geometry, GeometryError, JoinError,
        MAX_DEPTH, MAX_SLAB_BYTES, RingFull, Violation, WakeCause, wait_any,
    },
    layer::{CallClass, CallHeader, CallStatus, Dtype, ReplyHeader, RowSource, SiteOp, SitePath},
    region::{PeerAccess, Region, RegionError},
};
use testkit::WATCHDOG;

mod child_process;
mod handed_over;

const GEOMETRY: Geometry = Geometry { slab_bytes: 1 << 14, depth: 4 };

/// A timeout that no test reaches.
const LONG: Duration = Duration::from_secs(20);

/// Access of a client to the executor's memory.
trait ChannelTransport {
    fn channel(geometry: Geometry) -> (ExecutorChannel, ClientChannel);
}

struct InProcess;

impl ChannelTransport for InProcess {
    fn channel(geometry: Geometry) -> (ExecutorChannel, ClientChannel) {
        ExecutorChannel::in_process(geometry).unwrap()
    }
}

struct Mapped;

impl ChannelTransport for Mapped {
    fn channel(geometry: Geometry) -> (ExecutorChannel, ClientChannel) {
        let executor = ExecutorChannel::create(geometry).unwrap();
        let fd = executor.fd().unwrap().try_clone_to_owned().unwrap();
        let client = ClientChannel::join(fd, executor.region_bytes(), geometry).unwrap();
        (executor, client)
    }
}

fn call(sequence: u64) -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 3,
        part: Some(1),
        source: RowSource::Rows,
        sequence,
        rows: 2,
        input: 128,
        output: 1024,
    }
}

fn reply(call: &CallHeader) -> ReplyHeader {
    ReplyHeader { rows: call.rows, batch_rows: 9, ..ReplyHeader::refusal(call, CallStatus::Done, 0) }
}

fn wait_one(bell: &Doorbell, executor: &ExecutorChannel, spin: Duration, limit: Duration) -> WakeCause {
    wait_any(bell, std::iter::once(executor), spin, Some(Instant::now() + limit))
}

/// Answers calls with doubled rows until one has sequence 0.
fn serve(executor: &mut ExecutorChannel, numbers: usize, spin: Duration) {
    let (bell, mut rows) = (Doorbell::default(), vec![0.0; numbers]);
    let end = Instant::now() + WATCHDOG;
    loop {
        while let Some(call) = executor.take().unwrap() {
            if call.sequence == 0 {
                return;
            }
            executor.read_rows(call.input, call.dtype, &mut rows).unwrap();
            rows.iter_mut().for_each(|x| *x *= 2.0);
            executor.write_rows(call.output, call.dtype, &rows).unwrap();
            executor.reply(&reply(&call)).unwrap();
        }
        assert!(Instant::now() < end, "nobody says that it is over");
        wait_one(&bell, executor, spin, LONG);
    }
}

fn calls_and_replies_arrive_in_order_until_a_ring_is_full<T: ChannelTransport>() {
    let (mut executor, mut client) = T::channel(GEOMETRY);
    for round in 0..3_u64 {
        assert_eq!(executor.take(), Ok(None));
        let sequences = round * 10 + 1..=round * 10 + 4;
        for sequence in sequences.clone() {
            client.submit(&call(sequence)).unwrap();
        }
        assert_eq!(client.submit(&call(99)), Err(RingFull));
        for sequence in sequences.clone() {
            assert_eq!(executor.take(), Ok(Some(call(sequence))));
        }
        assert_eq!(executor.take(), Ok(None));
        for sequence in sequences.clone() {
            executor.reply(&reply(&call(sequence))).unwrap();
        }
        assert_eq!(executor.reply(&reply(&call(99))), Err(Violation::Full));
        for sequence in sequences {
            assert_eq!(client.try_take(), Ok(Some(reply(&call(sequence)))));
        }
        assert_eq!(client.try_take(), Ok(None));
    }
}

fn rows_travel_both_ways_in_both_formats<T: ChannelTransport>() {
    let (executor, client) = T::channel(GEOMETRY);
    let rows: Vec<f32> = (0..601).map(|number| number as f32 / 7.0 - 20.0).collect();
    let rounded = |x: &f32| {
        let nearest = [x.to_bits() & 0xffff_0000, (x.to_bits() & 0xffff_0000) + 0x1_0000].map(f32::from_bits);
        nearest.into_iter().min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs())).unwrap()
    };
    for dtype in Dtype::ALL.iter().copied() {
        let wanted: Vec<f32> = match dtype {
            Dtype::F32 => rows.clone(),
            Dtype::Bf16 => rows.iter().map(rounded).collect(),
        };
        let mut found = vec![0.0; rows.len()];
        client.write_rows(64, dtype, &rows).unwrap();
        executor.read_rows(64, dtype, &mut found).unwrap();
        assert_eq!(found, wanted);
        executor.write_rows(4096, dtype, &rows).unwrap();
        client.read_rows(4096, dtype, &mut found).unwrap();
        assert_eq!(found, wanted);
        let end = GEOMETRY.slab_bytes - 64;
        let most = 64 / dtype.bytes();
        executor.write_rows(end, dtype, &vec![1.0; most]).unwrap();
        assert!(matches!(executor.write_rows(end, dtype, &vec![1.0; most + 1]), Err(Violation::Place(_))));
        assert!(client.read_rows(end + 64, dtype, &mut [0.0]).is_err());
        assert!(client.write_rows(8, dtype, &[0.0]).is_err(), "off a line");
    }
}

fn a_thousand_calls_are_answered_whether_who_waits_spins_or_sleeps<T: ChannelTransport>() {
    for spin in [Duration::ZERO, Duration::from_micros(20), LONG] {
        let (mut executor, mut client) = T::channel(GEOMETRY);
        thread::scope(|scope| {
            let server = scope.spawn(|| serve(&mut executor, 6, spin));
            for sequence in 1..=1000_u16 {
                let row = [f32::from(sequence); 6];
                client.write_rows(128, Dtype::F32, &row).unwrap();
                client.submit(&call(sequence.into())).unwrap();
                let answer = client.wait(spin, LONG).unwrap().expect("an answer");
                assert_eq!(answer, reply(&call(sequence.into())));
                let mut found = [0.0; 6];
                client.read_rows(1024, Dtype::F32, &mut found).unwrap();
                assert_eq!(found, row.map(|x| 2.0 * x));
            }
            client.submit(&call(0)).unwrap();
            server.join().unwrap();
        });
    }
}

fn who_waits_for_nothing_comes_back_when_its_time_is_over<T: ChannelTransport>() {
    let (executor, mut client) = T::channel(GEOMETRY);
    for spin in [Duration::ZERO, Duration::from_millis(5)] {
        let start = Instant::now();
        assert_eq!(client.wait(spin, Duration::from_millis(30)), Ok(None));
        assert!(start.elapsed() >= Duration::from_millis(30));
        let start = Instant::now();
        assert_eq!(
            wait_one(&Doorbell::default(), &executor, spin, Duration::from_millis(30)),
            WakeCause::Late
        );
        assert!(start.elapsed() >= Duration::from_millis(30));
    }
}

macro_rules! on_every_transport {
    ($($test:ident)*) => {
        mod in_process { $(#[test] fn $test() { super::$test::<super::InProcess>(); })* }
        mod mapped { $(#[test] fn $test() { super::$test::<super::Mapped>(); })* }
    };
}

on_every_transport! {
    calls_and_replies_arrive_in_order_until_a_ring_is_full
    rows_travel_both_ways_in_both_formats
    a_thousand_calls_are_answered_whether_who_waits_spins_or_sleeps
    who_waits_for_nothing_comes_back_when_its_time_is_over
}

#[test]
fn one_wait_watches_many_channels_and_the_bell() {
    for count in [0_usize, 1, 3, 127, 130] {
        let (mut executors, mut clients): (Vec<_>, Vec<_>) =
            (0..count).map(|_| Mapped::channel(GEOMETRY)).unzip();
        let bell = Arc::new(Doorbell::default());
        let wait = |executors: &[ExecutorChannel]| {
            wait_any(&bell, executors.iter(), Duration::ZERO, Some(Instant::now() + LONG))
        };
        for caller in [0, count / 2, count.saturating_sub(1)] {
            let Some(client) = clients.get_mut(caller) else { continue };
            let woken = thread::scope(|scope| {
                let caller = scope.spawn(|| {
                    thread::sleep(Duration::from_millis(20));
                    client.submit(&call(5)).unwrap();
                });
                let woken = wait(&executors);
                caller.join().unwrap();
                woken
            });
            assert_eq!(woken, WakeCause::Called, "{caller} of {count}");
            let calling: Vec<usize> = (0..count).filter(|&index| executors[index].has_calls()).collect();
            assert_eq!(calling, [caller]);
            assert_eq!(executors[caller].take(), Ok(Some(call(5))));
        }
        let woken = thread::scope(|scope| {
            let ringer = scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                Waker::from(Arc::clone(&bell)).wake();
            });
            let woken = wait(&executors);
            ringer.join().unwrap();
            woken
        });
        assert_eq!(woken, WakeCause::Rung, "of {count}");
        bell.ring();
        bell.ring();
        assert_eq!(wait(&executors), WakeCause::Rung, "it rang before anybody waited");
        assert_eq!(wait_any(&bell, executors.iter(), Duration::ZERO, Some(Instant::now())), WakeCause::Late);
    }
}

#[test]
fn a_channel_is_as_large_as_it_may_be_and_no_larger() {
    assert_eq!(Geometry::rounded(1, 3), Ok(Geometry { slab_bytes: 64, depth: 4 }));
    assert_eq!(Geometry::rounded(65, 4), Ok(Geometry { slab_bytes: 128, depth: 4 }));
    assert_eq!(Geometry::rounded(MAX_SLAB_BYTES + 1, 1), Err(GeometryError::Slab(MAX_SLAB_BYTES + 64)));
    assert_eq!(Geometry::rounded(u64::MAX, 1), Err(GeometryError::Slab(u64::MAX)));
    assert_eq!(Geometry::rounded(64, MAX_DEPTH + 1), Err(GeometryError::Depth(2 * MAX_DEPTH)));
    assert_eq!(Geometry::rounded(64, u32::MAX), Err(GeometryError::Depth(u32::MAX)));
    for geometry in [
        Geometry { slab_bytes: 0, depth: 1 },
        Geometry { slab_bytes: 65, depth: 1 },
        Geometry { slab_bytes: 64, depth: 0 },
        Geometry { slab_bytes: 64, depth: 3 },
    ] {
        assert!(matches!(ExecutorChannel::create(geometry), Err(ChannelError::Geometry(_))), "{geometry:?}");
        assert!(ExecutorChannel::in_process(geometry).is_err());
    }
    let (executor, _client) = Mapped::channel(GEOMETRY);
    assert_eq!(executor.region_bytes(), 448 + 2 * 4 * 64 + (1 << 14));
}

#[test]
fn a_client_checks_the_region_it_is_given() {
    let executor = ExecutorChannel::create(GEOMETRY).unwrap();
    let fd = || executor.fd().unwrap().try_clone_to_owned().unwrap();
    let bytes = executor.region_bytes();
    let other = Geometry { depth: 8, ..GEOMETRY };
    assert!(matches!(ClientChannel::join(fd(), bytes, other), Err(JoinError::Size { .. })));
    assert!(matches!(ClientChannel::join(fd(), bytes + 64, GEOMETRY), Err(JoinError::Size { .. })));
    assert!(matches!(
        ClientChannel::join(fd(), other.region_bytes(), other),
        Err(JoinError::Region(RegionError::PeerSize { .. }))
    ));
    assert!(matches!(
        ClientChannel::join(fd(), bytes, Geometry { depth: 3, ..GEOMETRY }),
        Err(JoinError::Geometry(_))
    ));
    let region =
        Region::create("test-channel", usize::try_from(bytes).unwrap(), PeerAccess::ReadWrite).unwrap();
    let given = || region.fd().try_clone_to_owned().unwrap();
    assert!(matches!(ClientChannel::join(given(), bytes, GEOMETRY), Err(JoinError::Magic { found: 0 })));
    for (index, half) in [(0, *b"HOLO"), (1, *b"CHAN")] {
        region.words()[index].store(u32::from_le_bytes(half), std::sync::atomic::Ordering::SeqCst);
    }
    assert!(matches!(ClientChannel::join(given(), bytes, GEOMETRY), Err(JoinError::Layout { found: 0 })));
    let file = tempfile::tempfile().unwrap().into();
    assert!(
        matches!(ClientChannel::join(file, bytes, GEOMETRY), Err(JoinError::Region(_))),
        "no memory at all"
    );
}
