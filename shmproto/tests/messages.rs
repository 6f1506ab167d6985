//! Messages survive the wire, wrong bytes do not, and the document says what the code does.

use proptest::prelude::*;
use shmproto::{
    codec::{DecodeError, Wire},
    message::{
        ErrorCode, Finish, Generate, Hello, Output, Sampling, Stats, ToExecutor, ToGateway, TokenOutput,
        WireError,
    },
};

fn sampling() -> Sampling {
    Sampling {
        temperature: 0.7,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.05,
        presence_penalty: 0.1,
        frequency_penalty: -0.2,
        repetition_penalty: 1.1,
        logit_bias: vec![(5, -100.0)],
        seed: u64::MAX,
    }
}

fn generate(prompt: Vec<u32>) -> ToExecutor {
    ToExecutor::Generate(Generate {
        request: 7,
        adapter: Some([3; 32]),
        namespace: [9; 32],
        prompt,
        generated: 0,
        max_tokens: 16,
        min_tokens: 0,
        stop_tokens: vec![2],
        sampling: sampling(),
        logprobs: Some(5),
        prompt_logprobs: None,
        deadline_ms: 0,
    })
}

fn outputs() -> ToGateway {
    let token = TokenOutput { token: 1, logprob: -0.5, top: vec![(1, -0.5), (2, -1.5)] };
    let error = WireError { code: ErrorCode::Internal, message: "außer Betrieb".to_owned() };
    ToGateway::Outputs(vec![Output {
        request: 7,
        tokens: vec![token.clone()],
        prompt: vec![token],
        cached_tokens: 32,
        queued_us: 1_000,
        finish: Some(Finish::Length),
        error: Some(error),
    }])
}

#[test]
fn a_message_comes_out_as_it_went_in() {
    for message in [
        ToExecutor::Hello(Hello { version: 1, instance: 2 }),
        generate((0..1000).collect()),
        ToExecutor::Cancel(7),
        ToExecutor::GetStats(8),
    ] {
        assert_eq!(ToExecutor::from_bytes(&message.to_bytes()), Ok(message));
    }
    for message in [outputs(), ToGateway::Stats(Stats::default()), ToGateway::Refused(String::new())] {
        assert_eq!(ToGateway::from_bytes(&message.to_bytes()), Ok(message));
    }
}

#[test]
fn a_message_that_ends_early_or_late_is_an_error() {
    let bytes = generate(vec![1, 2, 3]).to_bytes();
    assert!((0..bytes.len()).all(|end| ToExecutor::from_bytes(&bytes[..end]).is_err()));
    let bytes = outputs().to_bytes();
    assert!((0..bytes.len()).all(|end| ToGateway::from_bytes(&bytes[..end]).is_err()));
    let mut bytes = outputs().to_bytes();
    bytes.push(0);
    assert_eq!(ToGateway::from_bytes(&bytes), Err(DecodeError::Trailing(1)));
}

#[test]
fn a_count_larger_than_the_message_takes_no_memory() {
    // Tag, request, no adapter, namespace, then a prompt that claims four billion tokens.
    let mut bytes = vec![1];
    bytes.extend(7u64.to_le_bytes());
    bytes.push(0);
    bytes.extend([0; 32]);
    bytes.extend(u32::MAX.to_le_bytes());
    assert_eq!(
        ToExecutor::from_bytes(&bytes),
        Err(DecodeError::Truncated { wanted: u32::MAX as usize * 4, left: 0 })
    );
}

#[test]
fn the_bytes_of_a_hello_are_those_of_the_document() {
    let bytes = ToExecutor::Hello(Hello { version: 1, instance: 0x0102 }).to_bytes();
    assert_eq!(bytes, [0, 1, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn the_document_lists_every_message_under_its_number() {
    let source = include_str!("../src/message.rs");
    let document = include_str!("../../docs/PROTOCOL.md");
    let mut found = 0;
    for (name, heading) in [("ToExecutor", "To the executor"), ("ToGateway", "To the gateway")] {
        let body =
            source.split(&format!("pub enum {name} {{")).nth(1).and_then(|rest| rest.split("\n    }").next());
        let table = document.split(heading).nth(1).and_then(|rest| rest.split("\n\n").next());
        let (body, table) = (body.expect("the enum"), table.expect("the table"));
        for line in body.lines().map(str::trim).filter(|line| !line.starts_with("//") && line.ends_with(','))
        {
            let (variant, tag) = line.trim_end_matches(',').split_once(" = ").expect("a variant and its tag");
            let variant = variant.split('(').next().expect("a name");
            assert!(table.contains(&format!("| {tag} | `{variant}` |")), "{name}::{variant} = {tag}");
            found += 1;
        }
    }
    assert_eq!(found, 14);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = ToExecutor::from_bytes(&bytes);
        let _ = ToGateway::from_bytes(&bytes);
    }

    #[test]
    fn whatever_decodes_encodes_to_the_same_bytes(at in 0usize..200, value in any::<u8>()) {
        let mut bytes = generate(vec![1, 2, 3]).to_bytes();
        let at = at % bytes.len();
        bytes[at] = value;
        if let Ok(message) = ToExecutor::from_bytes(&bytes) {
            prop_assert_eq!(message.to_bytes(), bytes);
        }
    }
}
