//! Tests of the limit in single steps and under random events.

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000;

/// Returns usage in which `flood` has waited for two seconds and was served ten times as much as `other`.
fn flooded() -> BurstLimit<&'static str> {
    let mut headroom = BurstLimit::default();
    for tenant in ["flood", "other"] {
        headroom.ask(&tenant, 1, 0);
        headroom.send(&tenant, 3);
    }
    headroom.begin(&"flood", 3);
    headroom.update_waiting(|tenant| *tenant == "flood", 0);
    headroom.end(&"flood", 0, 1000, SECOND);
    headroom.end(&"other", 3, 100, SECOND);
    headroom.update_waiting(|tenant| *tenant == "flood", 2 * SECOND);
    headroom
}

fn places(executors: usize, floods: usize) -> BurstCapacity {
    BurstCapacity { executors, all: 20, floods }
}

#[test]
fn who_wants_more_than_a_part_has_so_much_under_way_beside_others_and_no_more() {
    let mut headroom = flooded();
    let crowd = headroom.crowd(2 * SECOND);
    assert!(crowd.lets(&"flood", places(1, 4)) && !crowd.lets(&"flood", places(1, 3)));
    assert!(
        !crowd.lets(&"flood", places(3, 1)) && crowd.lets(&"flood", places(4, 1)),
        "each has one at least"
    );
    assert!(
        crowd.lets(&"other", places(1, 0)) && crowd.lets(&"stranger", places(1, 0)),
        "nobody else is held"
    );
    headroom.send(&"flood", 1);
    let crowd = headroom.crowd(2 * SECOND);
    assert!(!crowd.lets(&"flood", places(1, 9)), "its last one has no token yet");
    assert!(crowd.lets(&"flood", places(2, 9)), "of two executors, one of each");
}

#[test]
fn who_had_less_than_its_part_has_as_many_places_as_are_its_part() {
    let mut headroom = flooded();
    headroom.ask(&"flood", 100, 2 * SECOND);
    headroom.update_waiting(|tenant| *tenant == "flood", 2 * SECOND);
    headroom.send(&"flood", 15);
    assert!(
        headroom.crowd(2 * SECOND).lets(&"flood", places(1, 1)),
        "it is worth a hundred of the other: 19 of 20"
    );
    headroom.send(&"flood", 1);
    assert!(!headroom.crowd(2 * SECOND).lets(&"flood", places(1, 1)));
}

#[test]
fn a_flood_leaves_other_tenants_that_are_held_their_own_places() {
    let mut headroom = flooded();
    for tenant in ["second flood", "other", "another", "third"] {
        headroom.ask(&tenant, 1, SECOND);
    }
    headroom.end(&"second flood", 0, 1000, SECOND);
    headroom.update_waiting(|tenant| tenant.ends_with("flood"), SECOND);
    headroom.send(&"flood", 10);
    let crowd = headroom.crowd(2 * SECOND);
    assert!(!crowd.lets(&"flood", places(1, 4)));
    assert!(crowd.lets(&"second flood", places(1, 4)), "the first one's sequences are not its own");
    headroom.send(&"second flood", 2);
    headroom.begin(&"second flood", 2);
    let crowd = headroom.crowd(2 * SECOND);
    assert!(!crowd.lets(&"second flood", places(1, 4)), "two of four places are its share");
    assert!(crowd.lets(&"second flood", places(1, 6)));
}

#[test]
fn who_had_a_little_more_than_its_part_is_no_flood() {
    let mut headroom = flooded();
    headroom.ask(&"third", 1, SECOND);
    headroom.end(&"other", 0, 1200, SECOND);
    headroom.tenants.get_mut("flood").unwrap().floods = false;
    headroom.update_waiting(|tenant| *tenant == "flood", 2 * SECOND);
    headroom.send(&"flood", 1);
    // The tenant was served 0.43 of all tokens, and its share is a third: it has the slots of its share, and
    // several of its prompts may go at once.
    assert!(headroom.crowd(2 * SECOND).lets(&"flood", places(1, 1)));
}

#[test]
fn a_flood_is_one_until_it_was_served_no_more_than_its_part() {
    let mut headroom = flooded();
    let is_held = |headroom: &mut BurstLimit<&'static str>| {
        headroom.update_waiting(|tenant| *tenant == "flood", 2 * SECOND);
        !headroom.crowd(2 * SECOND).lets(&"flood", places(1, 1))
    };
    headroom.end(&"other", 0, 700, 2 * SECOND);
    assert!(is_held(&mut headroom), "it still has more than half");
    headroom.end(&"other", 0, 200, 2 * SECOND);
    assert!(!is_held(&mut headroom));
    headroom.end(&"flood", 0, 200, 2 * SECOND);
    assert!(!is_held(&mut headroom), "a little more makes no flood");
}

