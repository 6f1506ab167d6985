//! Several hosts behind the real Envoy and two endpoint pickers: requests reach the hosts of their adapters,
//! get equal answers everywhere, and survive the loss of hosts and pickers.

use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use e2e_tests::{
    BASE, CompletionRequest, DeploymentPlan, DeploymentProcess, EXAMPLES,
    chaos::{AdapterVariants, Traffic},
    eventually,
    fixtures::{self, prompt},
    fleet::{EnvoyFleet, front::FrontSetup},
    split::SplitEndpoints,
    watched,
};
use rustix::process::Signal;
use serde_json::json;

const CLIENTS: u64 = 4;

fn plan() -> DeploymentPlan {
    DeploymentPlan::bare().workers(0)
}

#[test]
fn a_request_goes_to_the_host_that_has_its_adapter_and_says_what_that_host_says() {
    watched(|| {
        let fleet = EnvoyFleet::start(2, plan, FrontSetup::default());
        // Each host has an adapter of its own.
        for (index, (name, example)) in [("left", "pirate"), ("right", "haiku")].into_iter().enumerate() {
            let host = fleet.host(index);
            let path = host.place().adapters().join(name);
            fixtures::variant(example, 16, &path);
            host.client.load(name, &path);
        }
        eventually("the pickers know them", || {
            let found = ["left", "right"]
                .map(|name| fleet.client.try_ask(&CompletionRequest::new(name, prompt(1, 5), 1)));
            found.iter().all(Result::is_ok)
        });
        for (index, name) in ["left", "right"].into_iter().enumerate() {
            for (length, seed) in [(5, None), (200, Some(7))] {
                let ask = CompletionRequest { seed, ..CompletionRequest::new(name, prompt(3, length), 8) };
                let (through, direct) = (fleet.client.ask(&ask), fleet.host(index).client.ask(&ask));
                assert_eq!((through.answer, through.generation), (direct.answer, direct.generation));
                let (streamed, _) = fleet.client.stream(&ask).finish();
                assert_eq!(streamed, fleet.client.ask(&ask).answer, "streams come through as they are");
            }
        }
        let base = CompletionRequest::new(BASE, prompt(4, 40), 8);
        let answers = [0, 1].map(|index| fleet.host(index).client.ask(&base).answer);
        assert_eq!(fleet.client.ask(&base).answer, answers[0]);
        assert_eq!(answers[0], answers[1]);
        let missing = fleet.client.refusal(&CompletionRequest::new("nobody's", prompt(1, 5), 1));
        assert_eq!((missing.0, missing.1.as_str()), (404, "model_not_found"));
    });
}

#[test]
fn pickers_speak_tls_to_envoy_as_the_guide_says() {
    watched(|| {
        let endpoints = SplitEndpoints::new();
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guides/fleet.md");
        let guide = fs::read_to_string(guide).expect("the guide");
        let mut blocks = guide.split("```yaml\n").filter_map(|block| block.split("```").next());
        let block = blocks.find(|block| block.contains("UpstreamTlsContext")).expect("what Envoy needs");
        let block = block.replace("/etc/envoy/picker-ca.pem", &endpoints.ca().display().to_string());
        let protocol = "explicit_http_config: { http2_protocol_options: {} }";
        let with_tls = format!("{protocol}\n{block}");
        // If Envoy cannot reach the picker, no request passes.
        let changes =
            [(protocol, with_tls.as_str()), ("failure_mode_allow: true", "failure_mode_allow: false")];
        let [certificate, key] =
            [endpoints.server_certificate(), endpoints.server_key()].map(|file| file.display().to_string());
        let settings = [("PICKER_CERT", certificate.as_str()), ("PICKER_CERT_KEY", key.as_str())];
        let fleet = EnvoyFleet::start(
            2,
            plan,
            FrontSetup { changes: &changes, settings: &settings, ..FrontSetup::default() },
        );
        // Only one host has this adapter.
        let host = fleet.host(1);
        let path = host.place().adapters().join("right");
        fixtures::variant("haiku", 16, &path);
        host.client.load("right", &path);
        let ask = CompletionRequest::new("right", prompt(2, 9), 4);
        // Each picker polls the hosts by itself.
        eventually("all pickers know it", || (0..8).all(|_| fleet.client.try_ask(&ask).is_ok()));
        let answers: Vec<_> = (0..4).map(|_| fleet.client.ask(&ask).answer).collect();
        assert_eq!(answers, vec![host.client.ask(&ask).answer; 4]);
    });
}

