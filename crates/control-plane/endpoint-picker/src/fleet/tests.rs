use std::collections::BTreeSet;

use control_protocol::fleet::{
    GatewayState, ReportedAdapter, ReportedExecutor, ReportedLoad, Tagged, Timings,
};
use scheduling::routing::cost_estimates::{CostEstimate, UNSEEN};

use super::{
    choice::{Pick, PickRefusal, Subset},
    *,
};
use crate::request_parser::{ParsedRequest, RequestHead};

const STALE: Duration = Duration::from_secs(1);

fn address(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, number], 8080))
}

fn endpoint(number: u8) -> String {
    address(number).to_string()
}

fn work(requests: u64, rank: u64, tokens: u64) -> ReportedLoad {
    let one = scheduling::perf::serving::RequestLoad::of(rank, tokens);
    (0..requests).fold(scheduling::perf::serving::RequestLoad::default(), |sum, _| sum.plus(one)).into()
}

fn executor(running: ReportedLoad) -> ReportedExecutor {
    let timings = Timings::from(CostEstimate { model: UNSEEN, is_stale: false });
    let (waiting, promised_tpot_us) = (ReportedLoad::default(), None);
    ReportedExecutor { open: true, places: 64, running, waiting, promised_tpot_us, timings: Some(timings) }
}

/// A report of an idle host with adapters `a` and `b`, and `resident` ones in memory.
fn report(resident: &[&str]) -> GatewayReport {
    let adapter = |name: &str, generation| ReportedAdapter {
        name: name.to_owned(),
        rank: 16,
        bytes: 64 << 20,
        generation,
    };
    GatewayReport {
        state: GatewayState::Ready,
        instance: 1,
        base: "base".to_owned(),
        answer_tokens: 50.0,
        queued: 0,
        executors: vec![executor(ReportedLoad::default())],
        registered: Tagged::of(vec![adapter("a", 0xa), adapter("b", 0xb)], None),
        resident: Tagged::of(vec![resident.iter().map(|name| (*name).to_owned()).collect()], None),
    }
}

fn rules() -> PickRules {
    PickRules { policy: RoutingPolicy::RankAware, slo: Slo::default(), stale: STALE, fallbacks: 2 }
}

/// A fleet of hosts 1, 2 and so on with these reports, and the time of the reports.
fn fleet(rules: PickRules, reports: &[GatewayReport]) -> (HostFleet, Instant) {
    let (fleet, now) = (HostFleet::new(rules), Instant::now());
    let numbers = 1..=u8::try_from(reports.len()).unwrap();
    fleet.set_hosts(&numbers.clone().map(address).collect());
    for (number, report) in numbers.zip(reports) {
        fleet.heard(address(number), now, report.clone()).unwrap();
    }
    (fleet, now)
}

fn head() -> RequestHead {
    RequestHead { path: "/v1/completions".to_owned(), key: b"Bearer k".to_vec() }
}

