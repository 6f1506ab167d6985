//! KV cache on disk: a conversation continues after a kill or restart without prefill, with the same bits,
//! and a damaged disk costs only time.

use std::{
    fs::File,
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    sync::Arc,
};

use e2e_tests::{
    BASE, Client, CompletionAnswer, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess,
    StateDirectory, eventually, fixtures, watched,
};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;

/// Twelve full blocks, and a part of one.
const PROMPT: usize = 200;
const WHOLE: u64 = 192;

fn plan() -> DeploymentPlan {
    DeploymentPlan::with_examples().bytes("DISK_BYTES", 64 << 10)
}

fn blocks(client: &Client) -> Option<Value> {
    client.try_get("/v1/status").ok().map(|status| status["memory"].clone())
}

fn kept(client: &Client, count: u64) {
    eventually("history is on the disk", || {
        blocks(client).is_some_and(|memory| memory["disk"]["used"].as_u64() >= Some(count))
    });
}

fn asks() -> [CompletionRequest; 2] {
    [BASE, "pirate"].map(|model| CompletionRequest::new(model, fixtures::prompt(3, PROMPT), 40))
}

/// Deployment with answered requests and their blocks on the disk.
fn asked(place: &Arc<StateDirectory>, asks: &[CompletionRequest; 2]) -> (Deployment, [CompletionAnswer; 2]) {
    let deployment = plan().start_in(Arc::clone(place));
    let answers = asks.each_ref().map(|ask| deployment.client.ask(ask).answer);
    kept(&deployment.client, asks.len() as u64 * WHOLE / 16);
    (deployment, answers)
}

fn assert_resumed(
    deployment: &Deployment,
    asks: &[CompletionRequest],
    before: &[CompletionAnswer],
    least: u64,
) {
    for (ask, before) in asks.iter().zip(before) {
        let mut again = None;
        eventually("requests are served again", || {
            again = deployment.client.try_ask(ask).ok();
            again.is_some()
        });
        let again = again.unwrap();
        assert_eq!(again.answer, *before, "{}", ask.model);
        assert!(again.cached_tokens >= least, "{}: {} tokens were there", ask.model, again.cached_tokens);
    }
}

#[test]
fn a_conversation_goes_on_after_a_death_and_a_restart_to_the_same_bits() {
    watched(|| {
        let (place, asks) = (Arc::new(StateDirectory::new()), asks());
        let (deployment, before) = asked(&place, &asks);
        deployment.kill_executor();
        assert_resumed(&deployment, &asks, &before, WHOLE);
        assert!(deployment.stop().success());
        let deployment = plan().start_in(Arc::clone(&place));
        assert_resumed(&deployment, &asks, &before, WHOLE);
        assert!(deployment.stop().success());
        // Other users can read neither the directory nor the file.
        let file = place.state().join("history/history.kv");
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
    });
}

#[test]
fn bits_that_flipped_on_the_disk_cost_time_and_nothing_else() {
    watched(|| {
        let (place, asks) = (Arc::new(StateDirectory::new()), asks());
        let (deployment, before) = asked(&place, &asks);
        assert!(deployment.stop().success());
        let file =
            File::options().read(true).write(true).open(place.state().join("history/history.kv")).unwrap();
        let end = file.metadata().unwrap().len();
        // One byte per 40,000 after the header, so that each block is damaged.
        for at in (8192..end).step_by(40_000) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        }
        let deployment = plan().start_in(Arc::clone(&place));
        assert_resumed(&deployment, &asks, &before, 0);
        eventually("it is told that the first block of each was damaged", || {
            let failed = blocks(&deployment.client).and_then(|memory| memory["blocks"]["failed"].as_u64());
            failed >= Some(asks.len() as u64)
        });
    });
}

#[test]
fn a_disk_that_takes_no_more_costs_no_answer_and_is_written_again_once_it_does() {
    watched(|| {
        let (place, asks) = (Arc::new(StateDirectory::new()), asks());
        let (deployment, before) = asked(&place, &asks);
        let failed = |memory: &Value| memory["blocks"]["failed"].as_u64();
        // To the executor, this limit looks like a full disk.
        let bounded = |bytes| {
            let executor = deployment
                .process(DeploymentProcess::Executor)
                .and_then(|id| Pid::from_raw(id.cast_signed()));
            let limit = Rlimit { current: bytes, maximum: None };
            prlimit(Some(executor.unwrap()), Resource::Fsize, limit).unwrap();
        };
        bounded(Some(1 << 20));
        let other = CompletionRequest::new(BASE, fixtures::prompt(4, PROMPT), 40);
        let first = deployment.client.ask(&other).answer;
        eventually("a write fails", || {
            blocks(&deployment.client).is_some_and(|memory| failed(&memory) >= Some(1))
        });
        assert_resumed(&deployment, &asks, &before, WHOLE);
        bounded(None);
        kept(&deployment.client, (asks.len() as u64 + 1) * WHOLE / 16);
        deployment.kill_executor();
        assert_resumed(&deployment, &[other], &[first], WHOLE);
    });
}
