//! A real base streamed from a slow disk, with drafting during the reads: no answer changes, and drafter and
//! target never compute at once.

use std::{
    collections::HashMap,
    num::NonZeroU64,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use testkit::paths::golden;

use base_executor::{
    adapters::{AdapterLoadOutcome, Budget},
    engine::{
        Engine, EngineLimits,
        drafts::Drafts,
        event::{ConnectionId, EngineEvent, RequestKey},
    },
};
use kv_cache::ledger::MemoryAccount;
use model::{
    adapter::Adapter,
    deltas::prepared::PreparedAdapter,
    forward::ForwardPass as _,
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::source::WeightSource,
    sources::open::open,
    weights::{
        served::ServedLayers,
        streamed::{Readahead, StreamError, StreamOptions},
    },
};
use scheduling::clock::SystemClock;
use shmproto::message::{Generate, Stats, ToGateway};
use tokio::sync::mpsc;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use types::AdapterId;

use crate::{
    common::{prompt, request, resident},
    engine::welcome,
    oracle_drafter::OracleDrafter,
};

const GATEWAY: ConnectionId = ConnectionId(1);
/// Time of a draft token; reading a layer chunk takes several times as long.
const GUESS: Duration = Duration::from_millis(1);
const DISK_BYTES_PER_S: u64 = 12 << 20;
const ADAPTERS: [&str; 3] = ["rank4-attention", "rank64-all-linear", "ia3"];

type StreamedModel = ResidentModel<ServedLayers>;

/// The model in memory, or streamed from a slow disk through the smallest double buffer.
fn model(directory: Option<&Path>) -> StreamedModel {
    let source = open(&golden("models/llama-tied")).unwrap();
    let options = ResidentOptions { cores: Vec::new(), kv_bytes: 1 << 20, kv_dtype: None };
    let weights = match directory {
        None => LoadedWeights::open(&*source, None, 1, &|_| {}).unwrap(),
        Some(directory) => from_disk(&*source, directory),
    };
    ResidentModel::new(weights, &options).unwrap()
}

fn from_disk(source: &(dyn WeightSource + Sync), directory: &Path) -> LoadedWeights<ServedLayers> {
    let mut stream = StreamOptions {
        path: directory.join("packed.weights"),
        program: [7; 32],
        bound_bytes: 1,
        readahead: Readahead::Next,
        bytes_per_s: NonZeroU64::new(DISK_BYTES_PER_S),
    };
    let open = |stream: &StreamOptions| LoadedWeights::open(source, Some((&[1; 32], stream)), 1, &|_| {});
    let Err(StreamError::Bound { least_bytes, .. }) = open(&stream) else { panic!("a byte is enough") };
    stream.bound_bytes = least_bytes;
    open(&stream).unwrap()
}

struct StreamedEngineFixture {
    engine: Engine<StreamedModel>,
    queue: mpsc::Receiver<ToGateway>,
    said: HashMap<u64, Vec<u32>>,
}

impl StreamedEngineFixture {
    fn new(model: StreamedModel, kv_blocks: u32, drafts: Drafts) -> Self {
        let limits = EngineLimits {
            max_running: 4,
            max_waiting: 64,
            max_waiting_tokens: 1 << 16,
            chunk_tokens: 64,
            kv_blocks,
            context_length: 256,
        };
        let adapters: Vec<_> = ADAPTERS.iter().map(|name| adapter(&model, name)).collect();
        let mut engine = Engine::new(model, limits, welcome(), Box::new(SystemClock)).with_drafts(drafts);
        let (outbox, queue) = mpsc::channel(1024);
        engine.handle(EngineEvent::Connected { connection: GATEWAY, outbox });
        let budget = Budget::new(MemoryAccount::new("adapters", 1000));
        for (tag, adapter) in (1..).zip(adapters) {
            let id = AdapterId([tag; 32]);
            let claim = budget.claim(id, 10).unwrap();
            let loaded = AdapterLoadOutcome::New(resident(adapter, claim));
            let caller = RequestKey { connection: GATEWAY, request: u64::from(tag) };
            engine.handle(EngineEvent::AdapterLoaded { caller: Some(caller), loaded });
        }
        Self { engine, queue, said: HashMap::new() }
    }

    /// Sends all requests, one per `apart` steps, and steps until all are answered.
    fn answer(mut self, requests: &[Generate], apart: usize) -> (HashMap<u64, Vec<u32>>, Stats) {
        for request in requests {
            let (connection, request, received_at) = (GATEWAY, request.clone(), Instant::now());
            self.engine.handle(EngineEvent::Generate { connection, request, received_at });
            (0..apart).for_each(|_| self.step());
        }
        while !self.engine.is_idle() {
            self.step();
        }
        (self.said, self.engine.stats(0))
    }

    fn step(&mut self) {
        self.engine.step();
        while let Ok(message) = self.queue.try_recv() {
            let ToGateway::Outputs(outputs) = message else { continue };
            for output in outputs {
                assert_eq!(output.error, None);
                let tokens = output.tokens.iter().map(|token| token.token);
                self.said.entry(output.request).or_default().extend(tokens);
            }
        }
    }
}

fn adapter(model: &StreamedModel, name: &str) -> Arc<PreparedAdapter> {
    let adapter = Adapter::read(&golden("adapters/llama-tied").join(name), model.config()).unwrap();
    let precision = kernels::lora::LoraPrecision::Exact;
    Arc::new(PreparedAdapter::new(&adapter, model.config(), precision).unwrap())
}

/// Greedy and seeded requests of the base and of each adapter.
fn requests(seeds: u64, tokens: u32) -> Vec<Generate> {
    let with = |(id, (tag, seed)): (u64, (u8, u64))| {
        let mut asked = request(id, prompt(id, 20), tokens);
        asked.adapter = (tag > 0).then_some([tag; 32]);
        asked.sampling.temperature = if seed > 0 { 1.0 } else { 0.0 };
        asked.sampling.seed = seed;
        asked
    };
    let kinds = (0..=3).flat_map(|tag| (0..seeds).map(move |seed| (tag, seed)));
    (1..).zip(kinds).map(with).collect()
}

/// Answers without drafts, and oracle drafters with accuracy `right`.
fn plainly(requests: &[Generate], right: f64) -> (HashMap<u64, Vec<u32>>, Drafts) {
    let (said, _) = StreamedEngineFixture::new(model(None), 64, Drafts::default()).answer(requests, 0);
    let answers = requests.iter().map(|asked| (asked.prompt.clone(), said[&asked.request].clone()));
    let answers = Arc::new(Mutex::new(answers.collect()));
    (said, OracleDrafter::drafts(&answers, right, GUESS))
}

#[test]
fn what_is_drafted_while_weights_are_read_changes_no_answer() {
    let directory = tempfile::tempdir().unwrap();
    let requests = requests(4, 24);
    for (right, kv_blocks, apart) in [(0.9, 64, 2), (0.6, 64, 0), (0.8, 5, 0)] {
        let (wanted, drafts) = plainly(&requests, right);
        let rig = StreamedEngineFixture::new(model(Some(directory.path())), kv_blocks, drafts);
        let (said, stats) = rig.answer(&requests, apart);
        assert_eq!(said, wanted);
        let drafted = stats.speculation;
        assert!(drafted.accepted > 0 && drafted.ahead > 0 && drafted.kept > 0, "{drafted:?}");
        assert!(drafted.kept <= drafted.ahead && drafted.hidden_us > 0, "{drafted:?}");
        assert!(stats.preemptions > 0 || kv_blocks > 5, "{stats:?}");
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct PipelineEntry {
    what: PipelineAction,
    began: Instant,
    ended: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PipelineAction {
    Load,
    Compute,
    Draft { ahead: bool },
    Fallback,
    Verdict,
    Keep { kept: u64, discarded: u64 },
}

#[derive(Debug, Clone, Default)]
struct PipelineLog(Arc<Mutex<Vec<PipelineEntry>>>);

#[derive(Debug, Default)]
struct PipelineFields {
    message: String,
    numbers: HashMap<&'static str, u64>,
}

impl Visit for PipelineFields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.numbers.insert(field.name(), value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.numbers.insert(field.name(), value.into());
    }
}

impl<S: tracing::Subscriber> Layer<S> for PipelineLog {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() != model::weight_stream_stats::PIPELINE {
            return;
        }
        let ended = Instant::now();
        let mut fields = PipelineFields::default();
        event.record(&mut fields);
        let number = |name| fields.numbers.get(name).copied().unwrap_or(0);
        let what = match fields.message.as_str() {
            "load" => PipelineAction::Load,
            "compute" => PipelineAction::Compute,
            "draft" => PipelineAction::Draft { ahead: number("ahead") == 1 },
            "fallback" => PipelineAction::Fallback,
            "verdict" => PipelineAction::Verdict,
            "keep" => PipelineAction::Keep { kept: number("kept"), discarded: number("discarded") },
            other => panic!("nobody knows {other}"),
        };
        let began = ended - Duration::from_nanos(number("took_ns"));
        self.0.lock().unwrap().push(PipelineEntry { what, began, ended });
    }
}

#[test]
fn draft_and_target_never_compute_at_once_and_drafting_ahead_waits_for_weights() {
    let reader = PipelineLog::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(reader.clone())).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let requests = requests(1, 40);
    let (wanted, drafts) = plainly(&requests, 0.85);
    let model = model(Some(directory.path()));
    reader.0.lock().unwrap().clear();
    let sweep = model.sweep_figures().unwrap();
    let (said, stats) = StreamedEngineFixture::new(model, 64, drafts).answer(&requests, 2);
    assert_eq!(said, wanted);
    let log = reader.0.lock().unwrap().clone();

    let computes =
        |done: &&PipelineEntry| matches!(done.what, PipelineAction::Compute | PipelineAction::Draft { .. });
    let mut busy: Vec<PipelineEntry> = log.iter().filter(computes).copied().collect();
    busy.sort_by_key(|done| done.began);
    for pair in busy.windows(2) {
        assert!(pair[0].ended <= pair[1].began, "{pair:?}");
    }
    // After drafting ahead, the target continues only with a load that ends during or after the decision.
    let ahead = |done: &PipelineEntry| done.what == PipelineAction::Draft { ahead: true };
    for (at, step) in busy.iter().enumerate().filter(|(_, done)| ahead(done)) {
        let (before, after) =
            (busy[at - 1], busy[at..].iter().find(|done| done.what == PipelineAction::Compute));
        let waited_for = |done: &&PipelineEntry| {
            done.what == PipelineAction::Load
                && done.ended >= before.ended
                && after.is_none_or(|after| done.ended <= after.began)
        };
        assert!(log.iter().any(|done| waited_for(&done)), "nothing was loaded for {step:?}");
    }
    let count =
        |what: &dyn Fn(PipelineAction) -> bool| log.iter().filter(|done| what(done.what)).count() as u64;
    assert_eq!(count(&|what| what == PipelineAction::Verdict), stats.speculation.verifications);
    assert!(count(&|what| what == PipelineAction::Fallback) >= stats.speculation.verifications);
    let (mut kept, mut discarded) = (0, 0);
    for done in &log {
        if let PipelineAction::Keep { kept: more, discarded: others } = done.what {
            (kept, discarded) = (kept + more, discarded + others);
        }
    }
    assert_eq!(kept, stats.speculation.kept);
    assert!(discarded > 0 && kept + discarded <= stats.speculation.ahead);
    assert!(sweep.computed() > Duration::ZERO);
}
