//! Receipts: every answer's receipt holds however the answer was computed, and no forged one does.
//!
//! Forged receipts are signed again with the deployment's own key, so that only the replay can find them.
//!
//! `HOLOBIONT_RECEIPTS` sets the number of verified answers.

use std::{
    fs,
    sync::{Arc, Mutex, Weak},
    thread,
};

use e2e_tests::{
    BASE, Client, CompletionRequest, Deployment, DeploymentPlan, MODELS, StreamEnd, chaos::ChaosRng,
    fixtures, repeats, watched,
};
use receipts::{AnswerRecord, Receipt, SigningKey};
use serde_json::{Value, json};

const TOKENS: u32 = 40;

static SHARED: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());

/// Deployment with adapters that drafts.
fn drafting() -> Arc<Deployment> {
    Deployment::shared(&SHARED, || DeploymentPlan::with_examples().cores(2).set("DRAFT", "ngram").start())
}

/// Completion's body with the fields `more`; by default greedy.
fn ask(model: &str, more: &Value) -> Value {
    let mut body = json!({
        "model": model, "prompt": fixtures::prompt(7, 30), "max_tokens": TOKENS, "temperature": 0.0, "seed": 1,
        "receipt": true,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn receipt(client: &Client, body: &Value) -> Value {
    let route = if body["messages"].is_array() { "/v1/chat/completions" } else { "/v1/completions" };
    let answer = client.try_post(route, body).unwrap_or_else(|fault| panic!("{body}: {fault}"));
    assert!(answer["receipt"].is_object(), "{answer}");
    answer["receipt"].clone()
}

fn verdict(client: &Client, receipt: &Value) -> Value {
    client.try_post("/v1/receipts/verify", &json!({ "receipt": receipt })).expect("a verdict")
}

fn assert_holds(client: &Client, receipt: &Value) {
    let verdict = verdict(client, receipt);
    let tokens = receipt["record"]["answer"].as_array().unwrap().len();
    assert_eq!(
        (&verdict["valid"], &verdict["tokens"]),
        (&json!(true), &json!(tokens)),
        "{verdict} of {receipt}"
    );
}

/// Changes a record and signs it with the deployment's key.
fn forged(deployment: &Deployment, receipt: &Value, change: impl FnOnce(&mut AnswerRecord)) -> Value {
    let mut record = serde_json::from_value::<Receipt>(receipt.clone()).unwrap().record;
    change(&mut record);
    let key = SigningKey::open(&deployment.place().state()).expect("the deployment's key");
    serde_json::to_value(Receipt::sign(record, &key)).unwrap()
}

/// Requests of all kinds: greedy, sampled in every way, with a form, exact, and ended in every way.
fn kinds() -> Vec<Value> {
    let phrase = fixtures::prompt(3, 12).repeat(6);
    let sampled = json!({
        "temperature": 1.1, "top_p": 0.9, "top_k": 60, "min_p": 0.01, "seed": u64::MAX, "presence_penalty": 0.7,
        "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": { "400": 3.5, "500": -7 },
    });
    let schema =
        json!({ "type": "object", "properties": { "age": { "type": "integer" } }, "required": ["age"] });
    let form = json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } });
    let hello = json!([{ "role": "user", "content": "Tell me a story about a ship." }]);
    vec![
        json!({}),
        json!({ "prompt": phrase }),
        json!({ "prompt": phrase, "temperature": 0.8, "seed": 5 }),
        sampled,
        json!({ "temperature": 1.0, "seed": 3, "structured_outputs": { "regex": "([0-9] ){3,60}" } }),
        json!({ "temperature": 1.0, "seed": 4, "response_format": form, "max_tokens": 60 }),
        json!({ "precision": "exact", "temperature": 0.8, "seed": 6 }),
        json!({ "temperature": 1.2, "seed": 8, "ignore_eos": true, "max_tokens": 200 }),
        json!({ "temperature": 1.0, "seed": 9, "stop": ["e", "a"], "min_tokens": 3 }),
        json!({ "temperature": 1.0, "seed": 2, "max_tokens": 1 }),
        json!({ "prompt": null, "messages": hello, "temperature": 0.7, "seed": 1 }),
        json!({ "prompt": null, "messages": hello, "stop": "\n", "seed": 1 }),
        json!({ "logprobs": 3, "prompt_logprobs": 1, "seed": 1, "temperature": 0.5 }),
    ]
}

