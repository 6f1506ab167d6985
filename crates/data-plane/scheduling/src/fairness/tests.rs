//! Tests of the queue in front of a simulated server, and against a plain list of waiting requests.

use proptest::prelude::*;

use super::*;

fn entry(item: usize, cost_tokens: u64) -> QueueEntry<usize> {
    QueueEntry { item, cost_tokens, size: 1, class: 0, deadline_us: None }
}

fn any<K>(_: &K, _: &usize) -> bool {
    true
}

/// Returns varying costs from 20 to 400 tokens.
fn cost(number: u64) -> u64 {
    20 + number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 381
}

#[test]
fn weights_of_one_to_three_give_tokens_of_one_to_three() {
    let mut queue = FairQueue::new(FairLimits::default());
    let weights = [1, 3];
    let push = |queue: &mut FairQueue<usize, usize>, tenant: usize, number: u64| {
        queue.push(&tenant, weights[tenant], entry(0, cost(number))).unwrap();
    };
    (0..20).for_each(|number| push(&mut queue, number as usize % 2, number));
    let mut served = [0; 2];
    for number in 20..20_000 {
        let turn = queue.pop(0, any).unwrap();
        served[turn.tenant] += turn.entry.cost_tokens;
        // The served tenant asks again, so both tenants always wait.
        push(&mut queue, turn.tenant, number);
    }
    let ratio = served[1] as f64 / served[0] as f64;
    assert!((ratio / 3.0 - 1.0).abs() < 0.05, "{served:?}");
}

#[derive(Debug, Clone, Copy)]
struct TenantLoad {
    per_s: f64,
    weight: u64,
}

/// Returns each tenant's tokens that a server of `tokens_per_s` served within `patience_s`, in one minute.
fn serve(habits: &[TenantLoad], tokens_per_s: f64, patience_s: f64) -> Vec<u64> {
    let mut queue = FairQueue::new(FairLimits { max_waiting: 1000, ..FairLimits::default() });
    let (mut in_time, mut due) = (vec![0; habits.len()], vec![0.0; habits.len()]);
    let (mut now_s, mut number, mut busy_until_s) = (0.0, 0, 0.0_f64);
    while now_s < 60.0 {
        for (tenant, habit) in habits.iter().enumerate() {
            due[tenant] += habit.per_s * 1e-3;
            while due[tenant] >= 1.0 {
                due[tenant] -= 1.0;
                number += 1;
                let deadline_us = Some(((now_s + patience_s) * 1e6) as u64);
                let asked = QueueEntry { deadline_us, ..entry(number, cost(number as u64)) };
                _ = queue.push(&tenant, habit.weight, asked);
            }
        }
        let now_us = (now_s * 1e6) as u64;
        queue.expire(now_us);
        while busy_until_s <= now_s
            && let Some(turn) = queue.pop(now_us, any)
        {
            busy_until_s = busy_until_s.max(now_s - 1e-3) + turn.entry.cost_tokens as f64 / tokens_per_s;
            in_time[turn.tenant] += turn.entry.cost_tokens;
        }
        now_s += 1e-3;
    }
    in_time
}

#[test]
fn a_flood_at_ten_times_its_share_leaves_the_others_what_they_get_without_it() {
    // Each of four tenants asks for 0.18 of the server; the fifth asks for ten times its fifth.
    let quiet = TenantLoad { per_s: 18.0 * 0.18 / 0.2, weight: 1 };
    let habits = [quiet; 4];
    let tokens_per_s = 18.0 * 210.0 / 0.2;
    let alone = serve(&habits, tokens_per_s, 2.0);
    let flooded =
        serve(&[quiet, quiet, quiet, quiet, TenantLoad { per_s: 180.0, weight: 1 }], tokens_per_s, 2.0);
    for (tenant, (alone, flooded)) in alone.iter().zip(&flooded).enumerate() {
        assert!(*flooded as f64 >= 0.95 * *alone as f64, "tenant {tenant}: {flooded} of {alone}");
    }
    let all: u64 = flooded.iter().sum();
    assert!(all as f64 > 0.99 * 60.0 * tokens_per_s, "the flood takes what is left: {all}");
}

#[test]
fn a_burst_of_five_hundred_short_requests_is_served_whole() {
    let mut queue = FairQueue::new(FairLimits::default());
    (0..500).for_each(|number| assert_eq!(queue.push(&1, 1, entry(number, 30)).unwrap(), []));
    (500..520).for_each(|number| assert_eq!(queue.push(&0, 1, entry(number, 300)).unwrap(), []));
    let turns: Vec<_> = std::iter::from_fn(|| queue.pop(0, any)).collect();
    let of_burst: Vec<usize> =
        turns.iter().filter(|turn| turn.tenant == 1).map(|turn| turn.entry.item).collect();
    assert_eq!(of_burst, (0..500).collect::<Vec<_>>());
    // The last long request goes when both tenants have 19 times 300 tokens: 190 short ones go before it.
    assert_eq!(turns.iter().rposition(|turn| turn.tenant == 0), Some(19 + 190));
}

