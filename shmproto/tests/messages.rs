//! Messages survive the wire, wrong bytes are rejected, and the document matches the code.

use proptest::prelude::*;
use shmproto::{
    codec::{DecodeError, Wire},
    layer::control::SessionStats,
    message::{
        AdapterStats, AddedBlock, AnswerKind, BlockTier, BlockUpdate, ColdStart, DeviceFacts, DeviceKind,
        DraftKind, ErrorCode, Finish, Generate, Hello, LayerRoute, LayerSession, LayerStats, Output,
        PROTOCOL_VERSION, Pooling, Precision, ProvisionalMode, RemovedBlock, Sampling, SpeculationStats,
        Stats, TenantUse, ToExecutor, ToGateway, TokenOutput, Welcome, WireError, WorkerStats,
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
        base_namespace: [0; 32],
        owner: [0; 32],
        prompt,
        generated: 0,
        max_tokens: 16,
        min_tokens: 0,
        stop_tokens: vec![2],
        sampling: sampling(),
        logprobs: Some(5),
        prompt_logprobs: None,
        deadline_ms: 0,
        provisional: ProvisionalMode::Wanted,
        precision: Precision::Serving,
        grammar: Some("{}".to_owned()),
        pooling: Some(Pooling::TokenLogits(vec![7, 8])),
        expected: vec![4, 5],
    })
}

fn outputs() -> ToGateway {
    let token = TokenOutput { token: 1, logprob: -0.5, top: vec![(1, -0.5), (2, -1.5)] };
    let error = WireError { code: ErrorCode::Internal, message: "außer Betrieb".to_owned() };
    ToGateway::Outputs(vec![Output {
        request: 7,
        tokens: vec![token.clone()],
        provisional: vec![3, 4],
        prompt: vec![token],
        pooled: vec![0.5, -1.0],
        cached_tokens: 32,
        queued_us: 1_000,
        load_wait_us: 400,
        kv_wait_us: 0,
        finish: Some(Finish::Length),
        error: Some(error),
    }])
}

fn welcome(cold_start: ColdStart) -> ToGateway {
    ToGateway::Welcome(Welcome {
        version: PROTOCOL_VERSION,
        instance: 1,
        model_path: "/model.gguf".to_owned(),
        base_hash: [6; 32],
        text_hash: [5; 32],
        device: DeviceFacts {
            kind: DeviceKind::Cuda,
            name: "GPU".to_owned(),
            memory_bytes: 1 << 36,
            group_weight_bytes: vec![5, 7],
        },
        numbers: "activations mixed".to_owned(),
        context_length: 64,
        vocab_size: 32,
        adapter_budget_bytes: 1 << 30,
        device_budget_bytes: 1 << 20,
        cold_start,
        kv_blocks: 8,
        block_tokens: 16,
        max_running: 4,
        max_waiting: 5,
        chunk_tokens: 6,
        adapters: vec![[5; 32], [6; 32]],
    })
}

fn layer_stats() -> LayerStats {
    let session = |route| LayerSession {
        session: 1,
        tenant: "acme".to_owned(),
        name: "trainer".to_owned(),
        masking: "paper".to_owned(),
        route,
        used: SessionStats { calls: 2, rows: [1, 2, 3, 4, 5], ..SessionStats::default() },
        waiting_rows: 6,
        slab_bytes: 7,
    };
    let sessions = [LayerRoute::SharedMemory, LayerRoute::Ipc, LayerRoute::Tls].map(session).to_vec();
    let used = SessionStats { calls: 1, ..SessionStats::default() };
    let tenants = vec![TenantUse { tenant: "acme".to_owned(), used, waiting_rows: 2 }];
    LayerStats { open: 3, sessions, tenants, ..LayerStats::default() }
}

fn stats() -> ToGateway {
    let adapter = AdapterStats {
        adapter: [5; 32],
        rank: 16,
        bytes: 1_000,
        running: 1,
        waiting: 2,
        device_bytes: 500,
        cold_starts: 3,
        load_wait_us: 4,
        rank_rows_device: 5,
        rank_rows_workers: 6,
        rank_rows_executor: 7,
        drafted: 8,
        accepted: 9,
        least_confidence: 0.5,
    };
    let worker = WorkerStats { core: 1, pid: 4_000, slices: 8, rank_rows: 9, taken_back: 10 };
    ToGateway::Stats(Stats {
        adapters: vec![adapter.clone(), adapter],
        device_free_bytes: 1 << 35,
        device_bytes: 1_000,
        link_bytes_per_s: 125_000_000,
        workers_lost: 1,
        speculation: SpeculationStats {
            kind: DraftKind::Model,
            adapter: [4; 32],
            verifications: 1,
            drafted: 2,
            accepted: 3,
            accepted_counts: [1, 2, 3, 4, 5, 6, 7],
            model_drafted: 4,
            model_accepted: 5,
            drafting_us: 6,
            least_confidence: 0.5,
            ahead: 7,
            kept: 8,
            hidden_us: 9,
        },
        workers: vec![worker.clone(), worker],
        layers: layer_stats(),
        ..Stats::default()
    })
}

