//! Messages between the processes: counts and tags of a hostile peer.

use shmproto::{
    codec::Wire,
    message::{
        AdapterLoaded, AdapterPart, AdapterStats, ColdStart, DeviceFacts, ErrorCode, Failed, Finish,
        Generate, Hello, LoadAdapter, Loading, Output, Pooling, Precision, ProvisionalMode, Sampling, Stats,
        ToExecutor, ToGateway, TokenOutput, UnloadAdapter, Welcome, WireError, WorkerStats,
    },
};

use super::{Maker, Seed};

pub(super) const COUNTS: &str = "CVE-2024-42478, -42479 (a peer's numbers)";
pub(super) const FORMAT: &str = "ShadowMQ: CVE-2024-11041, CVE-2025-30165 (self-describing wires)";
const GROWTH: &str = "limits after allocation";

fn generate() -> Generate {
    Generate {
        request: 1,
        adapter: Some([3; 32]),
        namespace: [4; 32],
        base_namespace: [0; 32],
        owner: [0; 32],
        prompt: vec![1, 2, 3],
        generated: 0,
        max_tokens: 16,
        min_tokens: 0,
        stop_tokens: vec![2],
        sampling: Sampling { logit_bias: vec![(1, -100.0)], seed: 7, ..Sampling::default() },
        logprobs: Some(5),
        prompt_logprobs: None,
        deadline_ms: 0,
        provisional: ProvisionalMode::Wanted,
        precision: Precision::Serving,
        grammar: Some("{}".to_owned()),
        pooling: Some(Pooling::TokenLogits(vec![1, 2])),
        expected: vec![4, 5],
    }
}

pub(super) fn to_executor() -> Vec<Seed> {
    let mut make = Maker::new("to_executor");
    make.valid("a hello", ToExecutor::Hello(Hello { version: 3, instance: 1 }).to_bytes());
    make.valid("a request", ToExecutor::Generate(generate()).to_bytes());
    let mut load = LoadAdapter::of_one(1, "/adapters/a", [0; 32]);
    make.valid("a load", ToExecutor::LoadAdapter(load.clone()).to_bytes());
    load.parts.push(AdapterPart { path: "/adapters/b".to_owned(), weight: 0.5 });
    make.valid("a load of a sum", ToExecutor::LoadAdapter(load).to_bytes());
    let unload = UnloadAdapter { request: 1, adapter: [1; 32] };
    make.valid("an unload", ToExecutor::UnloadAdapter(unload).to_bytes());
    // The prompt's length follows tag, request, adapter, namespace and owner.
    let mut bytes = ToExecutor::Generate(generate()).to_bytes();
    let at = 1 + 8 + 33 + 32 + 32 + 32;
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    make.refused("a prompt of 2^32 - 1 tokens", COUNTS, bytes, "ends early");
    make.refused("2^32 - 1 parts", COUNTS, [&[3][..], &[0; 8], &[255; 4]].concat(), "ends early");
    let part = [&[3][..], &[0; 8], &[1, 0, 0, 0], &[255; 4], &[0; 36]].concat();
    make.refused("a path of 2^32 - 1 bytes", COUNTS, part, "ends early");
    make.refused("nothing", COUNTS, Vec::new(), "ends early");
    make.refused("an unknown message", FORMAT, vec![200], "no variant 200");
    make.refused("a pickle", FORMAT, b"\x80\x04\x95cos\nsystem\n".to_vec(), "no variant 128");
    let trailing = [ToExecutor::Cancel(1).to_bytes(), vec![0]].concat();
    make.refused("bytes behind the end", FORMAT, trailing, "follow the end");
    let text = [&[3][..], &[0; 8], &[1, 0, 0, 0], &[2, 0, 0, 0], &[0xff, 0xfe], &[0; 36]].concat();
    make.refused("a path that is not UTF-8", FORMAT, text, "not UTF-8");
    make.seeds
}

fn output() -> Output {
    let token = TokenOutput { token: 1, logprob: -0.5, top: vec![(1, -0.5), (2, -1.0)] };
    Output {
        request: 1,
        tokens: vec![token.clone()],
        provisional: vec![3],
        prompt: vec![token],
        pooled: vec![0.5, -1.0],
        cached_tokens: 16,
        queued_us: 10,
        load_wait_us: 5,
        kv_wait_us: 0,
        finish: Some(Finish::Length),
        error: None,
    }
}

