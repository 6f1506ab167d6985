//! Tests of the controller in front of a simulated server with `together` concurrent requests.

use super::*;

/// One time step of the simulated server.
const TICK: Duration = Duration::from_millis(10);
/// Time that a request's prompt takes once its turn has come.
const COMPUTING: Duration = Duration::from_millis(300);
/// Mean time from a request's turn to its end.
const SERVICE: Duration = Duration::from_secs(2);
/// Number of slots that the controller assumes.
const PLACES: usize = 64;

#[derive(Debug, Clone, Copy)]
struct SimRequest {
    arrived: Instant,
    began: Instant,
    ends: Instant,
    has_token: bool,
}

#[derive(Debug)]
struct SimServer {
    controller: ControlledDelay,
    /// Number of requests that really run concurrently.
    together: usize,
    now: Instant,
    queue: VecDeque<Instant>,
    running: Vec<SimRequest>,
    /// Arrival and queueing time of each request that had its turn.
    turns: Vec<(Instant, Duration)>,
    refusals: Vec<Overload>,
    ended: usize,
}

impl SimServer {
    fn new(together: usize) -> Self {
        Self {
            controller: ControlledDelay::new(DelayLimits::default()),
            together,
            now: Instant::now(),
            queue: VecDeque::new(),
            running: Vec::new(),
            turns: Vec::new(),
            refusals: Vec::new(),
            ended: 0,
        }
    }

    fn ask(&mut self) -> bool {
        let waiting = self.queue.len() + self.running.iter().filter(|request| !request.has_token).count();
        let under_way = self.queue.len() + self.running.len();
        let places = if under_way < PLACES { SlotAvailability::Free } else { SlotAvailability::Taken };
        let verdict = self.controller.admit(waiting, places, self.now);
        match verdict {
            Ok(()) => self.queue.push_back(self.now),
            Err(overload) => self.refusals.push(overload),
        }
        verdict.is_ok()
    }

    fn tick(&mut self) {
        self.now += TICK;
        let now = self.now;
        let before = self.running.len();
        self.running.retain(|request| now < request.ends);
        self.ended += before - self.running.len();
        while self.running.len() < self.together
            && let Some(arrived) = self.queue.pop_front()
        {
            // Answers have 1 to 63 tokens.
            let service = SERVICE * (1 + (self.turns.len() as u32 * 37) % 63) / 32;
            self.turns.push((arrived, now - arrived));
            self.running.push(SimRequest {
                arrived,
                began: now,
                ends: now + COMPUTING.max(service),
                has_token: false,
            });
        }
        for request in &mut self.running {
            if !request.has_token && now - request.began >= COMPUTING {
                request.has_token = true;
                let queued = request.began - request.arrived;
                self.controller.begun(FirstToken { queued, computed: now - request.began }, now);
            }
        }
        if self.queue.is_empty() && self.running.iter().all(|request| request.has_token) {
            self.controller.emptied();
        }
    }

    fn load(&mut self, per_second: f64, seconds: u64) {
        let until = self.now + Duration::from_secs(seconds);
        let mut due = 0.0;
        while self.now < until {
            due += per_second * TICK.as_secs_f64();
            while due >= 1.0 {
                due -= 1.0;
                self.ask();
            }
            self.tick();
        }
    }

    /// Returns the longest queueing time among requests that arrived at or after `since`.
    fn longest(&self, since: Instant) -> Duration {
        let later = self.turns.iter().filter(|(arrived, _)| *arrived >= since);
        later.map(|(_, queued)| *queued).max().unwrap_or_default()
    }
}

#[test]
fn a_burst_is_let_in_whole_at_once_or_over_some_seconds() {
    for seconds in [0, 1, 4] {
        let mut server = SimServer::new(PLACES);
        if seconds == 0 {
            (0..500).for_each(|_| assert!(server.ask()));
        } else {
            server.load(500.0 / seconds as f64, seconds);
        }
        server.load(0.0, 30);
        assert_eq!((server.refusals.len(), server.queue.len()), (0, 0), "over {seconds} s");
        assert!(server.ended >= 499);
    }
}

