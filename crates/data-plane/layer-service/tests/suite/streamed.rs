//! Split clients of a base streamed from disk: they share its weight reads, and get the bits of a resident
//! base.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use layer_service::settings::{BatchingPolicy, LayerSettings};
use model::{
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass as _, LogitRows, SequenceSlice},
    linear_sites::{EvaluateSites as _, SiteCall, SiteId},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    sources::random::RandomSource,
    weights::{
        served::ServedLayers,
        streamed::{Readahead, StreamError, StreamOptions},
    },
};
use shmproto::layer::{CallClass, CallHeader, CallStatus, Dtype, SiteOp, SitePath};
use types::BlockId;

use crate::calls::{DispatcherFixture, LocalClient, bits, evaluate, rows};

const LAYERS: u32 = 8;
/// Four of each block, and the head.
const SITES: u32 = 4 * LAYERS + 1;

fn options() -> ResidentOptions {
    ResidentOptions { cores: Vec::new(), kv_bytes: 1 << 20, kv_dtype: None }
}

/// A deep and narrow model with an untied head.
fn source(directory: &Path) -> RandomSource {
    let config = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 900, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false}"#;
    fs::write(directory.join("config.json"), config).unwrap();
    RandomSource::open(directory, 3).unwrap()
}

fn resident(directory: &Path) -> ResidentModel {
    let weights = LoadedWeights::load(&source(directory), 1).unwrap();
    ResidentModel::new(weights, &options()).unwrap()
}

/// The model through a double buffer of two blocks, and the bytes of one read of all weights.
fn streamed(directory: &Path) -> (ResidentModel<ServedLayers>, u64) {
    let source = source(directory);
    let path = directory.join("weights.packed");
    let mut stream = StreamOptions {
        path,
        program: [7; 32],
        bound_bytes: 1,
        readahead: Readahead::Next,
        bytes_per_s: None,
    };
    let open = |stream: &StreamOptions| LoadedWeights::open(&source, Some((&[1; 32], stream)), 1, &|_| {});
    let Err(StreamError::Bound { least_bytes, .. }) = open(&stream) else { panic!("a byte is enough") };
    stream.bound_bytes = least_bytes;
    let weights = open(&stream).unwrap();
    let sweep = weights.sweep_bytes();
    (ResidentModel::new(weights, &options()).unwrap(), sweep)
}

/// Position of a client, which repeatedly goes up through all sites; a trainer also comes down again.
struct SweepClient {
    local: LocalClient,
    trains: bool,
    step: u32,
    rounds: u32,
    waits: bool,
}

impl SweepClient {
    fn new(local: LocalClient, trains: bool, rounds: u32) -> Self {
        Self { local, trains, step: 0, rounds, waits: false }
    }

    fn length(&self) -> u32 {
        if self.trains { 2 * SITES } else { SITES }
    }

    fn is_done(&self) -> bool {
        self.step == self.length() * self.rounds
    }

    fn call(&self) -> SiteCall {
        let at = self.step % self.length();
        let (site, op) =
            if at < SITES { (at, SiteOp::Forward) } else { (2 * SITES - 1 - at, SiteOp::Backward) };
        SiteCall { site: SiteId(site), part: None, op, path: SitePath::Fast }
    }

    /// Reads and compares an available answer, and calls again; returns whether it made progress.
    fn advance(&mut self, judge: &mut ResidentModel) -> bool {
        if self.is_done() {
            return false;
        }
        let call = self.call();
        let (input, output) = judge.sites()[call.site.0 as usize].widths(None, call.op).unwrap();
        let x = rows(self.step, 2 * input);
        if self.waits {
            let Some(reply) = self.local.client.try_take().unwrap() else { return false };
            assert_eq!(reply.status, CallStatus::Done);
            let mut out = vec![0.0; 2 * output];
            self.local.client.read_rows(crate::calls::OUT, Dtype::F32, &mut out).unwrap();
            assert_eq!(bits(&out), bits(&evaluate(judge, call, &x)), "{call:?}");
            (self.step, self.waits) = (self.step + 1, false);
            return true;
        }
        let class = if self.trains { CallClass::Training } else { CallClass::Decode };
        let header = CallHeader { op: call.op, ..self.local.header(call.site.0, class, 2) };
        self.local.client.write_rows(0, Dtype::F32, &x).unwrap();
        self.local.client.submit(&header).unwrap();
        self.waits = true;
        true
    }
}