#[test]
fn idleness_earns_nothing() {
    let mut queue = FairQueue::new(FairLimits::default());
    for number in 0..100 {
        queue.push(&0, 1, entry(number, 100)).unwrap();
    }
    (0..50).for_each(|_| _ = queue.pop(0, any));
    // A tenant that was idle all the time alternates with the other one and does not go fifty times in a row.
    (0..50).for_each(|number| _ = queue.push(&1, 1, entry(number, 100)).unwrap());
    let next: Vec<_> = (0..20).map(|_| queue.pop(0, any).unwrap().tenant).collect();
    assert_eq!(next.iter().filter(|tenant| **tenant == 1).count(), 10, "{next:?}");
}

#[test]
fn what_a_request_came_to_counts_instead_of_the_estimate() {
    let mut queue = FairQueue::new(FairLimits::default());
    for number in 0..40 {
        queue.push(&(number % 2), 1, entry(number, 100)).unwrap();
    }
    let mut turns = [0; 2];
    for _ in 0..20 {
        let turn = queue.pop(0, any).unwrap();
        turns[turn.tenant] += 1;
        // Answers of tenant 1 are four times as long as estimated.
        queue.reconcile(&turn.tenant, 1, 100, if turn.tenant == 1 { 400 } else { 100 });
    }
    assert_eq!(turns, [16, 4]);
    // A tenant that was forgotten meanwhile still owes the rest.
    let mut queue = FairQueue::new(FairLimits::default());
    queue.push(&7, 2, entry(0, 100)).unwrap();
    queue.pop(0, any).unwrap();
    queue.reconcile(&7, 2, 100, 10);
    queue.reconcile(&7, 2, 10, 1010);
    queue.push(&7, 2, entry(0, 100)).unwrap();
    queue.push(&8, 1, entry(1, 100)).unwrap();
    assert_eq!(queue.pop(0, any).unwrap().tenant, 8);
}

#[test]
fn urgent_classes_go_first_and_no_class_is_passed_over_for_ever() {
    let limits = FairLimits { max_passed_over: 4, ..FairLimits::default() };
    let mut queue = FairQueue::new(limits);
    for number in 0..30 {
        queue.push(&0, 1, QueueEntry { class: (number % 3) as u8, ..entry(number, 10) }).unwrap();
    }
    let classes: Vec<u8> = (0..16).map(|_| queue.pop(0, any).unwrap().entry.class).collect();
    assert_eq!(classes[..7], [0, 0, 0, 0, 1, 2, 0], "{classes:?}");
    let longest = |class| classes.split(|served| *served == class).map(<[u8]>::len).max().unwrap();
    assert!(longest(1) <= 6 && longest(2) <= 6, "{classes:?}");
}

#[test]
fn what_is_too_late_never_goes_and_what_may_not_go_keeps_nobody_waiting() {
    let mut queue = FairQueue::new(FairLimits::default());
    queue.push(&0, 1, QueueEntry { deadline_us: Some(10), ..entry(0, 10) }).unwrap();
    queue.push(&0, 1, entry(1, 10)).unwrap();
    queue.push(&1, 1, entry(2, 10)).unwrap();
    assert_eq!(queue.pop(11, |_, item| *item != 1).unwrap().entry.item, 2);
    assert_eq!(queue.pop(11, |_, item| *item != 1), None);
    assert_eq!(queue.expire(11).len(), 1);
    assert_eq!(queue.pop(11, any).unwrap().entry.item, 1);
    assert!(queue.is_empty());
    queue.push(&0, 1, entry(3, 10)).unwrap();
    assert_eq!(queue.cancel(|item| *item == 3).len(), 1);
    assert_eq!((queue.len(), queue.pop(0, any)), (0, None));
}

