//! Any change of a receipt is found, and by its name.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::record::{AnswerEnd, AnswerLimits, DecodingStart, NumericSettings, Sampler, TextDecoding};

static KEY: LazyLock<SigningKey> = LazyLock::new(|| {
    let state = tempfile::tempdir().unwrap();
    SigningKey::open(state.path()).unwrap()
});

fn record() -> AnswerRecord {
    AnswerRecord {
        format: RECEIPT_FORMAT,
        program: "0.1.0".to_owned(),
        model: "pirate".to_owned(),
        base: Hash([1; 32]),
        settings: NumericSettings {
            device: "cpu".to_owned(),
            numbers: "activations mixed".to_owned(),
            precision: "serving".to_owned(),
        },
        adapter: Some(Hash([2; 32])),
        sampler: Sampler {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.01,
            presence_penalty: 0.5,
            frequency_penalty: -0.25,
            repetition_penalty: 1.1,
            logit_bias: vec![(7, -1.5), (9, 0.1)],
            seed: u64::MAX,
        },
        limits: AnswerLimits {
            max_tokens: 4,
            min_tokens: 1,
            stop_tokens: vec![0, 2],
            stop: vec!["\n\n".to_owned()],
            text: TextDecoding { start: DecodingStart::Continuation, shown: vec!["<think>".to_owned()] },
        },
        constraint: Some(Constraint::of("start: /a+/")),
        prompt: vec![1, 2, 3],
        answer: vec![4, 5, 6, 7],
        ended: AnswerEnd::Length,
    }
}

/// Returns the paths of all numbers, texts and nulls in a document.
fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(name, value)| leaves(value, &format!("{path}/{name}"), found));
        }
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, value)| leaves(value, &format!("{path}/{index}"), found));
        }
        _ => found.push(path.to_owned()),
    }
}

/// Changes a leaf to another value of its type; `salt` selects the value.
fn change(leaf: &mut Value, salt: u64) {
    let changed = match &*leaf {
        Value::Number(number) if number.is_u64() => {
            Value::from((number.as_u64().unwrap() ^ (1 + salt % 1000)) & 0xffff_ffff)
        }
        Value::Number(number) => Value::from(number.as_f64().unwrap() + 0.5 + (salt % 4) as f64),
        Value::String(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            let mut digits: Vec<u8> = text.bytes().collect();
            let index = salt as usize % digits.len();
            digits[index] = if digits[index] == b'1' { b'2' } else { b'1' };
            Value::from(String::from_utf8(digits).unwrap())
        }
        Value::String(text) => Value::from(format!("{text} ")),
        other => other.clone(),
    };
    *leaf = changed;
}

#[test]
fn a_receipt_comes_back_from_json_as_it_was_and_holds() {
    let receipt = Receipt::sign(record(), &KEY);
    let text = serde_json::to_string(&receipt).unwrap();
    let read: Receipt = serde_json::from_str(&text).unwrap();
    assert_eq!(read, receipt);
    assert_eq!(read.check(Some(KEY.public_key())), Ok(()));
    assert_eq!(read.chain.len(), RecordPart::ALL.len());
    serde_json::from_str::<Receipt>(&text.replacen("\"chain\"", "\"other\":1,\"chain\"", 1)).unwrap_err();
}

proptest! {
    #[test]
    fn any_single_changed_value_is_found(which in any::<prop::sample::Index>(), salt in any::<u64>()) {
        let mut document = serde_json::to_value(Receipt::sign(record(), &KEY)).unwrap();
        let mut found = Vec::new();
        leaves(&document, "", &mut found);
        prop_assert!(found.len() > 40, "{found:?}");
        let path = which.get(&found);
        let leaf = document.pointer_mut(path).unwrap();
        let before = leaf.clone();
        change(leaf, salt);
        prop_assume!(*leaf != before);
        // A value that no receipt can have is refused by the parser.
        if let Ok(changed) = serde_json::from_value::<Receipt>(document) {
            prop_assert!(changed.check(None).is_err(), "{path} may be changed");
        }
    }

    #[test]
    fn an_answer_with_any_other_tokens_is_found(
        answer in prop::collection::vec(0_u32..50_000, 0..40),
        prompt in prop::collection::vec(0_u32..50_000, 1..40),
    ) {
        let mut receipt = Receipt::sign(record(), &KEY);
        receipt.record.answer = answer.clone();
        if answer != record().answer {
            prop_assert_eq!(receipt.check(None), Err(ReceiptFault::Part(RecordPart::Answer)));
        }
        receipt.record.answer = record().answer;
        receipt.record.prompt = prompt.clone();
        if prompt != record().prompt {
            prop_assert_eq!(receipt.check(None), Err(ReceiptFault::Part(RecordPart::Prompt)));
        }
    }
}

#[test]
fn a_change_is_named_even_if_the_chain_is_computed_again() {
    let mut forged = Receipt::sign(record(), &KEY);
    forged.record.sampler.seed = 7;
    assert_eq!(forged.check(None), Err(ReceiptFault::Part(RecordPart::Sampler)));
    forged.chain = links(&forged.record);
    assert_eq!(forged.check(None), Err(ReceiptFault::Signature));
    let state = tempfile::tempdir().unwrap();
    let stranger = SigningKey::open(state.path()).unwrap();
    let signed = Receipt::sign(forged.record, &stranger);
    assert_eq!(signed.check(None), Ok(()));
    let fault = signed.check(Some(KEY.public_key())).unwrap_err();
    assert_eq!(fault, ReceiptFault::Key { found: stranger.public_key(), expected: KEY.public_key() });
    assert_eq!(fault.part(), "signature");
}

#[test]
fn tokens_cannot_move_between_prompt_and_answer() {
    let mut moved = record();
    moved.prompt.push(moved.answer.remove(0));
    assert_ne!(links(&moved).last(), links(&record()).last());
}

#[test]
fn a_record_of_another_format_and_a_short_chain_are_refused() {
    let mut receipt = Receipt::sign(record(), &KEY);
    receipt.chain.truncate(8);
    assert_eq!(receipt.check(None), Err(ReceiptFault::Signature));
    let other = AnswerRecord { format: 2, ..record() };
    assert_eq!(Receipt::sign(other, &KEY).check(None), Err(ReceiptFault::Format(2)));
    let mut wrong = record();
    wrong.constraint = Some(Constraint { source: "start: /b/".to_owned(), ..Constraint::of("start: /a/") });
    assert_eq!(Receipt::sign(wrong, &KEY).check(None), Err(ReceiptFault::Constraint));
}