/// Runs all clients to their ends, each started after the one before; returns the read bytes over those of
/// one full read.
fn walk(policy: BatchingPolicy, trainers: usize, clients: usize, rounds: u32) -> f64 {
    let directory = tempfile::tempdir().unwrap();
    let mut judge = resident(directory.path());
    let (base, sweep) = streamed(directory.path());
    let stats = base.sweep_figures().unwrap();
    let mut settings = LayerSettings::default();
    settings.batching.policy = policy;
    let mut rig = DispatcherFixture::over(Box::new(base), settings);
    let walker = |index: usize, rig: &mut DispatcherFixture| {
        SweepClient::new(rig.local(&format!("tenant {index}")), index < trainers, rounds)
    };
    let mut walkers: Vec<_> = (0..clients).map(|index| walker(index, &mut rig)).collect();
    let begun = Instant::now();
    let mut turn = 0;
    while !walkers.iter().all(SweepClient::is_done) {
        turn += 1;
        let mut moved = false;
        for (index, walker) in walkers.iter_mut().enumerate() {
            moved |= turn > 7 * index && walker.advance(&mut judge);
        }
        rig.dispatcher.poll();
        if rig.dispatcher.run_due(&mut *rig.base).rows == 0 && !moved {
            rig.dispatcher.wait(Some(Instant::now() + Duration::from_millis(20)));
        }
        assert!(begun.elapsed() < Duration::from_secs(100), "a call is never computed");
    }
    stats.read_bytes() as f64 / sweep as f64
}

#[test]
fn clients_of_a_streamed_base_share_its_sweeps() {
    let rounds = 16;
    let alone = walk(BatchingPolicy::Opportunistic, 0, 1, rounds) / f64::from(rounds);
    assert!(alone <= 1.1, "{alone} sweeps for a token of one client");
    let together = walk(BatchingPolicy::Opportunistic, 0, 4, rounds) / f64::from(4 * rounds);
    assert!(4.0 * together <= 1.1, "{together} sweeps for a token of one of four clients");
    let apart = walk(BatchingPolicy::Alone, 0, 4, rounds) / f64::from(4 * rounds);
    assert!(apart > 2.0 * together, "{apart} sweeps for a token without the elevator");
}

#[test]
fn trainers_ride_up_with_the_others_and_down_together() {
    let rounds = 8;
    let sweeps = walk(BatchingPolicy::Opportunistic, 2, 4, rounds) / f64::from(rounds);
    // Four clients go up and down: two full reads are ideal.
    assert!(sweeps <= 2.0 / 0.7, "{sweeps} sweeps a round");
}

#[test]
fn clients_keep_step_with_a_resident_pass_or_fall_behind_and_all_get_their_bits() {
    let directory = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..24).map(|token| token * 31 % 900).collect();
    let passes = |model: &mut ResidentModel<ServedLayers>, rig: Option<&mut DispatcherFixture>| {
        let blocks = [BlockId(0), BlockId(1)];
        let (mut given, mut logits) = (Vec::new(), Vec::new());
        let mut rig = rig;
        for (start, token) in tokens.iter().enumerate() {
            let slice: SequenceSlice<'_, PreparedAdapter> = SequenceSlice {
                tokens: std::slice::from_ref(token),
                start,
                blocks: &blocks,
                trunk: &[],
                adapter: None,
                logits: LogitRows::Last,
            };
            match &mut rig {
                Some(rig) => model.forward_with_hooks(&[slice], &mut logits, &mut rig.dispatcher).unwrap(),
                None => model.forward(&[slice], &mut logits).unwrap(),
            }
            given.extend(bits(&logits));
        }
        given
    };
    let (mut base, _) = streamed(directory.path());
    let wanted = passes(&mut base, None);
    let (lent, _) = streamed(directory.path());
    let mut rig = DispatcherFixture::over(Box::new(lent), LayerSettings::default());
    let walkers: Vec<_> = (0..2)
        .map(|index| {
            let mut walker = SweepClient::new(rig.local(&format!("tenant {index}")), index == 1, 2);
            let mut judge = resident(directory.path());
            thread::spawn(move || {
                while !walker.is_done() {
                    if !walker.advance(&mut judge) {
                        thread::sleep(Duration::from_micros(200));
                    }
                }
            })
        })
        .collect();
    let begun = Instant::now();
    while !walkers.iter().all(thread::JoinHandle::is_finished) {
        assert!(passes(&mut base, Some(&mut rig)) == wanted);
        rig.dispatcher.poll();
        rig.dispatcher.run_beside(Duration::from_millis(50), &mut base);
        assert!(begun.elapsed() < Duration::from_secs(100), "a call is never computed");
    }
    walkers.into_iter().for_each(|walker| walker.join().unwrap());
}
