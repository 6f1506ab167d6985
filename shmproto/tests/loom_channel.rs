//! Every interleaving of a channel's operations, with rings of one or two slots.
//!
//! `scripts/sanitize loom` runs these tests; without `--cfg loom` the file is empty. A lost wake-up is a
//! deadlock, which loom reports, because its futex has no timeout.
#![cfg(loom)]

use std::time::Duration;

use loom::{sync::Arc, thread};
use shmproto::{
    channel::{ClientChannel, Doorbell, ExecutorChannel, Geometry, RingFull, Violation, WakeCause, wait_any},
    layer::{CallClass, CallHeader, CallStatus, Dtype, ReplyHeader, RowSource, SiteOp, SitePath},
};

fn channel(depth: u32) -> (ExecutorChannel, ClientChannel) {
    ExecutorChannel::in_process(Geometry { slab_bytes: 128, depth }).unwrap()
}

fn call(sequence: u64) -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 1,
        part: None,
        source: RowSource::Rows,
        sequence,
        rows: 1,
        input: 0,
        output: 64,
    }
}

fn reply(call: &CallHeader) -> ReplyHeader {
    ReplyHeader { rows: call.rows, ..ReplyHeader::refusal(call, CallStatus::Done, 0) }
}

/// Tries every schedule with at most `preemptions` preemptions.
fn check(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 20_000;
    model.check(test);
}

fn next(bell: &Doorbell, executor: &mut ExecutorChannel) -> CallHeader {
    loop {
        if let Some(call) = executor.take().unwrap() {
            return call;
        }
        wait_any(bell, std::iter::once(&*executor), Duration::ZERO, None);
    }
}

fn serve(bell: &Doorbell, executor: &mut ExecutorChannel) {
    let call = next(bell, executor);
    let mut row = [0.0; 2];
    executor.read_rows(call.input, call.dtype, &mut row).unwrap();
    executor.write_rows(call.output, call.dtype, &row.map(|x| 2.0 * x)).unwrap();
    executor.reply(&reply(&call)).unwrap();
}

fn collect(client: &mut ClientChannel) -> ReplyHeader {
    loop {
        if let Some(reply) = client.wait(Duration::ZERO, Duration::ZERO).unwrap() {
            return reply;
        }
    }
}

#[test]
fn a_call_and_its_answer_arrive_with_their_rows_whoever_sleeps() {
    check(3, || {
        let (mut executor, mut client) = channel(1);
        let server = thread::spawn(move || serve(&Doorbell::default(), &mut executor));
        client.write_rows(0, Dtype::F32, &[1.0, 3.0]).unwrap();
        client.submit(&call(7)).unwrap();
        assert_eq!(collect(&mut client).sequence, 7);
        let mut row = [0.0; 2];
        client.read_rows(64, Dtype::F32, &mut row).unwrap();
        assert_eq!(row, [2.0, 6.0]);
        server.join().unwrap();
    });
}

#[test]
fn a_place_of_the_ring_is_never_written_before_it_was_read() {
    check(2, || {
        let (mut executor, mut client) = channel(1);
        let server = thread::spawn(move || {
            for sequence in 1..=2 {
                let taken = next(&Doorbell::default(), &mut executor);
                assert_eq!(taken, call(sequence), "half of one call and half of another");
            }
        });
        for sequence in 1..=2 {
            while client.submit(&call(sequence)) == Err(RingFull) {
                thread::yield_now();
            }
        }
        server.join().unwrap();
    });
}

#[test]
fn a_full_ring_is_an_answer_and_never_loses_what_is_in_it() {
    check(3, || {
        let (mut executor, mut client) = channel(1);
        let server = thread::spawn(move || {
            executor.reply(&reply(&call(1))).unwrap();
            match executor.reply(&reply(&call(2))) {
                Ok(()) => 2,
                Err(violation) => {
                    assert_eq!(violation, Violation::Full);
                    1
                }
            }
        });
        assert_eq!(collect(&mut client).sequence, 1);
        let given = server.join().unwrap();
        let second = client.try_take().unwrap().map(|reply| reply.sequence);
        assert_eq!(second, (given == 2).then_some(2));
    });
}

#[test]
fn a_bell_that_rings_while_somebody_goes_to_sleep_wakes_it() {
    check(3, || {
        let (executor, _client) = channel(1);
        let bell = Arc::new(Doorbell::default());
        let ringer = thread::spawn({
            let bell = Arc::clone(&bell);
            move || bell.ring()
        });
        assert_eq!(wait_any(&bell, std::iter::once(&executor), Duration::ZERO, None), WakeCause::Rung);
        ringer.join().unwrap();
    });
}

#[test]
fn of_a_ring_and_a_call_at_once_neither_is_lost() {
    check(2, || {
        let (mut executor, mut client) = channel(1);
        let bell = Arc::new(Doorbell::default());
        let ringer = thread::spawn({
            let bell = Arc::clone(&bell);
            move || bell.ring()
        });
        let caller = thread::spawn(move || client.submit(&call(1)).unwrap());
        let (mut rung, mut called) = (false, false);
        while !(rung && called) {
            match wait_any(&bell, std::iter::once(&executor), Duration::ZERO, None) {
                WakeCause::Rung => rung = true,
                WakeCause::Called => called |= executor.take().unwrap().is_some(),
                WakeCause::Late => panic!("there is no limit"),
            }
        }
        ringer.join().unwrap();
        caller.join().unwrap();
    });
}