#[test]
fn without_a_backlog_prompts_of_a_tenant_far_above_its_part_go_one_by_one_beside_others() {
    let mut headroom = flooded();
    headroom.update_waiting(|_| false, 2 * SECOND);
    headroom.send(&"flood", 1);
    assert!(headroom.crowd(2 * SECOND).lets(&"flood", places(1, 1)), "nobody else is there");
    headroom.send(&"other", 1);
    assert!(!headroom.crowd(2 * SECOND).lets(&"flood", places(1, 1)));
    assert!(headroom.crowd(2 * SECOND).lets(&"flood", places(2, 1)), "one prompt an executor");
    headroom.begin(&"flood", 1);
    assert!(headroom.crowd(2 * SECOND).lets(&"flood", places(1, 1)), "its places are not bounded");
}

#[test]
fn without_others_who_are_served_as_they_ask_nobody_is_held_back() {
    let mut headroom = flooded();
    assert!(!headroom.crowd(11 * SECOND).lets(&"flood", places(1, 0)));
    // The other tenant has not asked for ten seconds.
    headroom.update_waiting(|tenant| *tenant == "flood", 11 * SECOND);
    assert!(headroom.crowd(11 * SECOND).lets(&"flood", places(1, 0)));
    let mut headroom = flooded();
    headroom.update_waiting(|_| true, 2 * SECOND);
    assert!(headroom.crowd(4 * SECOND).lets(&"flood", places(1, 0)), "the other one waits as well");
}

#[test]
fn who_waits_shortly_is_not_held_back() {
    let mut headroom = flooded();
    headroom.update_waiting(|_| false, 2 * SECOND);
    headroom.update_waiting(|tenant| *tenant == "flood", 2 * SECOND);
    assert!(headroom.crowd(2 * SECOND).lets(&"flood", places(1, 0)), "nothing of it waited a moment ago");
}

#[derive(Debug, Clone, Copy)]
enum TenantEvent {
    Ask,
    Send,
    Begin,
    End { tokens: u64 },
    Waits,
}

fn event() -> impl Strategy<Value = TenantEvent> {
    prop_oneof![
        Just(TenantEvent::Ask),
        Just(TenantEvent::Send),
        Just(TenantEvent::Begin),
        (0..500u64).prop_map(|tokens| TenantEvent::End { tokens }),
        Just(TenantEvent::Waits)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_who_had_no_more_than_its_part_goes_and_nobody_starves(
        events in prop::collection::vec((0..4u8, event(), 0..2_000_000u64), 1..100),
        (executors, floods) in (1..4usize, 0..8usize),
    ) {
        let (mut headroom, mut now_us, mut waits) = (BurstLimit::default(), 0, [false; 4]);
        let mut served = [0.0_f64; 4];
        for (tenant, event, passed_us) in events {
            now_us += passed_us;
            served.iter_mut().for_each(|tokens| *tokens *= (-(passed_us as f64) / MEMORY_US as f64).exp());
            match event {
                TenantEvent::Ask => headroom.ask(&tenant, 1, now_us),
                TenantEvent::Send => headroom.send(&tenant, 1),
                TenantEvent::Begin => headroom.begin(&tenant, 1),
                TenantEvent::End { tokens } => {
                    let is_known = headroom.tenants.contains_key(&tenant);
                    headroom.end(&tenant, 1, tokens, now_us);
                    served[usize::from(tenant)] += if is_known { tokens as f64 } else { 0.0 };
                }
                TenantEvent::Waits => waits[usize::from(tenant)] ^= true,
            }
            headroom.update_waiting(|tenant| waits[usize::from(*tenant)], now_us);
            // A tenant that was forgotten starts anew.
            let known = |tenant: usize| headroom.tenants.contains_key(&(tenant as u8));
            (0..4).filter(|tenant| !known(*tenant)).for_each(|tenant| served[tenant] = 0.0);
            let crowd = headroom.crowd(now_us);
            let places = BurstCapacity { executors, all: 20, floods };
            let known: Vec<u8> = headroom.tenants.keys().copied().collect();
            let held: Vec<u8> = known.iter().copied().filter(|tenant| !crowd.lets(tenant, places)).collect();
            for tenant in &held {
                let all: f64 = known.iter().map(|key| served[usize::from(*key)]).sum();
                let is_over = served[usize::from(*tenant)] > all / known.len() as f64 * (1.0 - 1e-6);
                let has = headroom.tenants[tenant].under_way;
                prop_assert!(waits[usize::from(*tenant)] || is_over, "it is held though nothing of it waits");
                prop_assert!(is_over || has >= 20 / known.len(), "it is no flood, and has fewer places");
                prop_assert!(has >= executors, "each executor may always have one of its sequences");
            }
            prop_assert!(held.len() < known.len().max(1), "somebody may always go");
        }
    }
}