#[test]
fn a_body_that_is_sent_back_by_the_picker_reaches_the_host_as_it_was() {
    watched(|| {
        let changes = [
            ("request_body_mode: BUFFERED", "request_body_mode: FULL_DUPLEX_STREAMED"),
            ("request_trailer_mode: SKIP", "request_trailer_mode: SEND"),
        ];
        let fleet = EnvoyFleet::start(1, plan, FrontSetup { changes: &changes, ..FrontSetup::default() });
        // Longer than a chunk, and than Envoy's read buffer.
        let text = "Words, one after the other. ".repeat(20_000);
        let [through, direct] = [&fleet.client, &fleet.host(0).client]
            .map(|client| client.try_post("/tokenize", &json!({ "prompt": text })).expect("tokens"));
        assert_eq!(through, direct);
        let ask = CompletionRequest { seed: Some(3), ..CompletionRequest::new(BASE, prompt(6, 300), 8) };
        assert_eq!(fleet.client.ask(&ask).answer, fleet.host(0).client.ask(&ask).answer);
        assert!(fleet.decisions(0) >= 2.0, "the picker was asked");
    });
}

#[test]
fn a_beginning_that_was_computed_once_is_found_again_on_the_same_host() {
    watched(|| {
        let fleet = EnvoyFleet::start(2, plan, FrontSetup::default());
        let before = [0, 1].map(|index| fleet.generated(index));
        for index in 0..8 {
            let text = format!("{} Question {index}?", "One story that all of them are about. ".repeat(60));
            let body = json!({ "model": BASE, "prompt": text, "max_tokens": 2, "ignore_eos": true });
            fleet.client.try_post("/v1/completions", &body).expect("an answer");
            // Time in which the pickers learn that all hosts are idle.
            thread::sleep(Duration::from_millis(300));
        }
        let new = [0, 1].map(|index| fleet.generated(index) - before[index]);
        assert!(new.contains(&0.0) && new.contains(&16.0), "one host has answered all: {new:?}");
        let cached = [0, 1].map(|index| fleet.host(index).client.metric("holobiont_cached_tokens_total"));
        assert!(cached.iter().sum::<f64>() > 7.0 * 300.0, "from its cache: {cached:?}");
    });
}

#[test]
fn hosts_and_pickers_may_die_and_be_drained_and_no_request_is_lost() {
    watched(|| {
        let mut fleet = EnvoyFleet::start(3, || plan().restless(), FrontSetup::default());
        let host = fleet.host(0);
        let variants = Arc::new(AdapterVariants::learn(&host.client, &host.place().adapters(), 1));
        for index in 0..3 {
            // Equal content, written where each host may read it.
            let path = fleet.host(index).place().adapters().join("steady");
            fixtures::variant(EXAMPLES[0], 16, &path);
            assert_eq!(fleet.host(index).client.load("steady", &path), variants.adapters[0].1);
        }
        let models = [BASE.to_owned(), "steady".to_owned()];
        let mut traffic = Traffic::begin(&fleet.client, &variants, &models, CLIENTS);
        let tally = Arc::clone(&traffic.tally);
        let answered = || tally.answered.load(Ordering::Relaxed);
        let more = |what: &str| {
            let before = answered();
            eventually(what, || answered() > before + 3 * CLIENTS);
        };
        more("all hosts serve");

        // A picker is killed: the other one takes over.
        let before = fleet.decisions(1);
        fleet.kill_picker(0);
        more("the other picker is asked");
        eventually("it decides", || fleet.decisions(1) > before);
        tally.nobody_asked_again();

        // A host gets SIGTERM: it ends its requests and gets no new ones.
        let drained = fleet.hosts[2].take().expect("it is there");
        assert!(drained.stop().success());
        fleet.until_ready(1, 2.0);
        more("the others serve");
        tally.nobody_asked_again();

        // A gateway is killed: its streams break, and new requests go elsewhere.
        fleet.host(1).signal(DeploymentProcess::Gateway, Signal::KILL);
        more("the other serves");
        eventually("it is back", || fleet.host(1).client.is_healthy());
        fleet.until_ready(1, 2.0);
        traffic.check();
        let broken = tally.retried.load(Ordering::Relaxed);
        assert!(broken <= CLIENTS, "no more than were under way: {broken}");

        // A host is gone for good.
        fleet.hosts[1].take().expect("it is there").kill_supervisor();
        more("the last one serves");
        traffic.check();
        let tally = traffic.finish();
        assert_eq!(tally.not_found.load(Ordering::Relaxed), 0, "everybody knows the adapter");
        assert!(fleet.hosts[0].take().expect("it is there").stop().success());
    });
}

#[test]
fn a_promise_that_nobody_can_keep_is_refused_in_words_that_clients_understand() {
    watched(|| {
        let fleet = EnvoyFleet::start(
            1,
            plan,
            FrontSetup { settings: &[("PICKER_TTFT_MS", "1")], ..FrontSetup::default() },
        );
        let slow = CompletionRequest::new(BASE, prompt(5, 400), 300);
        let streams: Vec<_> = (0..2).filter_map(|_| fleet.client.try_stream(&slow).ok()).collect();
        assert!(!streams.is_empty(), "who finds nothing to wait for is let in");
        eventually("the picker has seen it", || {
            let body = json!({ "model": BASE, "prompt": "Hello", "max_tokens": 1 });
            let refused = fleet.client.try_post("/v1/completions", &body);
            refused.is_err_and(|fault| fault.to_string() == "refused with 429 slo_unattainable")
        });
    });
}
