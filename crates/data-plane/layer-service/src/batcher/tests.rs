//! Tests of the batcher with a simulated clock.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::{
    batching_policy::{LOCKSTEP, is_background, wait},
    call_queue::CUT_ROWS,
    settings::BatchingPolicy,
};

const LOCK: BatchingPolicy = BatchingPolicy::Lockstep;

fn batching(policy: BatchingPolicy) -> Batching {
    Batching { policy, chunk_rows: 64, ..Batching::default() }
}

fn call(site: u32) -> SiteCall {
    joinable(SiteId(site))
}

fn new(site: u32, connection: u64, class: CallClass, rows: usize) -> NewCall {
    NewCall { call: call(site), connection: ConnectionId(connection), class, rows, row_elements: 64 }
}

fn take(batcher: &mut Batcher, now: Instant) -> Option<(SiteCall, Vec<CallChunk>)> {
    let mut pieces = Vec::new();
    batcher.next(now, any_class, &mut pieces).map(|call| (call, pieces))
}

/// A call in a test plan: microseconds after the previous one, site, connection, class and rows.
type PlannedCall = (u64, u32, u64, usize, usize);

fn planned() -> impl Strategy<Value = Vec<PlannedCall>> {
    prop::collection::vec((0..3000_u64, 0..3_u32, 0..4_u64, 0..5_usize, 1..200_usize), 1..60)
}

#[derive(Debug)]
struct TracedCall {
    new: NewCall,
    arrived: Instant,
    due: Instant,
    rows: usize,
    begun: Option<Instant>,
    ended: bool,
}

type TracedBatch = (Instant, SiteCall, Vec<CallChunk>);

/// Simulates a plan, in which each batch takes a millisecond. Returns the calls and the batches.
fn play(policy: BatchingPolicy, plan: &[PlannedCall]) -> (HashMap<CallId, TracedCall>, Vec<TracedBatch>) {
    let took = Duration::from_millis(1);
    let (mut batcher, begin) = (Batcher::new(batching(policy), 1), Instant::now());
    let (mut fates, mut batches) = (HashMap::new(), Vec::new());
    let mut arrivals: Vec<(Instant, NewCall)> = Vec::new();
    let mut at = begin;
    for &(after_us, site, connection, class, rows) in plan {
        at += Duration::from_micros(after_us);
        arrivals.push((at, new(site, connection, CallClass::ALL[class], rows)));
    }
    let (mut now, mut next) = (begin, 0);
    while next < arrivals.len() || !batcher.is_empty() {
        while next < arrivals.len() && arrivals[next].0 <= now {
            let (arrived, new) = arrivals[next];
            let id = batcher.add(new, arrived);
            let due = arrived + wait(&batching(policy), new.class, new.rows, 1);
            fates.insert(id, TracedCall { new, arrived, due, rows: 0, begun: None, ended: false });
            next += 1;
        }
        let Some((call, pieces)) = take(&mut batcher, now) else {
            let deadline = batcher.next_deadline(now);
            let coming = arrivals.get(next).map(|(at, _)| *at);
            let until = [deadline, coming].into_iter().flatten().min().expect("something comes or is due");
            assert!(until > now, "nothing was due, so the deadline is ahead");
            now = until;
            continue;
        };
        for piece in &pieces {
            let fate: &mut TracedCall = fates.get_mut(&piece.id).expect("a call that was made");
            assert!(!fate.ended && fate.new.call == call);
            assert_eq!(piece.first_row, fate.rows, "rows are computed once and in order");
            assert!(piece.rows > 0 && (piece.is_last || piece.rows % CUT_ROWS == 0));
            fate.rows += piece.rows;
            fate.begun.get_or_insert(now);
            fate.ended = piece.is_last;
            assert_eq!(piece.is_last, fate.rows == fate.new.rows);
        }
        assert!(pieces.iter().map(|piece| piece.rows).sum::<usize>() <= 64);
        batches.push((now, call, pieces));
        now += took;
    }
    (fates, batches)
}