#[test]
fn a_sustained_overload_is_refused_and_who_is_let_in_waits_about_the_target() {
    let mut server = SimServer::new(PLACES);
    server.load(320.0, 120);
    let (since, ended) = (server.now, server.ended);
    server.load(320.0, 60);
    let target = DelayLimits::default().target;
    assert!(server.longest(since) < 3 * target, "{:?}", server.longest(since));
    let capacity = PLACES as f64 / SERVICE.as_secs_f64() * 60.0;
    assert!((server.ended - ended) as f64 > 0.95 * capacity, "{} of {capacity}", server.ended - ended);
}

#[test]
fn a_pool_that_holds_fewer_than_may_run_changes_nothing() {
    let mut server = SimServer::new(8);
    server.load(40.0, 300);
    let (since, ended) = (server.now, server.ended);
    server.load(40.0, 60);
    assert!(server.longest(since) < 4 * DelayLimits::default().target, "{:?}", server.longest(since));
    assert!((server.ended - ended) as f64 > 0.9 * 8.0 / SERVICE.as_secs_f64() * 60.0);
}

#[test]
fn a_queue_that_is_short_because_of_refusals_lets_nobody_flood_it() {
    // With two concurrent requests the queue is empty at times, at any load.
    let mut server = SimServer::new(2);
    server.load(4.0, 60);
    let since = server.now;
    server.load(400.0, 60);
    // One request at a time waits, for the first of two slots.
    assert!(server.longest(since) < 2 * SERVICE, "{:?}", server.longest(since));
}

#[test]
fn a_refusal_forecasts_the_wait_for_what_is_queued() {
    let mut server = SimServer::new(PLACES);
    (0..500).for_each(|_| assert!(server.ask()));
    server.load(0.0, 8);
    assert!(!server.ask(), "the queue stands for longer than the interval");
    let forecast = server.refusals[0].forecast;
    let asked = server.now;
    server.load(0.0, 30);
    let emptied = server.turns.iter().map(|(arrived, queued)| *arrived + *queued).max().unwrap();
    let right = (emptied - asked).as_secs_f64();
    assert!((0.7..1.4).contains(&(forecast.as_secs_f64() / right)), "{forecast:?} of {right} s");
}

#[test]
fn after_an_overload_has_passed_a_burst_is_let_in_again() {
    let mut server = SimServer::new(PLACES);
    server.load(320.0, 60);
    assert!(!server.refusals.is_empty());
    server.load(0.0, 120);
    server.refusals.clear();
    (0..500).for_each(|_| assert!(server.ask()));
}

#[test]
fn a_load_that_can_be_served_is_never_refused() {
    let mut server = SimServer::new(PLACES);
    server.load(25.0, 300);
    assert_eq!(server.refusals, []);
}

#[test]
fn a_queue_behind_requests_that_do_not_end_is_refused_before_anybody_had_a_turn() {
    let mut controller = ControlledDelay::new(DelayLimits::default());
    let start = Instant::now();
    let limits = DelayLimits::default();
    for (count, ms) in (0..limits.interval.as_millis() as u64).step_by(100).enumerate() {
        controller.admit(count, SlotAvailability::Taken, start + Duration::from_millis(ms)).unwrap();
    }
    let later = start + limits.interval + limits.target;
    let overload = controller.admit(50, SlotAvailability::Taken, later).unwrap_err();
    assert_eq!(overload.forecast, limits.interval + limits.target, "at least as long as nobody had a turn");
}

#[test]
fn one_long_prompt_after_the_other_is_no_queue() {
    let mut controller = ControlledDelay::new(DelayLimits::default());
    let mut now = Instant::now();
    for _ in 0..50 {
        controller.admit(1, SlotAvailability::Free, now).unwrap();
        now += Duration::from_secs(20);
        controller.begun(FirstToken { queued: Duration::ZERO, computed: Duration::from_secs(20) }, now);
    }
}
