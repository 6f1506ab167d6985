//! Tests of the queue's state, with a clock that the test advances and without executors.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use scheduling::{
    admission::DelayLimits,
    clock::Clock,
    fairness::{background_limit::BackgroundCapacity, burst_limit::BurstCapacity},
    routing::Forecast,
};
use tokio::sync::oneshot::{Receiver, error::TryRecvError};

use super::{
    state::{AdmittedRequest, QueueState},
    *,
};
use crate::{
    executors::FreeCapacity,
    service_classes::{Objective, SloOutcome},
};

#[derive(Debug)]
struct QueueTestClock(Mutex<std::time::Instant>);

impl Clock for QueueTestClock {
    fn now(&self) -> std::time::Instant {
        *lock(&self.0)
    }
}

struct QueueHarness {
    state: QueueState,
    classes: Arc<ServiceClasses>,
    clock: Arc<QueueTestClock>,
    waiting: Vec<Receiver<Result<AdmissionPermit, QueueRefusal>>>,
}

const PLACES: BurstCapacity = BurstCapacity { executors: 1, all: 64, floods: 4 };
const BACKGROUND: BackgroundCapacity = BackgroundCapacity { beside: 1, alone: 4 };
/// An executor for nine sequences, with capacity for one request.
const SMALL: FreeCapacity =
    FreeCapacity { places: PLACES, background: BACKGROUND, requests: 1, sequences: 9, limit: 9 };
const ROOMY: FreeCapacity =
    FreeCapacity { places: PLACES, background: BACKGROUND, requests: 1, sequences: 1000, limit: 1000 };

impl QueueHarness {
    fn new(classes: &[&str]) -> Self {
        let classes =
            Arc::new(ServiceClasses::new(classes.iter().map(|text| text.parse().unwrap()).collect()));
        let clock = Arc::new(QueueTestClock(Mutex::new(std::time::Instant::now())));
        let limits = AdmissionLimits {
            max_sequences: 100,
            delays: DelayLimits::default(),
            burst_share: 1.0,
            background_share: 0.5,
            background_beside: 1,
        };
        let state = QueueState::new(limits, Arc::clone(&classes), Arc::clone(&clock) as _);
        Self { state, classes, clock, waiting: Vec::new() }
    }

    fn advance(&self, time: Duration) {
        *lock(&self.clock.0) += time;
    }

    fn asked(&self, tenant: &str) -> AdmissionRequest {
        let principal = Principal { class: self.classes.of(None, tenant), tenant: tenant.into() };
        AdmissionRequest { principal, sequences: 1, cost_tokens: 100, deadline: None, forecast: None }
    }

    fn ask(&mut self, asked: &AdmissionRequest) -> Result<(), QueueRefusal> {
        let (_, receiver) = self.state.join(asked, FreeCapacity { requests: 0, sequences: 0, ..ROOMY })?;
        self.waiting.push(receiver);
        Ok(())
    }

    fn join(&mut self, tenant: &str) -> Result<(), QueueRefusal> {
        self.ask(&self.asked(tenant))
    }

    /// Serves one request as charged, and returns its tenant.
    fn serve(&mut self) -> Option<String> {
        let AdmittedRequest { principal, sequences, charged_tokens, mut waiter } =
            self.state.dispatch(ROOMY).pop()?;
        self.state.release();
        for mut waiting in waiter.waiting.drain(..) {
            waiting.launched();
            waiting.begun(Duration::ZERO);
        }
        self.state.begin(&principal, sequences);
        self.state.reconcile(&principal, sequences, [charged_tokens; 2]);
        Some(principal.tenant.to_string())
    }

    fn served(&mut self, count: usize) -> Vec<String> {
        (0..count).filter_map(|_| self.serve()).collect()
    }
}

fn of<'a>(served: &[String], tenant: &'a str) -> (&'a str, usize) {
    (tenant, served.iter().filter(|one| **one == tenant).count())
}

