//! Kills and orderly ends: streams end properly, killed processes restart, and stopped ones are gone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use e2e_tests::{
    BASE, Client, CompletionAnswer, CompletionRequest, Deployment, DeploymentPlan, MODELS, StreamEnd,
    eventually, fixtures, watched,
};

/// Started streams, each read by a thread of its own.
struct OpenStreams {
    readers: Vec<JoinHandle<(CompletionAnswer, StreamEnd)>>,
    ended: Arc<AtomicUsize>,
}

impl OpenStreams {
    /// Starts the streams of `asks`; returns when each has sent a token.
    fn begin(client: &Client, asks: &[CompletionRequest]) -> Self {
        let ended = Arc::new(AtomicUsize::new(0));
        let (begun, first_chunks) = mpsc::channel();
        let readers = asks.iter().map(|ask| {
            let (client, ask, begun, ended) =
                (client.clone(), ask.clone(), begun.clone(), Arc::clone(&ended));
            thread::spawn(move || {
                let mut stream = client.stream(&ask);
                assert_eq!(stream.step(), None, "it ends before it begins");
                begun.send(()).expect("the test still waits");
                let end = stream.finish();
                ended.fetch_add(1, Ordering::SeqCst);
                end
            })
        });
        let readers: Vec<_> = readers.collect();
        drop(begun);
        assert_eq!(first_chunks.iter().take(asks.len()).count(), asks.len(), "some streams did not begin");
        Self { readers, ended }
    }

    fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    fn finish(self) -> Vec<(CompletionAnswer, StreamEnd)> {
        self.readers.into_iter().map(|reader| reader.join().expect("a stream can be read")).collect()
    }
}

/// Two requests per model, with `max_tokens` each.
fn asks(max_tokens: u32) -> Vec<CompletionRequest> {
    let both = MODELS.into_iter().flat_map(|model| {
        [30, 70].map(|length| CompletionRequest::new(model, fixtures::prompt(1, length), max_tokens))
    });
    both.collect()
}

fn golden(deployment: &Deployment, asks: &[CompletionRequest]) -> Vec<CompletionAnswer> {
    asks.iter().map(|ask| deployment.client.ask(ask).answer).collect()
}

#[test]
fn a_killed_executor_comes_back_with_its_adapters_and_every_stream_ends_properly() {
    watched(|| {
        let deployment = DeploymentPlan::with_examples().start();
        let client = &deployment.client;
        let asks = asks(96);
        let golden = golden(&deployment, &asks);
        let adapters = client.adapters();

        let streams = OpenStreams::begin(client, &asks);
        deployment.kill_executor();
        assert!(streams.ended() < asks.len(), "nothing was under way when the executor was killed");
        for ((answer, ending), golden) in streams.finish().iter().zip(&golden) {
            match ending {
                StreamEnd::Done => assert_eq!(answer, golden),
                StreamEnd::Error(code) => {
                    assert_eq!(code, "executor_unavailable");
                    assert!(answer.begins(golden), "{answer:?} does not begin {golden:?}");
                }
                StreamEnd::Cut => panic!("a stream just ended, after {answer:?}"),
            }
        }
        eventually("the executor is back", || client.is_healthy());
        assert_eq!(client.adapters(), adapters);
        for (ask, golden) in asks.iter().zip(&golden) {
            assert_eq!(&client.ask(ask).answer, golden, "{ask:?}");
        }
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_stop_lets_running_streams_end_and_leaves_nothing() {
    watched(|| {
        let deployment = DeploymentPlan::with_examples().start();
        let asks = asks(64);
        let golden = golden(&deployment, &asks);
        let streams = OpenStreams::begin(&deployment.client, &asks);
        let status = deployment.stop();
        assert_eq!(status.code(), Some(0), "{status}");
        let expected: Vec<_> = golden.into_iter().map(|answer| (answer, StreamEnd::Done)).collect();
        assert_eq!(streams.finish(), expected);
    });
}

#[test]
fn a_stream_that_is_longer_than_the_grace_ends_in_an_error_event() {
    watched(|| {
        let deployment = DeploymentPlan::bare().set("GRACE_MS", "1000").start();
        let endless = CompletionRequest::new(BASE, fixtures::prompt(2, 30), 6000);
        let streams = OpenStreams::begin(&deployment.client, &[endless.clone(), endless]);
        let status = deployment.stop();
        assert_eq!(status.code(), Some(0), "{status}");
        for (answer, ending) in streams.finish() {
            assert!(matches!(ending, StreamEnd::Error(_)), "{ending:?} after {} tokens", answer.scored.len());
        }
    });
}

#[test]
fn a_state_directory_in_use_is_refused_and_the_first_deployment_goes_on() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let second = DeploymentPlan::bare().command(deployment.place()).output().expect("holobiont runs");
        let message = String::from_utf8_lossy(&second.stderr);
        assert!(!second.status.success());
        assert!(message.contains("already uses the state directory"), "{message}");
        assert!(message.contains(&format!("process {}", deployment.id())), "{message}");
        deployment.client.ask(&CompletionRequest::new(BASE, fixtures::prompt(3, 10), 4));
        assert!(deployment.stop().success());
    });
}