proptest! {
    #[test]
    fn every_call_is_computed_once_whatever_the_policy(plan in planned()) {
        for policy in [BatchingPolicy::Opportunistic, BatchingPolicy::Alone, BatchingPolicy::Lockstep] {
            let (fates, _) = play(policy, &plan);
            prop_assert_eq!(fates.len(), plan.len());
            prop_assert!(fates.values().all(|fate| fate.ended));
        }
    }

    #[test]
    fn decode_is_never_behind_more_than_one_batch_of_a_lower_class(plan in planned()) {
        let (fates, batches) = play(BatchingPolicy::Opportunistic, &plan);
        // Calls younger than this have not been raised to its class.
        let aging = Batching::default().aging;
        for (id, fate) in fates.iter().filter(|(_, fate)| fate.new.class == CallClass::Decode) {
            let Some(begun) = fate.begun else { continue };
            let meanwhile = batches.iter().filter(|(at, _, _)| *at >= fate.due && *at < begun);
            for (at, _, pieces) in meanwhile {
                let most_urgent = pieces.iter().map(|piece| &fates[&piece.id]).map(|other| other.new.class).min();
                let is_old = pieces.iter().any(|piece| at.duration_since(fates[&piece.id].arrived) >= aging);
                prop_assert!(most_urgent == Some(CallClass::Decode) || is_old, "{:?} before {:?}", pieces, id);
            }
        }
    }

    #[test]
    fn a_call_alone_waits_no_longer_than_its_bound_and_one_batch(rows in 1..500_usize, class in 0..5_usize, gap in 0..3000_u64) {
        let plan = [(0, 0, 0, 4, 64), (0, 0, 1, 4, 1), (gap, 1, 2, class, rows)];
        let (fates, _) = play(BatchingPolicy::Opportunistic, &plan);
        for fate in fates.values().filter(|fate| fate.new.connection == ConnectionId(2)) {
            let latest = fate.due.max(fate.arrived) + Duration::from_millis(2);
            prop_assert!(fate.begun.is_some_and(|begun| begun <= latest));
        }
    }

    #[test]
    fn alone_means_alone(plan in planned()) {
        let (_, batches) = play(BatchingPolicy::Alone, &plan);
        prop_assert!(batches.iter().all(|(_, _, pieces)| pieces.len() == 1));
    }
}

#[test]
fn everything_that_waits_for_the_same_goes_together() {
    let (mut batcher, now) = (Batcher::new(batching(BatchingPolicy::Opportunistic), 1), Instant::now());
    batcher.add(new(0, 1, CallClass::Noise, 5), now);
    batcher.add(new(1, 1, CallClass::Decode, 1), now);
    batcher.add(new(0, 2, CallClass::Decode, 1), now + Duration::from_micros(10));
    batcher.add(new(0, 3, CallClass::Prefill, 7), now);
    batcher.add(new(2, 4, CallClass::Decode, 1), now + Duration::from_micros(20));
    let (_, alone) = take(&mut batcher, now).expect("everybody waits");
    assert_eq!(alone.len(), 1);
    let (call_of, pieces) = take(&mut batcher, now + Duration::from_micros(210)).expect("a token is due");
    let ids: Vec<u64> = pieces.iter().map(|piece| piece.id.0).collect();
    assert_eq!((call_of, ids), (call(0), vec![3, 4, 1]));
}