#[test]
fn tenants_are_served_by_weight_however_many_of_them_wait() {
    let mut bench = QueueHarness::new(&[r#"{name="gold",tenants=["gold"],weight=3}"#]);
    (0..60).for_each(|_| bench.join("flood").unwrap());
    (0..40).for_each(|_| bench.join("gold").unwrap());
    let served = bench.served(40);
    assert_eq!([of(&served, "gold"), of(&served, "flood")], [("gold", 30), ("flood", 10)]);
    assert_eq!(bench.served(100).len(), 60, "nobody stays");
}

#[test]
fn the_more_urgent_go_first_but_nobody_starves() {
    let mut bench = QueueHarness::new(&[r#"{name="batch",tenants=["batch"],priority=9}"#]);
    bench.join("batch").unwrap();
    (0..40).for_each(|_| bench.join("chat").unwrap());
    let served = bench.served(41);
    let batch = served.iter().position(|one| one == "batch").unwrap();
    assert!((10..40).contains(&batch), "{batch}");
}

#[test]
fn whoever_has_most_of_a_full_queue_gives_way() {
    let mut bench = QueueHarness::new(&[]);
    (0..100).for_each(|_| bench.join("flood").unwrap());
    assert!(matches!(bench.join("flood").unwrap_err(), QueueRefusal::Full { limit: 100, .. }));
    bench.join("guest").unwrap();
    assert!(matches!(bench.waiting[99].try_recv(), Ok(Err(QueueRefusal::Full { .. }))), "the youngest of it");
    assert!(matches!(bench.waiting[98].try_recv(), Err(TryRecvError::Empty)));
    let many = AdmissionRequest { sequences: 30, ..bench.asked("guest") };
    bench.ask(&many).unwrap();
    assert_eq!(bench.served(200).iter().filter(|one| *one == "flood").count(), 69);
}

#[test]
fn a_request_that_no_executor_takes_now_lets_others_pass() {
    let mut bench = QueueHarness::new(&[]);
    let large = AdmissionRequest { sequences: 9, ..bench.asked("large") };
    bench.ask(&large).unwrap();
    bench.join("small").unwrap();
    let grants = bench.state.dispatch(FreeCapacity { requests: 5, sequences: 8, ..SMALL });
    assert_eq!(grants.iter().map(|grant| &*grant.principal.tenant).collect::<Vec<_>>(), ["small"]);
    bench.state.release();
    assert_eq!(bench.state.dispatch(SMALL).len(), 1);
}

#[test]
fn a_turn_is_given_once_and_whoever_leaves_has_none() {
    let mut bench = QueueHarness::new(&[]);
    (0..3).for_each(|_| bench.join("a").unwrap());
    assert!(bench.state.cancel(2).is_some() && bench.state.cancel(2).is_none());
    assert_eq!(bench.state.dispatch(SMALL).len(), 1);
    assert_eq!(bench.state.dispatch(SMALL).len(), 0, "it is not under way");
    bench.state.release();
    assert_eq!(bench.served(5).len(), 1);
    assert_eq!(bench.state.stats()[0].waiting, 0);
}

#[test]
fn what_a_class_may_have_in_a_minute_is_for_each_tenant_and_time_brings_it_back() {
    let mut bench = QueueHarness::new(&[
        r#"{name="few",tenants=["a","b"],requests_per_min=2}"#,
        r#"{name="short",tenants=["c"],tokens_per_min=150}"#,
    ]);
    (0..2).for_each(|_| bench.join("a").unwrap());
    let refused = bench.join("a").unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the service class 'few' allows 2 requests per minute and tenant, which are used up; try again in 30 s"
    );
    bench.join("b").unwrap();
    bench.served(3);
    bench.advance(Duration::from_secs(31));
    bench.join("a").unwrap();
    bench.served(9);
    bench.join("c").unwrap();
    bench.join("c").unwrap();
    bench.served(2);
    assert!(matches!(bench.join("c").unwrap_err(), QueueRefusal::UsedUp { what: "tokens", wait_s: 21, .. }));
    bench.advance(Duration::from_secs(21));
    bench.join("c").unwrap();
    let few = bench.classes.get(bench.classes.of(None, "a"));
    assert_eq!(few.tally.counts(), [4, 1, 400]);
}

#[test]
fn a_line_that_stands_still_is_its_tenants_alone() {
    let mut bench = QueueHarness::new(&[]);
    (0..60).for_each(|_| bench.join("flood").unwrap());
    for _ in 0..20 {
        bench.advance(Duration::from_secs(1));
        bench.serve().unwrap();
    }
    assert!(matches!(bench.join("flood").unwrap_err(), QueueRefusal::Overload { .. }));
    let flood = "flood".into();
    assert!(bench.state.check_tenant(&flood, FreeCapacity::default()).is_err(), "nor is a body read for it");
    bench.join("guest").unwrap();
    bench.advance(Duration::from_secs(10));
    bench.join("guest").expect("its line stands still as well, but not for what it sent");
    assert!(bench.served(2).contains(&"guest".to_owned()), "one who is as far may go before");
}

#[test]
fn what_would_miss_its_promise_is_refused_with_the_forecast() {
    let mut bench = QueueHarness::new(&[r#"{name="fast",tenants=["fast"],ttft_ms=2000,tpot_ms=50}"#]);
    let forecast = |ttft_us, tpot_us| Some(Forecast { ttft_us, tpot_us });
    let slow = AdmissionRequest { forecast: forecast(1_900_000, 51_000), ..bench.asked("fast") };
    let refused = bench.ask(&slow).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the request would take about 51 ms for each token, and the target of the service class 'fast' is 50 ms \
         (tpot_ms); try again in 1 s"
    );
    // The queue serves 100 tokens per second, one request each second, while others wait.
    (0..40).for_each(|_| bench.join("other").unwrap());
    for _ in 0..20 {
        bench.advance(Duration::from_secs(1));
        bench.serve().unwrap();
    }
    let fits = AdmissionRequest { forecast: forecast(500_000, 20_000), ..bench.asked("fast") };
    bench.ask(&fits).unwrap();
    let refused = bench.ask(&fits).unwrap_err();
    assert!(
        matches!(
            refused,
            QueueRefusal::Promise {
                objective: Objective::FirstToken,
                promised_ms: 2000,
                forecast_ms: 2500..,
                ..
            }
        ),
        "{refused:?}"
    );
    let fast = bench.classes.get(bench.classes.of(None, "fast"));
    assert_eq!(Objective::ALL.map(|objective| fast.tally.promises(objective, SloOutcome::Refused)), [1, 1]);
}

#[test]
fn a_flood_has_few_places_beside_one_who_is_served_as_it_asks_and_all_without() {
    let mut bench = QueueHarness::new(&[]);
    let wide = FreeCapacity { requests: 50, ..ROOMY };
    (0..90).for_each(|_| bench.join("flood").unwrap());
    assert_eq!(of(&bench.served(20), "flood"), ("flood", 20));
    bench.advance(Duration::from_secs(2));
    bench.join("other").unwrap();
    assert!(bench.served(2).contains(&"other".to_owned()));
    let mut under_way = Vec::new();
    for _ in 0..10 {
        for grant in bench.state.dispatch(wide) {
            bench.state.release();
            bench.state.begin(&grant.principal, grant.sequences);
            under_way.push(grant.principal);
        }
    }
    assert_eq!(under_way.len(), 4, "of 64 places");
    bench.state.reconcile(&under_way[0], 1, [100, 100]);
    assert_eq!(bench.state.dispatch(wide).len(), 1, "one for one that has ended");
    bench.advance(Duration::from_secs(11));
    assert!(bench.state.dispatch(wide).len() > 40, "the other one asks no more");
}

/// Returns a background request of `tenant`.
fn background(bench: &QueueHarness, tenant: &str) -> AdmissionRequest {
    let principal = Principal { class: bench.classes.background(), tenant: tenant.into() };
    AdmissionRequest { principal, ..bench.asked(tenant) }
}

#[test]
fn background_requests_go_only_while_no_online_request_waits_and_few_run_beside_online_ones() {
    let mut bench = QueueHarness::new(&[]);
    for _ in 0..6 {
        bench.ask(&background(&bench, "batch")).unwrap();
    }
    bench.join("chat").unwrap();
    let wide = FreeCapacity { requests: 50, ..ROOMY };
    let tenants = |grants: &[AdmittedRequest]| {
        grants.iter().map(|grant| grant.principal.tenant.to_string()).collect::<Vec<_>>()
    };
    let first = bench.state.dispatch(ROOMY);
    assert_eq!(tenants(&first), ["chat"], "the online request goes first");
    bench.state.release();
    let beside = bench.state.dispatch(wide);
    assert_eq!(tenants(&beside), ["batch"], "one background request beside it");
    bench.state.release();
    bench.state.reconcile(&first[0].principal, 1, [100, 100]);
    drop(first);
    assert!(bench.state.dispatch(wide).is_empty(), "the next online request may come");
    bench.advance(Duration::from_secs(6));
    assert_eq!(bench.state.background_slots(wide), 4);
    assert_eq!(bench.state.dispatch(wide).len(), 3, "up to four run without online requests");
    bench.join("chat").unwrap();
    assert!(bench.state.dispatch(FreeCapacity { requests: 0, ..wide }).is_empty());
    assert_eq!(bench.state.background_slots(wide), 1);
}

#[test]
fn waiting_background_requests_are_no_sign_of_overload_and_keep_their_own_limits() {
    let mut bench = QueueHarness::new(&[r#"{name="background",requests_per_min=40}"#]);
    for _ in 0..40 {
        bench.ask(&background(&bench, "a")).unwrap();
    }
    let refused = bench.ask(&background(&bench, "a")).unwrap_err();
    assert!(refused.to_string().contains("'background' allows 40 requests per minute"), "{refused}");
    bench.advance(Duration::from_secs(30));
    bench.ask(&background(&bench, "a")).unwrap();
    bench.join("a").unwrap();
    let online = bench.classes.of(None, "a");
    let stats = bench.state.stats();
    let waiting = |class| stats.iter().find(|one| one.principal.class == class).unwrap().waiting;
    assert_eq!((waiting(online), waiting(bench.classes.background())), (1, 41));
    assert_eq!(bench.state.queued(), 1, "only online requests are in the queue");
}
