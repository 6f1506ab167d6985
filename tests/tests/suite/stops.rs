//! Processes that stop without ending, and orderly ends: no request is answered twice or lost.
//!
//! `HOLOBIONT_STOPS_MS` sets the lengths of the stops in milliseconds (`100,1000,6000`).

use std::{
    env,
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use e2e_tests::{
    BASE, Client, DeploymentPlan, DeploymentProcess, RequestFault,
    chaos::{AdapterVariants, ChaosRng, FailpointDirectory, Traffic},
    eventually, repeats, watched,
};
use rustix::process::Signal;

const DEFAULT_STOPS_MS: &str = "100,1000,6000";
/// Shorter than the longest stop, so that the gateway gives up on the executor and reconnects.
const SILENCE_MS: u64 = 3000;
const CLIENTS: u64 = 6;

fn stops() -> Vec<Duration> {
    let text = env::var("HOLOBIONT_STOPS_MS").unwrap_or_else(|_| DEFAULT_STOPS_MS.to_owned());
    text.split(',').map(|ms| Duration::from_millis(ms.parse().expect("milliseconds"))).collect()
}

/// Base and one adapter, with their golden answers.
fn variants(client: &Client, plan_place: &std::path::Path) -> (Arc<AdapterVariants>, Vec<String>) {
    let variants = Arc::new(AdapterVariants::learn(client, plan_place, 1));
    client.load("steady", &variants.adapters[0].0);
    (variants, vec![BASE.to_owned(), "steady".to_owned()])
}

#[test]
fn a_process_may_be_stopped_for_any_time_and_every_token_stays_golden() {
    watched(|| {
        let plan = DeploymentPlan::bare().set("EXECUTOR_TIMEOUT_MS", &SILENCE_MS.to_string());
        let deployment = plan.start();
        let (variants, models) = variants(&deployment.client, &deployment.place().adapters());
        let ids = DeploymentProcess::ALL.map(|process| deployment.process(process));
        let mut traffic = Traffic::begin(&deployment.client, &variants, &models, CLIENTS);
        for process in DeploymentProcess::ALL {
            for stop in stops() {
                deployment.signal(process, Signal::STOP);
                thread::sleep(stop);
                deployment.signal(process, Signal::CONT);
                eventually("requests are served again", || deployment.client.is_healthy());
                let before = traffic.tally.answered.load(Ordering::Relaxed);
                eventually("clients are answered again", || {
                    traffic.tally.answered.load(Ordering::Relaxed) > before
                });
                traffic.check();
            }
        }
        traffic.finish();
        assert_eq!(
            ids,
            DeploymentProcess::ALL.map(|process| deployment.process(process)),
            "nobody was started again"
        );
        assert!(deployment.stop().success());
    });
}

#[test]
fn an_executor_that_is_stopped_is_noticed_and_said() {
    watched(|| {
        let deployment = DeploymentPlan::bare().set("EXECUTOR_TIMEOUT_MS", "1000").start();
        deployment.signal(DeploymentProcess::Executor, Signal::STOP);
        eventually("the gateway says that it cannot serve", || !deployment.client.is_healthy());
        deployment.signal(DeploymentProcess::Executor, Signal::CONT);
        eventually("requests are served again", || deployment.client.is_healthy());
        deployment.client.ask(&e2e_tests::CompletionRequest::new(BASE, vec![100, 200], 4));
        assert!(deployment.stop().success());
    });
}

/// Long enough for every process of a busy machine to report to the supervisor.
const WATCHDOG_MS: u64 = 15_000;

#[test]
fn an_executor_that_stays_stopped_is_replaced_and_every_token_stays_golden() {
    watched(|| {
        let plan = DeploymentPlan::bare()
            .set("WATCHDOG_MS", &WATCHDOG_MS.to_string())
            .set("EXECUTOR_TIMEOUT_MS", &SILENCE_MS.to_string());
        let deployment = plan.start();
        let (variants, models) = variants(&deployment.client, &deployment.place().adapters());
        let stopped = deployment.process(DeploymentProcess::Executor);
        let traffic = Traffic::begin(&deployment.client, &variants, &models, CLIENTS);
        deployment.signal(DeploymentProcess::Executor, Signal::STOP);
        eventually("another executor takes its place", || {
            deployment.process(DeploymentProcess::Executor).is_some_and(|id| Some(id) != stopped)
        });
        eventually("requests are served again", || deployment.client.is_healthy());
        let before = traffic.tally.answered.load(Ordering::Relaxed);
        eventually("clients are answered again", || traffic.tally.answered.load(Ordering::Relaxed) > before);
        traffic.finish();
        let log = deployment.log();
        let causes: Vec<_> = log.lines().filter(|line| line.contains("sent no heartbeat")).collect();
        assert!(
            matches!(causes.as_slice(), [line] if line.contains("base-executor") && line.contains("restarting it")),
            "the cause stands in the line that says so, and nobody else was silent: {causes:?}"
        );
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_supervisor_that_was_stopped_itself_replaces_nobody() {
    watched(|| {
        let deployment = DeploymentPlan::bare().set("WATCHDOG_MS", "4000").start();
        let ids = DeploymentProcess::ALL.map(|process| deployment.process(process));
        // By then every process has reported once, so all are watched.
        thread::sleep(Duration::from_secs(4));
        deployment.signal_supervisor(Signal::STOP);
        thread::sleep(Duration::from_secs(12));
        deployment.client.ask(&e2e_tests::CompletionRequest::new(BASE, vec![100, 200], 4));
        deployment.signal_supervisor(Signal::CONT);
        thread::sleep(Duration::from_secs(1));
        assert_eq!(
            ids,
            DeploymentProcess::ALL.map(|process| deployment.process(process)),
            "all had no time to speak"
        );
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_storm_of_deaths_ends_in_service_as_before() {
    let storm = Duration::from_secs(repeats::STORM_S.number());
    watched(move || {
        let deployment = DeploymentPlan::bare().mortal(&FailpointDirectory::new()).start();
        let (variants, models) = variants(&deployment.client, &deployment.place().adapters());
        let registry = deployment.client.registered();
        let mut traffic = Traffic::begin(&deployment.client, &variants, &models, CLIENTS);
        let (mut random, started) = (ChaosRng::new(1), Instant::now());
        while started.elapsed() < storm {
            deployment.signal(*random.pick(&DeploymentProcess::ALL), Signal::KILL);
            thread::sleep(Duration::from_millis(200));
            traffic.check();
        }
        eventually("requests are served again", || deployment.client.is_healthy());
        let before = traffic.tally.answered.load(Ordering::Relaxed);
        eventually("every client is answered again", || {
            traffic.tally.answered.load(Ordering::Relaxed) > before + CLIENTS
        });
        traffic.finish();
        assert_eq!(deployment.client.registered(), registry);
        assert!(deployment.stop().success());
    });
}

fn never_read(url: &str) -> TcpStream {
    let address = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).expect("the gateway listens");
    let body = format!(
        r#"{{"model":"{BASE}","prompt":"The sea","max_tokens":7000,"ignore_eos":true,"stream":true,"logprobs":5}}"#
    );
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("a request can be sent");
    stream
}

#[test]
fn a_drain_ends_within_its_grace_although_one_client_never_reads() {
    watched(|| {
        let deployment = DeploymentPlan::bare().set("GRACE_MS", "3000").start();
        let client = deployment.client.clone();
        let mut silent = never_read(client.url());
        let long = e2e_tests::CompletionRequest::new(BASE, vec![100; 20], 5000);
        let reader = {
            let client = client.clone();
            thread::spawn(move || client.stream(&long).finish())
        };
        eventually("both are being computed", || client.metric("holobiont_requests_running") == 2.0);
        let id = deployment.id();
        let late = {
            let client = client.clone();
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(500));
                client.try_ask(&e2e_tests::CompletionRequest::new(BASE, vec![100], 1))
            })
        };
        // A second SIGTERM must not shorten the orderly end.
        let again = thread::spawn(move || {
            thread::sleep(Duration::from_millis(1000));
            let pid = rustix::process::Pid::from_raw(i32::try_from(id).expect("a process id"));
            let _ = rustix::process::kill_process(pid.expect("a process id"), Signal::TERM);
        });
        deployment.stop();
        again.join().expect("it was sent");
        let (answer, ending) = reader.join().expect("the stream ends properly");
        assert!(matches!(ending, e2e_tests::StreamEnd::Error(_)), "{ending:?} after {}", answer.scored.len());
        let late = late.join().expect("it is answered or refused");
        let refused =
            matches!(&late, Err(RequestFault::Refused { status: 503, .. } | RequestFault::Silence(_)));
        assert!(refused, "accepted after draining had begun: {late:?}");
        // The unread connection must be closed.
        let mut rest = Vec::new();
        let _ = silent.read_to_end(&mut rest);
    });
}
