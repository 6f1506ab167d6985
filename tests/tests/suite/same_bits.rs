//! An answer's bits do not depend on other requests, threads, chunks, the prefix cache or other adapters.

use std::{
    sync::{Arc, Mutex, Weak},
    thread,
};

use serde_json::{Value, json};

use e2e_tests::{
    BASE, Client, CompletionRequest, Deployment, DeploymentPlan, EXAMPLES, MODELS, StreamEnd, answer::Reply,
    fixtures, watched,
};

/// Several KV blocks and, in small chunks, several steps.
const PROMPT_TOKENS: usize = 100;

static TWO_CORES: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());
static ONE_CORE: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());

/// Two threads, and chunks larger than any prompt here.
fn two_cores() -> Arc<Deployment> {
    Deployment::shared(&TWO_CORES, || DeploymentPlan::with_examples().cores(2).start())
}

/// One thread, and chunks of the minimum size.
fn one_core() -> Arc<Deployment> {
    Deployment::shared(&ONE_CORE, || {
        DeploymentPlan::with_examples().cores(1).set("CHUNK_TOKENS", "16").start()
    })
}

/// Request for sixteen tokens of `model`; prompts of different seeds share no prefix.
fn ask(model: &str, seed: u32) -> CompletionRequest {
    CompletionRequest::new(model, fixtures::prompt(seed, PROMPT_TOKENS), 16)
}

/// Calls `body` while fifteen other requests, on all models in turn, are answered.
fn in_company<T>(client: &Client, seed: u32, body: impl FnOnce() -> T) -> T {
    let others = (0..15).zip(MODELS.iter().cycle()).map(|(index, model)| {
        let prompt = fixtures::prompt(seed + index, 20 + 7 * index as usize);
        let (client, ask) = (client.clone(), CompletionRequest::new(model, prompt, 64));
        thread::spawn(move || {
            let mut stream = client.stream(&ask);
            assert_eq!(stream.step(), None, "the company leaves early");
            stream
        })
    });
    let others: Vec<_> = others.collect();
    let others: Vec<_> = others.into_iter().map(|other| other.join().expect("company")).collect();
    let result = body();
    for other in others {
        assert_eq!(other.finish().1, StreamEnd::Done);
    }
    result
}

fn ask_all(client: &Client, seed: u32) -> [Reply; 4] {
    let asked = MODELS.map(|model| {
        let client = client.clone();
        thread::spawn(move || client.ask(&ask(model, seed)))
    });
    asked.map(|reply| reply.join().expect("a reply"))
}

#[test]
fn a_request_alone_and_among_fifteen_others_has_the_same_bits() {
    watched(|| {
        let client = &two_cores().client;
        let alone = MODELS.map(|model| client.ask(&ask(model, 100)).answer);
        let beside = in_company(client, 200, || ask_all(client, 100));
        assert_eq!(alone, beside.map(|reply| reply.answer));
        // In reverse order, so that the uncached prompts run in company too.
        let beside = in_company(client, 300, || ask_all(client, 101));
        assert!(beside.iter().all(|reply| reply.cached_tokens == 0), "the prompts are new");
        let alone = MODELS.map(|model| client.ask(&ask(model, 101)).answer);
        assert_eq!(alone, beside.map(|reply| reply.answer));
    });
}

#[test]
fn one_thread_in_small_chunks_and_two_threads_in_large_ones_have_the_same_bits() {
    watched(|| {
        let (one, two) = (one_core(), two_cores());
        for model in MODELS {
            let [one, two] = [&one, &two].map(|deployment| deployment.client.ask(&ask(model, 400)));
            assert_eq!((one.cached_tokens, two.cached_tokens), (0, 0), "{model}");
            assert_eq!(one.answer, two.answer, "{model}");
        }
    });
}

