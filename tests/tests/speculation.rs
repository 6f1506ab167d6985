//! Drafted tokens change no answer: greedy or sampled, base or adapter, alone or in company, and whoever dies meanwhile.

use std::{
    sync::{Arc, Mutex, Weak},
    thread,
};

use e2e_tests::{
    Ask, BASE, Client, Deployment, Ending, MODELS, Plan, answer::Answer, chaos::Places, fixtures, repeats,
    stream::Told, watched,
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
fn what_is_told_of_drafts_changes_no_answer_and_is_text_or_taken_back_at_the_end() {
    watched(|| {
        let (drafting, plain) = (drafting(), plain());
        let asks: Vec<_> = asks(920).into_iter().map(|ask| Ask { provisional: true, ..ask }).collect();
        let (mut came_true, mut retracted) = (0, 0);
        for (ask, expected) in asks.iter().zip(one_after_the_other(&plain.client, &asks)) {
            let mut stream = drafting.client.stream(ask);
            assert_eq!((stream.read_to_end(), &stream.answer), (Ending::Done, &expected));
            came_true += stream.told.came_true;
            retracted += stream.told.retracted;
            let mut silent = plain.client.stream(ask);
            silent.read_to_end();
            assert_eq!((silent.answer, silent.told), (expected, Told::default()), "nobody drafts there");
        }
        assert!(came_true > 0 && retracted > 0, "{came_true} true, {retracted} taken back");
    });
}

#[test]
fn an_executor_that_dies_while_a_guess_stands_leaves_nothing_of_it() {
    watched(|| {
        let places = Places::new();
        let plan = Plan::with_examples().cores(2).set("DRAFT", "ngram");
        let deployment = plan.mortal(&places).start();
        let prompt = fixtures::prompt(960, PHRASE_TOKENS).repeat(TIMES);
        let ask = Ask { provisional: true, ..Ask::new(BASE, prompt, 400) };
        let mut stream = deployment.client.stream(&ask);
        while stream.told.standing.is_empty() {
            // A verification takes long enough that it is seen.
            places.arm("executor.decode", "wait 100");
            assert_eq!(stream.step(), None, "the answer is long, and a guess comes");
        }
        places.clear("executor.decode");
        deployment.kill_executor();
        while !stream.told.standing.is_empty() {
            assert_eq!(stream.step(), None, "it is taken back, and then another goes on");
        }
        let (answer, ending) = stream.finish();
        assert_eq!((ending, answer), (Ending::Done, plain().client.ask(&ask).answer));
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