#[test]
fn batches_of_wide_rows_have_fewer_of_them() {
    let now = Instant::now();
    // Rows as wide as a vocabulary, as a block, and so wide that the minimum cut applies.
    for (row_elements, most) in [(49_152 + 576, 64), (1_536 + 576, 256), (10_000_000, CUT_ROWS)] {
        let mut batcher = Batcher::new(Batching::default(), 1);
        for connection in 1..=8 {
            batcher.add(NewCall { row_elements, ..new(0, connection, CallClass::Training, 64) }, now);
        }
        let mut left = 8 * 64;
        while let Some((_, pieces)) = take(&mut batcher, now + Duration::from_mins(1)) {
            let rows: usize = pieces.iter().map(|piece| piece.rows).sum();
            assert_eq!(rows, most, "rows of {row_elements} elements");
            left -= rows;
        }
        assert_eq!(left, 0);
    }
}

#[test]
fn nobody_waits_for_company_that_cannot_come() {
    let (mut batcher, now) = (Batcher::new(batching(BatchingPolicy::Opportunistic), 1), Instant::now());
    batcher.add(new(0, 1, CallClass::Prefill, 64), now);
    assert_eq!(batcher.next_deadline(now), Some(now));
    assert!(take(&mut batcher, now).is_some());
    batcher.add(new(0, 2, CallClass::Prefill, 64), now);
    // Another call is expected from the first connection.
    assert!(take(&mut batcher, now).is_none());
    assert!(take(&mut batcher, now + Duration::from_micros(12_480)).is_some());
    batcher.add(new(0, 2, CallClass::Prefill, 64), now + Duration::from_secs(2));
    assert!(take(&mut batcher, now + Duration::from_secs(2)).is_some(), "it has been away for long");
}

#[test]
fn a_large_call_is_cut_and_tokens_go_in_between() {
    let (mut batcher, now) = (Batcher::new(batching(BatchingPolicy::Opportunistic), 1), Instant::now());
    let large = batcher.add(new(0, 1, CallClass::Prefill, 150), now);
    let (_, first) = take(&mut batcher, now).expect("the first rows");
    assert_eq!(first, [CallChunk { id: large, first_row: 0, rows: 64, is_last: false }]);
    let token = batcher.add(new(1, 2, CallClass::Decode, 1), now);
    let (_, between) = take(&mut batcher, now).expect("the token");
    assert_eq!(between[0].id, token);
    let later = now + Duration::from_millis(50);
    let (_, second) = take(&mut batcher, later).expect("the next rows");
    let (_, last) = take(&mut batcher, later).expect("the last rows");
    assert_eq!((second[0].first_row, second[0].rows), (64, 64));
    assert_eq!(last, [CallChunk { id: large, first_row: 128, rows: 22, is_last: true }]);
}

#[test]
fn a_call_of_any_class_has_its_turn_under_a_flood_of_tokens() {
    let (mut batcher, begin) = (Batcher::new(batching(BatchingPolicy::Opportunistic), 1), Instant::now());
    let noise = batcher.add(new(0, 1, CallClass::Noise, 8), begin);
    let mut now = begin;
    loop {
        // There are always more tokens than a batch takes.
        for _ in 0..80 {
            batcher.add(new(1, 2, CallClass::Decode, 1), now);
        }
        now += Duration::from_millis(1);
        let (_, pieces) = take(&mut batcher, now).expect("tokens are due");
        if pieces.iter().any(|piece| piece.id == noise) {
            break;
        }
        assert!(now.duration_since(begin) < Duration::from_secs(10), "it is never its turn");
    }
    assert!(now.duration_since(begin) >= Batching::default().aging);
}

#[test]
fn a_noise_has_its_turn_where_training_has_none() {
    let (mut batcher, now) = (Batcher::new(batching(BatchingPolicy::Alone), 4), Instant::now());
    let training = batcher.add(new(0, 0, CallClass::Training, 8), now);
    let noise = batcher.add(new(0, 1, CallClass::Noise, 8), now + Duration::from_secs(1));
    let mut pieces = Vec::new();
    let ids = |pieces: &[CallChunk]| pieces.iter().map(|piece| piece.id).collect::<Vec<_>>();
    let later = now + Duration::from_secs(2);
    batcher.next(later, |class| !is_background(class), &mut pieces).unwrap();
    assert_eq!(ids(&pieces), [noise]);
    assert_eq!(batcher.next(later, |class| !is_background(class), &mut pieces), None);
    assert_eq!(batcher.first_of(CallClass::Training), Some(now));
    batcher.next(later, any_class, &mut pieces).unwrap();
    assert_eq!(ids(&pieces), [training]);
    assert_eq!(batcher.first_of(CallClass::Training), None);
}