#[test]
fn a_full_queue_takes_from_whoever_has_most_of_it() {
    let mut queue = FairQueue::new(FairLimits { max_waiting: 10, ..FairLimits::default() });
    (0..10).for_each(|number| _ = queue.push(&0, 1, entry(number, 10)).unwrap());
    let full = queue.push(&0, 1, entry(10, 10)).unwrap_err();
    assert_eq!((full.waiting, full.entry.item), (10, 10));
    for number in 0..5 {
        let displaced = queue.push(&1, 1, entry(100 + number, 10)).unwrap();
        assert_eq!(displaced.len(), 1);
        assert_eq!((displaced[0].tenant, displaced[0].entry.item), (0, 9 - number));
    }
    queue.push(&1, 1, entry(106, 10)).unwrap_err();
    assert_eq!([0, 1].map(|tenant| queue.waiting_of(&tenant)), [5, 5]);
    let large = |size| QueueEntry { size, ..entry(107, 10) };
    queue.push(&2, 1, large(6)).unwrap_err();
    assert_eq!(queue.push(&2, 1, large(3)).unwrap().len(), 3);
    assert_eq!((queue.len(), queue.waiting_of(&2)), (10, 3), "one counts for three");
}

#[derive(Debug, Clone, Copy)]
enum QueueAction {
    Push { tenant: u8, weight: u64, cost: u64, class: u8 },
    Pop,
}

fn act() -> impl Strategy<Value = QueueAction> {
    let push = (0..4_u8, 1..500_u64, 0..2_u8).prop_map(|(tenant, cost, class)| QueueAction::Push {
        tenant,
        weight: u64::from(tenant) + 1,
        cost,
        class,
    });
    prop_oneof![3 => push, 2 => Just(QueueAction::Pop)]
}

proptest! {
    /// Compares the queue with a list of all waiting requests and with exact counters.
    #[test]
    fn nobody_is_lost_doubled_or_passed_by_somebody_who_was_served_more(acts in prop::collection::vec(act(), 0..200)) {
        let mut queue = FairQueue::new(FairLimits { max_passed_over: 3, ..FairLimits::default() });
        // List in order of arrival: number, tenant, cost, class.
        let mut list: Vec<(usize, u8, u64, u8)> = Vec::new();
        let (mut counters, mut floor, mut passed) = ([0.0_f64; 4], 0.0_f64, 0_u32);
        for (number, act) in acts.into_iter().enumerate() {
            if let QueueAction::Push { tenant, weight, cost, class } = act {
                if !list.iter().any(|one| one.1 == tenant) {
                    counters[usize::from(tenant)] = counters[usize::from(tenant)].max(floor);
                }
                list.push((number, tenant, cost, class));
                queue.push(&tenant, weight, QueueEntry { class, ..entry(number, cost) }).unwrap();
                continue;
            }
            let Some(turn) = queue.pop(0, any) else {
                prop_assert!(list.is_empty(), "somebody waits and nobody goes");
                continue;
            };
            let class = turn.entry.class;
            let has = |class| list.iter().any(|one| one.3 == class);
            let due = has(1) && passed >= 3;
            prop_assert_eq!(class, if has(0) && !due { 0 } else { 1 });
            passed = if class == 0 && has(1) { passed + 1 } else { 0 };
            let at = list.iter().position(|one| one.1 == turn.tenant && one.3 == class).unwrap();
            prop_assert_eq!(list[at].0, turn.entry.item, "first come, first served within a tenant");
            let of = |tenant: u8| counters[usize::from(tenant)];
            let least = list.iter().filter(|one| one.3 == class).map(|one| of(one.1)).fold(f64::INFINITY, f64::min);
            prop_assert!(of(turn.tenant) <= least + 1e-2);
            let before = of(turn.tenant);
            counters[usize::from(turn.tenant)] += list[at].2 as f64 / (f64::from(turn.tenant) + 1.0);
            list.remove(at);
            let waiting = list.iter().map(|one| counters[usize::from(one.1)]).fold(f64::INFINITY, f64::min);
            floor = floor.max(if list.is_empty() { before } else { waiting });
            prop_assert_eq!(queue.len(), list.len());
        }
    }

    #[test]
    fn what_is_ahead_is_what_is_served_before_to_a_request_of_each_tenant(
        asked in prop::collection::vec((0..4_u8, 1..500_u64), 1..80), newcomer in 0..4_u8,
    ) {
        let mut queue = FairQueue::new(FairLimits::default());
        for (number, &(tenant, cost)) in asked.iter().enumerate() {
            queue.push(&tenant, u64::from(tenant) + 1, entry(number, cost)).unwrap();
        }
        let ahead = queue.ahead_tokens(&newcomer);
        queue.push(&newcomer, u64::from(newcomer) + 1, entry(usize::MAX, 1)).unwrap();
        let mut before = 0;
        while let Some(turn) = queue.pop(0, any).filter(|turn| turn.entry.item != usize::MAX) {
            before += turn.entry.cost_tokens;
        }
        prop_assert!(before.abs_diff(ahead) <= 4 * 500, "{} of {}", before, ahead);
    }
}