#[test]
fn the_receipt_of_every_kind_of_answer_holds_twice_and_beside_others() {
    watched(|| {
        let deployment = drafting();
        let client = &deployment.client;
        for more in kinds() {
            let mut bodies: Vec<_> = MODELS.iter().map(|model| ask(model, &more)).collect();
            for body in &mut bodies {
                body.as_object_mut().unwrap().retain(|_, value| !value.is_null());
            }
            // The second answer's prompt comes from the prefix cache.
            let receipts: Vec<_> = bodies.iter().chain(&bodies).map(|body| receipt(client, body)).collect();
            for (first, second) in receipts.iter().zip(&receipts[bodies.len()..]) {
                assert_eq!(first["record"], second["record"], "equal requests have equal records");
            }
            thread::scope(|scope| {
                receipts.iter().for_each(|receipt| _ = scope.spawn(|| assert_holds(client, receipt)));
            });
        }
        let accepted = client.status()["speculation"]["accepted_tokens"].as_u64();
        assert!(accepted > Some(0), "nothing was drafted");
    });
}

#[test]
fn a_streamed_answer_that_another_executor_finished_has_a_receipt_that_holds() {
    watched(|| {
        let deployment = DeploymentPlan::bare().restless().start();
        let client = &deployment.client;
        for seed in [None, Some(3)] {
            let asked = CompletionRequest {
                seed,
                receipt: true,
                ..CompletionRequest::new(BASE, fixtures::prompt(1, 20), 120)
            };
            let mut stream = client.stream(&asked);
            (0..10).for_each(|_| assert_eq!(stream.step(), None));
            deployment.kill_executor();
            assert_eq!(stream.read_to_end(), StreamEnd::Done);
            let receipt = stream.receipt.expect("the last chunk has it");
            assert_eq!(receipt["record"]["answer"].as_array().unwrap().len(), 120);
            assert_holds(client, &receipt);
        }
        assert!(deployment.log().contains("resuming a sequence"), "no answer lost its executor");
    });
}

#[test]
fn one_changed_token_seed_adapter_weight_or_sampler_field_is_found_although_it_is_signed() {
    watched(|| {
        let deployment = drafting();
        let client = &deployment.client;
        let sampled = json!({ "temperature": 1.0, "seed": 11, "frequency_penalty": 0.4, "ignore_eos": true });
        let honest = receipt(client, &ask("pirate", &sampled));
        assert_holds(client, &honest);
        for position in [0, 1, 17, TOKENS as usize - 1] {
            let receipt = forged(&deployment, &honest, |record| record.answer[position] ^= 1);
            let found = verdict(client, &receipt);
            assert_eq!((&found["part"], &found["position"]), (&json!("token"), &json!(position)), "{found}");
            assert_eq!(found["drawn"], honest["record"]["answer"][position]);
        }
        let others: [fn(&mut AnswerRecord); 5] = [
            |record| record.sampler.seed += 1,
            |record| record.sampler.temperature = 3.0,
            |record| record.sampler.logit_bias = vec![(record.answer[5], -100.0)],
            |record| record.prompt[3] ^= 1,
            |record| record.limits.stop_tokens.push(record.answer[4]),
        ];
        for (index, change) in others.into_iter().enumerate() {
            let found = verdict(client, &forged(&deployment, &honest, change));
            assert_eq!(found["valid"], false, "change {index}: {found}");
        }
        let digits =
            receipt(client, &ask("pirate", &json!({ "structured_outputs": { "regex": "[0-9]{40}" } })));
        let digits: Receipt = serde_json::from_value(digits).unwrap();
        let formed = forged(&deployment, &honest, |record| record.constraint = digits.record.constraint);
        assert_eq!(verdict(client, &formed)["part"], "token", "another grammar gives other tokens");
        let of_base = forged(&deployment, &honest, |record| record.adapter = None);
        assert_eq!(verdict(client, &of_base)["part"], "token", "other weights give other tokens");
        let cut = forged(&deployment, &honest, |record| record.answer.truncate(9));
        assert_eq!(verdict(client, &cut)["part"], "end");
        let mut unsigned = honest.clone();
        unsigned["record"]["sampler"]["seed"] = "12".into();
        assert_eq!(verdict(client, &unsigned)["part"], "chain");
        assert_holds(client, &honest);
    });
}