#[test]
fn lockstep_waits_for_all_who_are_active_and_no_longer_than_a_second() {
    let (mut batcher, now) = (Batcher::new(batching(LOCK), 1), Instant::now());
    batcher.add(new(0, 1, CallClass::Decode, 1), now);
    batcher.add(new(0, 2, CallClass::Decode, 1), now);
    assert_eq!(take(&mut batcher, now).map(|(_, pieces)| pieces.len()), Some(2));
    batcher.add(new(0, 1, CallClass::Decode, 1), now);
    assert!(take(&mut batcher, now).is_none(), "the second has not called again");
    assert_eq!(batcher.next_deadline(now), Some(now + LOCKSTEP));
    batcher.add(new(1, 2, CallClass::Noise, 1), now);
    assert!(take(&mut batcher, now).is_some() && take(&mut batcher, now).is_some());
    batcher.add(new(0, 1, CallClass::Decode, 1), now);
    assert!(take(&mut batcher, now + Duration::from_millis(900)).is_none());
    assert!(take(&mut batcher, now + LOCKSTEP).is_some());
}

#[test]
fn whole_calls_that_fit_join_a_pass_and_others_stay() {
    let (mut batcher, now) = (Batcher::new(batching(BatchingPolicy::Opportunistic), 1), Instant::now());
    let mut pieces = Vec::new();
    let small = batcher.add(new(0, 1, CallClass::Prefill, 8), now);
    batcher.add(new(0, 2, CallClass::Prefill, 30), now);
    batcher.add(new(1, 3, CallClass::Decode, 1), now);
    batcher.join(now, call(0), 32, &mut pieces);
    assert_eq!(pieces, [CallChunk { id: small, first_row: 0, rows: 8, is_last: true }]);
    batcher.join(now, call(0), 32, &mut pieces);
    assert_eq!(pieces.len(), 1);
    batcher.join(now, call(0), 32, &mut pieces);
    assert!(pieces.is_empty());
}

#[test]
fn before_a_site_only_tokens_of_other_sites_go() {
    let (mut batcher, now) = (Batcher::new(batching(BatchingPolicy::Opportunistic), 1), Instant::now());
    let mut pieces = Vec::new();
    batcher.add(new(0, 1, CallClass::Decode, 1), now);
    let token = batcher.add(new(1, 2, CallClass::Decode, 1), now);
    batcher.add(new(1, 3, CallClass::Prefill, 9), now);
    batcher.add(new(2, 4, CallClass::Prefill, 9), now);
    assert_eq!(batcher.next_urgent(now, SiteId(0), 16, &mut pieces), Some(call(1)));
    assert_eq!(pieces, [CallChunk { id: token, first_row: 0, rows: 1, is_last: true }]);
    assert_eq!(batcher.next_urgent(now, SiteId(0), 16, &mut pieces), None);
}

#[test]
fn a_session_that_ends_takes_its_calls_along() {
    let (mut batcher, now) = (Batcher::new(batching(BatchingPolicy::Opportunistic), 1), Instant::now());
    batcher.add(new(0, 1, CallClass::Decode, 1), now);
    let other = batcher.add(new(0, 2, CallClass::Decode, 1), now);
    batcher.close(ConnectionId(1));
    let (_, pieces) = take(&mut batcher, now).expect("the other one waits");
    assert_eq!(pieces.iter().map(|piece| piece.id).collect::<Vec<_>>(), [other]);
    assert!(batcher.is_empty());
}
