//! Drafted tokens change no answer: greedy or sampled, base or adapter, alone or in company, and whoever dies meanwhile.

use std::{
    sync::{Arc, Mutex, Weak},
    thread,
};

use e2e_tests::{
    Ask, BASE, Client, Deployment, Ending, MODELS, Places, Plan, answer::Answer, direct_adapters, fixtures,
    repeats, watched,
};

/// Tokens that a prompt says over and over, and how often: what comes next is not hard to guess.
const PHRASE_TOKENS: usize = 12;
const TIMES: usize = 6;

const TOKENS: u32 = 48;

static DRAFTING: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());
static PLAIN: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());

fn drafting() -> Arc<Deployment> {
    Deployment::shared(&DRAFTING, || Plan::with_examples().cores(2).set("DRAFT", "ngram"))
}

fn plain() -> Arc<Deployment> {
    Deployment::shared(&PLAIN, || Plan::with_examples().cores(2).set("DRAFT", "off"))
}

/// Greedily and with three seeds, `TOKENS` of every model behind a prompt that repeats itself and one that does not.
fn asks(salt: u32) -> Vec<Ask> {
    let phrase = fixtures::prompt(salt, PHRASE_TOKENS);
    let prompts = [phrase.repeat(TIMES), fixtures::prompt(salt + 1, PHRASE_TOKENS * TIMES)];
    let seeds = [None, Some(1), Some(2), Some(3)];
    let of_prompt = |prompt: &Vec<u32>| {
        let of_model = |model| seeds.map(|seed| Ask { seed, ..Ask::new(model, prompt.clone(), TOKENS) });
        MODELS.into_iter().flat_map(of_model).collect::<Vec<_>>()
    };
    prompts.iter().flat_map(of_prompt).collect()
}

fn one_after_the_other(client: &Client, asks: &[Ask]) -> Vec<Answer> {
    asks.iter().map(|ask| client.ask(ask).answer).collect()
}

fn together(client: &Client, asks: &[Ask]) -> Vec<Answer> {
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

#[test]
fn whatever_is_drafted_answers_have_the_bits_that_they_have_without() {
    watched(|| {
        let (drafting, plain) = (drafting(), plain());
        for round in 0..u32::try_from(repeats::SPECULATION.number()).expect("few") {
            let asks = asks(900 + 2 * round);
            let expected = one_after_the_other(&plain.client, &asks);
            assert_eq!(one_after_the_other(&drafting.client, &asks), expected);
            assert_eq!(together(&drafting.client, &asks), expected);
        }
        assert_eq!(accepted(&plain.client), 0);
        assert!(accepted(&drafting.client) > 0, "{}", drafting.client.status()["speculation"]);
    });
}

#[test]
fn an_executor_that_dies_while_drafts_are_verified_is_redone_with_the_same_bits() {
    watched(|| {
        let deployment = Plan::with_examples().cores(2).set("DRAFT", "ngram").start();
        let prompt = fixtures::prompt(950, PHRASE_TOKENS).repeat(TIMES);
        for seed in [None, Some(4)] {
            let ask = Ask { seed, ..Ask::new(BASE, prompt.clone(), 400) };
            let mut stream = deployment.client.stream(&ask);
            for _ in 0..4 {
                assert_eq!(stream.step(), None, "the answer is long");
            }
            deployment.kill_executor();
            let (answer, ending) = stream.finish();
            assert_eq!(ending, Ending::Done);
            assert_eq!(answer, plain().client.ask(&ask).answer);
        }
    });
}

/// A base that is drafted for by a model as large as itself, slowed down until that is worth it.
fn slowed(draft: &str) -> (Deployment, Places) {
    let places = Places::new();
    places.arm("executor.before_step", "slow 150");
    (Plan::with_examples().cores(2).mortal(&places).set("DRAFT", draft).start(), places)
}

#[test]
fn drafts_that_are_models_change_no_answer() {
    watched(|| {
        let prompt = fixtures::prompt(960, PHRASE_TOKENS);
        let of_model =
            |model| [None, Some(1)].map(|seed| Ask { seed, ..Ask::new(model, prompt.clone(), 12) });
        let asks: Vec<_> = MODELS.into_iter().flat_map(of_model).collect();
        let expected = one_after_the_other(&plain().client, &asks);
        let draft = tempfile::tempdir().expect("a directory");
        direct_adapters::write_draft(30, draft.path());
        for (way, setting) in
            [("model", fixtures::model().display().to_string()), ("self", "self".to_owned())]
        {
            let (deployment, _places) = slowed(&setting);
            let client = &deployment.client;
            if way == "self" {
                client.load("guesses", draft.path());
                let (status, message) = client.refusal(&Ask::new("guesses", prompt.clone(), 4));
                assert_eq!(status, 400);
                assert!(message.contains("'guesses' is a draft: it answers nobody"), "{message}");
            }
            assert_eq!(one_after_the_other(client, &asks), expected);
            assert_eq!(together(client, &asks), expected);
            let told = &client.status()["speculation"];
            assert_eq!(told["by"], way);
            assert!(told["model_accepted_tokens"].as_u64() > Some(0), "{told}");
        }
    });
}