#[test]
fn a_prompt_from_the_prefix_cache_and_one_computed_anew_have_the_same_bits() {
    watched(|| {
        for deployment in [one_core(), two_cores()] {
            for model in MODELS {
                let [anew, cached] = [0, 1].map(|_| deployment.client.ask(&ask(model, 500)));
                assert_eq!(anew.cached_tokens, 0, "{model}");
                assert!(cached.cached_tokens > 0, "{model}");
                assert_eq!(anew.answer, cached.answer, "{model}");
            }
        }
    });
}

#[test]
fn no_two_models_share_cached_prefixes_or_answers() {
    watched(|| {
        let deployment = two_cores();
        let replies = MODELS.map(|model| deployment.client.ask(&ask(model, 600)));
        assert!(replies.iter().all(|reply| reply.cached_tokens == 0), "{replies:?}");
        for (index, reply) in replies.iter().enumerate() {
            let others = &replies[index + 1..];
            assert!(others.iter().all(|other| other.answer.scored != reply.answer.scored), "{reply:?}");
        }
    });
}

#[test]
fn a_stream_and_a_whole_answer_have_the_same_bits() {
    watched(|| {
        let client = &two_cores().client;
        let mut sampled = ask("pirate", 700);
        sampled.seed = Some(7);
        for ask in [ask(BASE, 700), sampled] {
            let (streamed, ending) = client.stream(&ask).finish();
            assert_eq!(ending, StreamEnd::Done);
            assert_eq!(streamed, client.ask(&ask).answer);
        }
    });
}

#[test]
fn the_base_has_the_same_bits_with_no_adapter_loaded_and_beside_three_in_use() {
    watched(|| {
        let deployment =
            DeploymentPlan::bare().set("ADAPTER_ROOT", &fixtures::examples().to_string_lossy()).start();
        let client = &deployment.client;
        assert_eq!(client.adapters(), []);
        let without = client.ask(&ask(BASE, 800)).answer;
        for name in EXAMPLES {
            client.load(name, &fixtures::example(name));
        }
        let beside = in_company(client, 900, || client.ask(&ask(BASE, 800)).answer);
        assert_eq!(without, beside);
        // A deployment with the adapters from its start agrees.
        let beside = in_company(client, 950, || client.ask(&ask(BASE, 801)));
        assert_eq!(beside.cached_tokens, 0);
        assert_eq!(beside.answer, one_core().client.ask(&ask(BASE, 801)).answer);
    });
}

/// Scores at position `at` of `prompt` in a completion of the tokens before: the token is forced, and its
/// log-probabilities are the model's own, before any sampling settings.
fn sampled_score(client: &Client, model: &str, prompt: &[u32], at: usize) -> (Value, Value) {
    let forced = prompt[at].to_string();
    let body = json!({
        "model": model, "prompt": prompt[..at], "max_tokens": 1, "temperature": 0, "logprobs": 5,
        "logit_bias": { forced: 100 },
    });
    let answer = client.try_post("/v1/completions", &body).expect("an answer");
    let scores = &answer["choices"][0]["logprobs"];
    (scores["token_logprobs"][0].clone(), scores["top_logprobs"][0].clone())
}

#[test]
fn an_echoed_prompt_has_the_very_floats_its_tokens_are_sampled_with() {
    watched(|| {
        let client = &two_cores().client;
        let prompt = fixtures::prompt(400, 70);
        for model in MODELS {
            let body = json!({
                "model": model, "prompt": [prompt], "max_tokens": 1, "temperature": 0, "logprobs": 5, "echo": true,
            });
            let answer = client.try_post("/v1/completions", &body).expect("an answer");
            let scores = &answer["choices"][0]["logprobs"];
            assert_eq!(scores["token_logprobs"].as_array().map(Vec::len), Some(prompt.len() + 1));
            assert!(scores["token_logprobs"][0].is_null(), "nothing precedes the first token");
            for at in [1, 2, 15, 16, 17, 33, 69] {
                let echoed = (scores["token_logprobs"][at].clone(), scores["top_logprobs"][at].clone());
                assert_eq!(echoed, sampled_score(client, model, &prompt, at), "{model}, position {at}");
            }
        }
    });
}