fn welcome() -> Welcome {
    Welcome {
        version: 3,
        instance: 1,
        model_path: "/model.gguf".to_owned(),
        base_hash: [0; 32],
        text_hash: [0; 32],
        device: DeviceFacts::default(),
        numbers: String::new(),
        context_length: 64,
        vocab_size: 32,
        adapter_budget_bytes: 1 << 20,
        device_budget_bytes: 1 << 19,
        cold_start: ColdStart::CpuAssist,
        kv_blocks: 8,
        block_tokens: 16,
        max_running: 4,
        max_waiting: 4,
        chunk_tokens: 9,
        adapters: vec![[5; 32]],
    }
}

fn stats() -> Stats {
    let adapter = AdapterStats {
        adapter: [5; 32],
        rank: 8,
        bytes: 100,
        running: 1,
        waiting: 2,
        device_bytes: 50,
        cold_starts: 3,
        load_wait_us: 4,
        rank_rows_device: 5,
        rank_rows_workers: 6,
        rank_rows_executor: 7,
        drafted: 8,
        accepted: 9,
        least_confidence: 0.5,
    };
    let worker = WorkerStats { core: 1, pid: 2, slices: 3, rank_rows: 4, taken_back: 5 };
    Stats { adapters: vec![adapter], workers: vec![worker], ..Stats::default() }
}

pub(super) fn to_gateway() -> Vec<Seed> {
    let mut make = Maker::new("to_gateway");
    let error = WireError { code: ErrorCode::Internal, message: "why".to_owned() };
    make.valid("outputs", ToGateway::Outputs(vec![output(), output()]).to_bytes());
    make.valid("a failure", ToGateway::Failed(Failed { request: 1, error }).to_bytes());
    make.valid("figures", ToGateway::Stats(Stats::default()).to_bytes());
    make.valid(
        "progress",
        ToGateway::Loading(Loading { stage: "reading".to_owned(), percent: 43 }).to_bytes(),
    );
    let loaded = AdapterLoaded {
        request: 1,
        generation: [1; 32],
        adapter: [2; 32],
        rank: 4,
        bytes: 9,
        modules: 2,
        draft_layers: 1,
        labels: vec!["no".to_owned(), "yes".to_owned()],
        warnings: vec!["a part has no effect".to_owned()],
    };
    make.valid("an adapter", ToGateway::AdapterLoaded(loaded).to_bytes());
    make.valid("a welcome", ToGateway::Welcome(welcome()).to_bytes());
    make.valid("figures of adapters and workers", ToGateway::Stats(stats()).to_bytes());
    let mut bytes = ToGateway::Stats(stats()).to_bytes();
    // The number of workers stands before the one worker; the stats of split clients come last.
    let at = bytes.len() - stats().layers.to_bytes().len() - WorkerStats::MIN_BYTES - 4;
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    make.refused("figures of 2^32 - 1 workers", COUNTS, bytes, "ends early");
    let mut bytes = ToGateway::Stats(stats()).to_bytes();
    // The number of their sessions, 0, is the last field.
    let at = bytes.len() - 4;
    bytes[at..].copy_from_slice(&u32::MAX.to_le_bytes());
    make.refused("figures of 2^32 - 1 split clients", COUNTS, bytes, "ends early");
    let mut bytes = ToGateway::Welcome(welcome()).to_bytes();
    // The mode follows both budgets; 20 bytes of limits and the adapters come after it.
    let at = bytes.len() - (4 + 32) - 20 - 1;
    bytes[at] = 3;
    make.refused("a mode of cold starts that there is not", FORMAT, bytes, "ColdStart");
    make.refused("2^32 - 1 outputs", COUNTS, [&[2][..], &[255; 4]].concat(), "ends early");
    make.refused(
        "a tag of 2 for an option",
        FORMAT,
        [&[2][..], &[1, 0, 0, 0], &[0; 52], &[2, 0]].concat(),
        "Option",
    );
    let empty = Output { tokens: vec![], prompt: vec![], pooled: vec![], finish: None, ..output() };
    let many = ToGateway::Outputs(vec![empty; 200_000]).to_bytes();
    make.valid("200,000 empty outputs", many);
    make.refused(
        "the same, cut",
        GROWTH,
        [&[2][..], &200_000u32.to_le_bytes(), &vec![0; 7_599_999]].concat(),
        "",
    );
    make.seeds
}