fn blocks() -> ToGateway {
    let added = AddedBlock {
        chain: [1; 32],
        parent: Some([2; 32]),
        adapter: None,
        tokens: vec![3, 4],
        tier: BlockTier::Host,
    };
    let removed = RemovedBlock { chain: [1; 32], tier: BlockTier::Device };
    ToGateway::Blocks(vec![BlockUpdate::Cleared, BlockUpdate::Added(added), BlockUpdate::Removed(removed)])
}

#[test]
fn a_message_comes_out_as_it_went_in() {
    for message in [
        ToExecutor::Hello(Hello { version: 1, instance: 2 }),
        generate((0..1000).collect()),
        ToExecutor::Cancel(7),
        ToExecutor::GetStats(8),
        ToExecutor::WatchBlocks,
    ] {
        assert_eq!(ToExecutor::from_bytes(&message.to_bytes()), Ok(message));
    }
    let cold_starts = [ColdStart::CpuAssist, ColdStart::OnDemand, ColdStart::Cached];
    let others =
        [outputs(), stats(), blocks(), ToGateway::Stats(Stats::default()), ToGateway::Refused(String::new())];
    for message in others.into_iter().chain(cold_starts.map(welcome)) {
        assert_eq!(ToGateway::from_bytes(&message.to_bytes()), Ok(message));
    }
}

#[test]
fn a_message_that_ends_early_or_late_is_an_error() {
    let bytes = generate(vec![1, 2, 3]).to_bytes();
    assert!((0..bytes.len()).all(|end| ToExecutor::from_bytes(&bytes[..end]).is_err()));
    for message in [outputs(), stats(), blocks(), welcome(ColdStart::Cached)] {
        let bytes = message.to_bytes();
        assert!((0..bytes.len()).all(|end| ToGateway::from_bytes(&bytes[..end]).is_err()));
    }
    let mut bytes = outputs().to_bytes();
    bytes.push(0);
    assert_eq!(ToGateway::from_bytes(&bytes), Err(DecodeError::Trailing(1)));
}

#[test]
fn a_count_larger_than_the_message_takes_no_memory() {
    // Tag, request, no adapter, two namespaces, owner, then a prompt that claims four billion tokens.
    let mut bytes = vec![1];
    bytes.extend(7u64.to_le_bytes());
    bytes.push(0);
    bytes.extend([0; 96]);
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

fn table(heading: &str) -> &'static str {
    let document = include_str!("../../docs/PROTOCOL.md");
    let table = document.split(heading).nth(1).and_then(|rest| rest.split("\n\n").next());
    table.expect("the table")
}

fn variants<'a>(source: &'a str, name: &str) -> Vec<(&'a str, &'a str)> {
    let body = source.split(&format!("pub enum {name} {{")).nth(1);
    let body = body.and_then(|rest| rest.split("\n    }").next()).expect("the enum");
    let lines = body.lines().map(str::trim).filter(|line| !line.starts_with("//") && line.ends_with(','));
    let variant = |line: &'a str| {
        let (variant, tag) = line.trim_end_matches(',').split_once(" = ").expect("a variant and its tag");
        (variant.split('(').next().expect("a name"), tag)
    };
    lines.map(variant).collect()
}

#[test]
fn the_document_lists_every_message_under_its_number() {
    let gateway = include_str!("../src/message.rs");
    let worker = include_str!("../src/fd_passing.rs");
    let mut found = 0;
    for (source, name, heading) in [
        (gateway, "ToExecutor", "| To the executor |"),
        (gateway, "ToGateway", "| To the gateway |"),
        (gateway, "ColdStart", "| `ColdStart` |"),
        (gateway, "DeviceKind", "| `DeviceKind` |"),
        (worker, "ToWorker", "| To a worker |"),
        (worker, "FromWorker", "| From a worker |"),
    ] {
        let table = table(heading);
        let variants = variants(source, name);
        assert_eq!(
            table.lines().count(),
            variants.len() + 2,
            "{name}: a row for each, under the heading's two lines"
        );
        for (variant, tag) in variants {
            assert!(table.contains(&format!("| {tag} | `{variant}` |")), "{name}::{variant} = {tag}");
            found += 1;
        }
    }
    assert_eq!(found, 29);
}

#[test]
fn the_figures_of_the_document_are_those_of_the_messages() {
    let source = include_str!("../src/message/stats.rs");
    let named: Vec<&str> = table("| Figure |").split('`').skip(1).step_by(2).collect();
    assert!(named.len() >= 20, "{named:?}");
    for name in named {
        assert!(source.contains(&format!("pub {name}: ")), "{name} is in the document alone");
    }
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

#[test]
fn undecodable_bytes_name_the_request_of_the_message_that_they_begin() {
    let request = |message: ToExecutor| ToExecutor::request_in(&message.to_bytes()[..9]);
    assert_eq!(request(generate(vec![1])), Some((7, AnswerKind::Outputs)));
    assert_eq!(request(ToExecutor::GetStats(7)), Some((7, AnswerKind::Reply)));
    assert_eq!(request(ToExecutor::Cancel(7)), None, "nothing answers a cancel");
    assert_eq!(ToExecutor::request_in(&[1, 0]), None, "the request is cut off");
}