#[test]
fn an_adapter_that_was_replaced_under_its_name_does_not_confirm_the_old_answer() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let (client, adapters) = (&deployment.client, deployment.place().adapters());
        for alpha in [32, 4] {
            fixtures::variant("pirate", alpha, &adapters.join(alpha.to_string()));
        }
        client.load("ship", &adapters.join("32"));
        let honest = receipt(client, &ask("ship", &json!({ "temperature": 1.0, "ignore_eos": true })));
        let second = client.reload("ship", &adapters.join("4"));
        assert_eq!(verdict(client, &honest)["part"], "adapter");
        let moved = forged(&deployment, &honest, |record| record.adapter = Some(second.parse().unwrap()));
        assert_eq!(verdict(client, &moved)["part"], "token");
        client.load("old", &adapters.join("32"));
        assert_holds(client, &honest);
    });
}

#[test]
fn of_many_answers_no_receipt_fails_and_no_forged_one_holds() {
    let answers = repeats::RECEIPTS.number();
    watched(move || {
        let deployment = drafting();
        let client = &deployment.client;
        let mut random = ChaosRng::new(repeats::SEED.number());
        for number in 0..answers {
            let mut pick = |values: &[f64]| *random.pick(values);
            let more = json!({
                "prompt": fixtures::prompt(u32::try_from(number).unwrap(), 4 + number as usize % 40),
                "temperature": pick(&[0.0, 0.5, 1.0, 1.5]), "top_p": pick(&[0.5, 0.9, 1.0]), "seed": number,
                "repetition_penalty": pick(&[1.0, 1.3]), "presence_penalty": pick(&[0.0, 0.8]),
                "max_tokens": pick(&[1.0, 5.0, 24.0]), "ignore_eos": pick(&[0.0, 1.0]) > 0.5,
            });
            let model: &&str = random.pick(&MODELS);
            let honest = receipt(client, &ask(model, &more));
            assert_holds(client, &honest);
            let length = honest["record"]["answer"].as_array().unwrap().len();
            let position = usize::try_from(number).unwrap() % length;
            let receipt = forged(&deployment, &honest, |record| record.answer[position] ^= 2);
            assert_eq!(verdict(client, &receipt)["valid"], false, "{receipt}");
        }
    });
}

#[test]
fn the_command_verifies_a_file_and_says_which_part_does_not_hold() {
    watched(|| {
        let deployment = drafting();
        let client = &deployment.client;
        let file = deployment.place().home().join("receipt.json");
        let verify = |more: &[&str]| {
            let arguments = [&["verify", "--url", client.url()][..], more].concat();
            fixtures::holobiont(&arguments, &[])
        };
        let path = file.display().to_string();
        let body = json!({ "model": "pirate", "prompt": "Ahoy", "max_tokens": 8, "receipt": true });
        let answer = client.try_post("/v1/completions", &body).unwrap();
        fs::write(&file, answer.to_string()).unwrap();
        let (holds, said) = verify(&[path.as_str()]);
        assert!(holds && said.starts_with("The receipt holds: the base "), "{said}");
        let (shown, key) = verify(&[]);
        assert!(shown && key.trim() == answer["receipt"]["public_key"], "{key}");
        let (holds, said) = verify(&[path.as_str(), "--public-key", key.trim(), "--json"]);
        assert!(holds && said.contains("\"valid\":true"), "{said}");
        let (holds, said) = verify(&[path.as_str(), "--public-key", &"0".repeat(64)]);
        assert!(!holds && said.contains("(signature)"), "{said}");
        let mut changed = answer["receipt"].clone();
        changed["record"]["ended"] = "stop_string".into();
        fs::write(&file, changed.to_string()).unwrap();
        let (holds, said) = verify(&[path.as_str()]);
        assert!(!holds && said.contains("the part 'answer' of the record was changed"), "{said}");
    });
}
