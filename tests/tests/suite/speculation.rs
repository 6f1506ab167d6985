//! Draft tokens change no answer.
//!
//! The tests compare greedy and sampled answers of the base and of adapters, alone and in a batch, with
//! weights in memory or on disk. The executor or a split client drafts. Further cases: small chunks,
//! preemption, the prefix cache, adapters in transit, and killed processes.
//!
//! `HOLOBIONT_SPECULATION` sets the number of prompt pairs per deployment, `HOLOBIONT_DRAFTED_DEATHS` the
//! number of killed executors.

use std::{
    path::Path,
    sync::{Arc, Mutex, Weak},
    thread,
};

use e2e_tests::{
    Client, CompletionRequest, Deployment, DeploymentPlan, EXAMPLES, MODELS, StreamEnd,
    answer::CompletionAnswer,
    chaos::FailpointDirectory,
    direct_adapters, fixtures, repeats,
    split::{
        SplitEndpoints, SplitRoute,
        tenant::{OPEN, continuation, text},
    },
    watched,
};

/// Tokens of a phrase, and its repetitions in a prompt, which make the continuation easy to draft.
const PHRASE_TOKENS: usize = 12;
const TIMES: usize = 6;

const TOKENS: u32 = 48;

static PLAIN: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());

/// Deployment without drafts, the reference of all comparisons.
fn plain() -> Arc<Deployment> {
    Deployment::shared(&PLAIN, || DeploymentPlan::with_examples().cores(2).set("DRAFT", "off").start())
}

fn drafting() -> DeploymentPlan {
    DeploymentPlan::with_examples().cores(2).set("DRAFT", "ngram")
}

fn streamed() -> DeploymentPlan {
    drafting().streaming(44)
}

/// Plan with KV cache for a few sequences, chunks smaller than any prompt, and adapters that are rarely on
/// the device.
fn cramped() -> DeploymentPlan {
    drafting().set("CHUNK_TOKENS", "16").bytes("KV_BYTES", 12 << 10).cold(1 << 10, 0.05)
}

fn rounds() -> impl Iterator<Item = u32> {
    0..u32::try_from(repeats::SPECULATION.number()).expect("few")
}

/// Requests for `TOKENS` tokens, greedy and with three seeds, of every model, after a repetitive prompt and
/// another one.
fn asks(salt: u32) -> Vec<CompletionRequest> {
    let phrase = fixtures::prompt(salt, PHRASE_TOKENS);
    let prompts = [phrase.repeat(TIMES), fixtures::prompt(salt + 1, PHRASE_TOKENS * TIMES)];
    let seeds = [None, Some(1), Some(2), Some(3)];
    let of_prompt = |prompt: &Vec<u32>| {
        let of_model = |model| {
            seeds.map(|seed| CompletionRequest {
                seed,
                ..CompletionRequest::new(model, prompt.clone(), TOKENS)
            })
        };
        MODELS.into_iter().flat_map(of_model).collect::<Vec<_>>()
    };
    prompts.iter().flat_map(of_prompt).collect()
}

fn one_after_the_other(client: &Client, asks: &[CompletionRequest]) -> Vec<CompletionAnswer> {
    asks.iter().map(|ask| client.ask(ask).answer).collect()
}

fn together(client: &Client, asks: &[CompletionRequest]) -> Vec<CompletionAnswer> {
    let asked = asks.iter().map(|ask| {
        let (client, ask) = (client.clone(), ask.clone());
        thread::spawn(move || client.ask(&ask).answer)
    });
    let asked: Vec<_> = asked.collect();
    asked.into_iter().map(|answer| answer.join().expect("an answer")).collect()
}

fn accepted(client: &Client) -> u64 {
    client.status()["speculation"]["accepted_tokens"].as_u64().expect("a number")
}

/// Checks that a drafting deployment gives the reference's bits, to requests alone and together. In the
/// second round prompts come from the prefix cache.
fn assert_same(plan: &DeploymentPlan) -> Deployment {
    let (drafting, plain) = (plan.start(), plain());
    for round in rounds() {
        let asks = asks(900 + 2 * round);
        let expected = one_after_the_other(&plain.client, &asks);
        assert_eq!(together(&drafting.client, &asks), expected);
        assert_eq!(one_after_the_other(&drafting.client, &asks), expected);
    }
    assert!(accepted(&drafting.client) > 0, "{}", drafting.client.status()["speculation"]);
    drafting
}

#[test]
fn whatever_is_drafted_answers_have_the_bits_that_they_have_without() {
    watched(|| {
        assert_same(&drafting());
        assert_eq!(accepted(&plain().client), 0);
    });
}

#[test]
fn what_is_drafted_for_a_base_that_comes_from_a_disk_changes_no_bit() {
    watched(|| {
        let streamed = assert_same(&streamed());
        assert!(streamed.client.metric("holobiont_weight_read_bytes_total") > 0.0);
    });
}