fn ask(model: &str, prompt: &str) -> ParsedRequest {
    ParsedRequest::read(format!(r#"{{"model":"{model}","prompt":"{prompt}"}}"#).as_bytes())
}

fn pick(fleet: &HostFleet, model: &str, now: Instant) -> Result<Pick, PickRefusal> {
    fleet.pick(&head(), &ask(model, "Hello"), &None, now)
}

fn first(fleet: &HostFleet, model: &str, now: Instant) -> String {
    pick(fleet, model, now).unwrap().endpoints.remove(0)
}

#[test]
fn a_request_goes_where_its_adapter_is_in_memory() {
    let (fleet, now) = fleet(rules(), &[report(&[]), report(&["a"]), report(&["b"])]);
    assert_eq!(first(&fleet, "a", now), endpoint(2));
    assert_eq!(first(&fleet, "base:b", now), endpoint(3));
    assert_eq!(pick(&fleet, "a", now).unwrap().endpoints.len(), 3, "the others are there if it fails");
}

#[test]
fn an_adapter_is_found_by_its_generation_and_never_taken_for_the_base() {
    let mut stranger = report(&[]);
    stranger.registered = Tagged::of(Vec::new(), None);
    let (fleet, now) = fleet(rules(), &[stranger, report(&["a"]), report(&["b"])]);
    let of = |beginning: u64| {
        let generation = format!("{beginning:016x}{}", "0".repeat(48));
        let body =
            format!(r#"{{"model":"base","adapter":{{"generation":"{generation}"}},"prompt":"Hello"}}"#);
        fleet.pick(&head(), &ParsedRequest::read(body.as_bytes()), &None, now).unwrap().endpoints
    };
    assert_eq!((of(0xa)[0].clone(), of(0xb)[0].clone()), (endpoint(2), endpoint(3)));
    assert_eq!(of(0xa).len(), 2, "the stranger is no candidate");
    assert_eq!(of(0xc).len(), 3, "they say that there is none");
}

#[test]
fn a_host_that_does_not_know_the_adapter_is_no_candidate_unless_none_does() {
    let mut stranger = report(&[]);
    stranger.registered = Tagged::of(Vec::new(), None);
    let (fleet, now) = fleet(rules(), &[stranger, report(&[])]);
    assert_eq!(pick(&fleet, "a", now).unwrap().endpoints, [endpoint(2)]);
    assert_eq!(pick(&fleet, "nobody's", now).unwrap().endpoints.len(), 2, "they say that there is none");
}

#[test]
fn a_busy_host_is_left_alone_and_load_is_seen_as_soon_as_it_is_said() {
    let mut busy = report(&["a"]);
    busy.executors = vec![executor(work(60, 16, 500))];
    let (fleet, now) = fleet(rules(), &[busy, report(&["a"])]);
    assert_eq!(first(&fleet, "a", now), endpoint(2));
    let mut busier = report(&["a"]);
    busier.executors = vec![executor(work(64, 16, 2_000))];
    let later = now + Duration::from_millis(100);
    fleet.heard(address(2), later, busier).unwrap();
    assert_eq!(first(&fleet, "a", later), endpoint(1));
}

#[test]
fn a_burst_between_two_reports_is_spread() {
    let (fleet, now) = fleet(rules(), &[report(&["a"]), report(&["a"])]);
    let prompt = |index| format!("A prompt of its own, {index}");
    let picked = (0..20).map(|index| fleet.pick(&head(), &ask("a", &prompt(index)), &None, now).unwrap());
    let picked: Vec<String> = picked.map(|mut pick| pick.endpoints.remove(0)).collect();
    for number in [1, 2] {
        let count = picked.iter().filter(|one| **one == endpoint(number)).count();
        assert_eq!(count, 10, "{picked:?}");
    }
}

#[test]
fn a_prompt_that_begins_like_one_before_goes_to_the_same_host() {
    let (fleet, now) = fleet(rules(), &[report(&["a"]), report(&["a"])]);
    let long = "A beginning that many questions have in common. ".repeat(200);
    let at = |text: &str, key: &[u8], now| {
        let head = RequestHead { key: key.to_vec(), ..head() };
        fleet.pick(&head, &ask("a", &format!("{long}{text}")), &None, now).unwrap().endpoints.remove(0)
    };
    let home = at("First?", b"k", now);
    let later = now + Duration::from_millis(200);
    for number in [1, 2] {
        fleet.heard(address(number), later, report(&["a"])).unwrap();
    }
    // The other host has less work, if any.
    assert_eq!(at("Second?", b"k", later), home);
    let number = if home == endpoint(1) { 1 } else { 2 };
    let known = |key: &[u8]| {
        let (head, ask) = (RequestHead { key: key.to_vec(), ..head() }, ask("a", &long));
        let table = fleet.table();
        let host = table.hosts.get(&address(number)).unwrap().number;
        table.prefixes.known(&fleet.blocks(&head, &ask)).tokens(host)
    };
    assert!(known(b"k") > 0);
    assert_eq!(known(b"another's"), 0, "keys share nothing");
    let mut another = report(&["a"]);
    another.instance = 2;
    let last = later + Duration::from_millis(200);
    fleet.heard(address(3 - number), last, report(&["a"])).unwrap();
    fleet.heard(address(number), last, another).unwrap();
    assert_eq!(known(b"k"), 0, "it holds nothing now");
}

#[test]
fn a_host_that_is_old_lost_or_not_ready_gets_nothing() {
    let mut stopping = report(&["a"]);
    stopping.state = GatewayState::Stopping;
    let (fleet, now) = fleet(rules(), &[report(&["a"]), stopping]);
    assert_eq!(pick(&fleet, "a", now).unwrap().endpoints, [endpoint(1)]);
    assert_eq!(pick(&fleet, "a", now + 2 * STALE).unwrap_err(), PickRefusal::Nobody);
    assert_eq!(fleet.count(now), HostCount { known: 2, ready: 1 });
    fleet.lost(address(1));
    assert_eq!(pick(&fleet, "a", now).unwrap_err(), PickRefusal::Nobody);
    fleet.set_hosts(&BTreeSet::new());
    assert_eq!(fleet.count(now), HostCount::default());
}

#[test]
fn a_subset_is_kept_to() {
    let (fleet, now) = fleet(rules(), &[report(&["a"]), report(&[]), report(&[])]);
    let within = |subset: &[String]| {
        let subset: Subset = Some(subset.to_vec());
        fleet.pick(&head(), &ask("a", "Hello"), &subset, now).map(|pick| pick.endpoints)
    };
    assert_eq!(within(&[endpoint(3)]), Ok(vec![endpoint(3)]));
    assert_eq!(within(&[]), Err(PickRefusal::Nobody));
    assert_eq!(within(&["10.9.9.9:1".to_owned()]), Err(PickRefusal::Nobody));
}

#[test]
fn what_generates_nothing_meets_on_the_first_host() {
    let (fleet, now) = fleet(rules(), &[report(&[]), report(&["a"])]);
    let files = RequestHead { path: "/v1/files".to_owned(), ..RequestHead::default() };
    let at = |now| fleet.pick(&files, &ParsedRequest::default(), &None, now).map(|pick| pick.endpoints);
    assert_eq!(at(now), Ok(vec![endpoint(1), endpoint(2)]));
    fleet.lost(address(1));
    assert_eq!(at(now), Ok(vec![endpoint(2)]));
}

#[test]
fn a_promise_that_no_host_can_keep_is_refused_with_a_forecast_unless_one_is_idle() {
    let slo = Slo { ttft_us: Some(1_000), tpot_us: None };
    let mut busy = report(&["a"]);
    busy.executors = vec![executor(work(64, 16, 1_000))];
    let (late, now) = fleet(PickRules { slo, ..rules() }, &[busy.clone(), busy]);
    let Err(PickRefusal::Late { retry_after_s }) = pick(&late, "a", now) else { panic!("it is refused") };
    assert!(retry_after_s >= 1);
    let (idle, now) = fleet(PickRules { slo, ..rules() }, &[report(&["a"])]);
    assert!(pick(&idle, "a", now).is_ok(), "nothing is gained by waiting");
}

#[test]
fn full_hosts_say_themselves_who_may_wait() {
    let mut full = report(&["a"]);
    full.executors[0].open = false;
    let (fleet, now) = fleet(rules(), &[full]);
    assert_eq!(first(&fleet, "a", now), endpoint(1));
}

#[test]
fn who_leaves_out_what_was_never_told_is_asked_for_everything() {
    let (fleet, now) = (HostFleet::new(rules()), Instant::now());
    fleet.set_hosts(&[address(1)].into());
    assert_eq!(fleet.have(address(1)), KnownTags::default());
    let mut short = report(&["a"]);
    short.registered.content = None;
    assert!(fleet.heard(address(1), now, short.clone()).is_err());
    fleet.heard(address(1), now, report(&["a"])).unwrap();
    short.resident.content = None;
    fleet.heard(address(1), now, short).unwrap();
    assert_eq!(first(&fleet, "a", now), endpoint(1));
}

#[test]
fn hosts_that_know_the_same_adapters_share_them() {
    let (fleet, _) = fleet(rules(), &[report(&[]), report(&[])]);
    let table = fleet.table();
    let tag = report(&[]).registered.tag;
    let known: Vec<_> = table.hosts.values().filter_map(|host| host.registered(tag)).collect();
    assert!(Arc::ptr_eq(&known[0], &known[1]));
}