#[test]
fn drafts_in_small_chunks_beside_cold_adapters_and_in_little_memory_change_no_bit() {
    watched(|| {
        let cramped = assert_same(&cramped());
        assert!(cramped.client.metric("holobiont_preemptions_total") > 0.0, "nobody had to give way");
    });
}

#[test]
fn split_clients_that_draft_at_home_have_the_resident_engine_s_tokens_over_every_route() {
    watched(|| {
        let (endpoints, plain, text) = (SplitEndpoints::new(), plain(), text());
        let deployment = endpoints.of(drafting()).start();
        for round in rounds() {
            let asks = asks(900 + 2 * round);
            let expected = one_after_the_other(&plain.client, &asks);
            thread::scope(|scope| {
                for route in [SplitRoute::SharedMemory, SplitRoute::Tls] {
                    let (endpoints, deployment, text, asks, expected) =
                        (&endpoints, &deployment, &text, &asks, &expected);
                    scope.spawn(move || {
                        let mut tenant = endpoints.tenant(deployment, route, OPEN, None);
                        let mut true_guesses = 0;
                        for (ask, expected) in asks.iter().zip(expected) {
                            let adapter = EXAMPLES.contains(&ask.model.as_str());
                            tenant.wear(adapter.then(|| fixtures::example(&ask.model)).as_deref());
                            let (tokens, accepted) = tenant.drafted(ask).expect("an answer");
                            assert_eq!(
                                continuation(text, &tokens),
                                expected.text,
                                "{ask:?} over {}",
                                route.name()
                            );
                            true_guesses += accepted;
                        }
                        assert!(true_guesses > 0, "{}", route.name());
                    });
                }
            });
        }
    });
}

/// Kills the executor of `plan` during drafted answers.
fn assert_redone(plan: &DeploymentPlan) {
    let deployment = plan.clone().restless().start();
    let prompt = fixtures::prompt(950, PHRASE_TOKENS).repeat(TIMES);
    for death in 0..repeats::DRAFTED_DEATHS.number() {
        let model = MODELS[usize::try_from(death).expect("few") % MODELS.len()];
        let seed = (death % 2 == 1).then_some(death);
        let ask = CompletionRequest { seed, ..CompletionRequest::new(model, prompt.clone(), 400) };
        let mut stream = deployment.client.stream(&ask);
        for _ in 0..4 {
            assert_eq!(stream.step(), None, "the answer is long");
        }
        deployment.kill_executor();
        let (answer, ending) = stream.finish();
        assert_eq!(ending, StreamEnd::Done);
        assert_eq!(answer, plain().client.ask(&ask).answer);
    }
}

#[test]
fn an_executor_that_dies_while_drafts_are_verified_is_redone_with_the_same_bits() {
    watched(|| assert_redone(&drafting()));
}

#[test]
fn one_that_dies_in_the_middle_of_a_sweep_is_redone_with_the_same_bits() {
    watched(|| assert_redone(&streamed()));
}

/// Base with a draft model of its own size, slowed down until drafting is worthwhile.
fn slowed(draft: &str, adapters: &Path) -> (Deployment, FailpointDirectory) {
    let places = FailpointDirectory::new();
    places.arm("executor.before_step", "slow 150");
    let root = adapters.display().to_string();
    let plan = DeploymentPlan::with_examples()
        .cores(2)
        .mortal(&places)
        .set("DRAFT", draft)
        .set("ADAPTER_ROOT", &root);
    (plan.start(), places)
}

#[test]
fn drafts_that_are_models_change_no_answer() {
    watched(|| {
        let prompt = fixtures::prompt(960, PHRASE_TOKENS);
        let of_model = |model| {
            [None, Some(1)]
                .map(|seed| CompletionRequest { seed, ..CompletionRequest::new(model, prompt.clone(), 12) })
        };
        let asks: Vec<_> = MODELS.into_iter().flat_map(of_model).collect();
        let expected = one_after_the_other(&plain().client, &asks);
        let draft = tempfile::tempdir().expect("a directory");
        let guesses = draft.path().join("guesses");
        direct_adapters::write_draft(&guesses);
        for (way, setting) in
            [("model", fixtures::model().display().to_string()), ("self", "early-exit".to_owned())]
        {
            let (deployment, _places) = slowed(&setting, draft.path());
            let client = &deployment.client;
            if way == "self" {
                client.load("guesses", &guesses);
                let refused = client.refusal(&CompletionRequest::new("guesses", prompt.clone(), 4));
                assert_eq!(refused, (400, "invalid_value".to_owned()));
            }
            assert_eq!(one_after_the_other(client, &asks), expected);
            assert_eq!(together(client, &asks), expected);
            let told = &client.status()["speculation"];
            assert_eq!(told["by"], way);
            assert!(told["model_accepted_tokens"].as_u64() > Some(0), "{told}");
        }
    });
}
