//! A base streamed from disk: the bits of a resident one, the expected reads, and never a wrong token.

use std::{
    borrow::Cow,
    fs::{self, OpenOptions},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};
use testkit::paths::{golden, real_model as smollm2};

use kernels::{Activations, TensorType};
use model::{
    adapter::Adapter,
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass, LogitRows, SequenceSlice},
    linear_sites::{EvaluateSites, SiteCall, SiteId, SiteOp, SitePath},
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::ModelConfig,
        source::{Tensor, TensorId, WeightSource},
    },
    sources::{open::open, random::RandomSource},
    weights::{
        served::ServedLayers,
        streamed::{Readahead, StreamError, StreamOptions, WeightReadError},
    },
};
use types::BlockId;

type StreamedSource = dyn WeightSource + Sync;
type StreamedResident = ResidentModel<ServedLayers>;

fn options() -> ResidentOptions {
    ResidentOptions { cores: vec![0; 2], kv_bytes: 16 << 20, kv_dtype: Some(KvPrecision::F16) }
}

fn resident(source: &StreamedSource) -> ResidentModel {
    ResidentModel::new(LoadedWeights::load(source, 2).unwrap(), &options()).unwrap()
}

fn stream(directory: &Path, bound_bytes: u64) -> StreamOptions {
    let path = directory.join("weights.packed");
    StreamOptions { path, program: [7; 32], bound_bytes, readahead: Readahead::Next, bytes_per_s: None }
}

fn open_streamed(
    source: &StreamedSource,
    options: &StreamOptions,
) -> Result<LoadedWeights<ServedLayers>, StreamError> {
    LoadedWeights::open(source, Some((&[1; 32], options)), 2, &|_| {})
}

fn streamed(source: &StreamedSource, stream: &StreamOptions) -> StreamedResident {
    ResidentModel::new(open_streamed(source, stream).unwrap(), &options()).unwrap()
}

/// Minimum bound with which the model can be streamed.
fn least(source: &StreamedSource, directory: &Path) -> u64 {
    match open_streamed(source, &stream(directory, 1)) {
        Err(StreamError::Bound { least_bytes, .. }) => least_bytes,
        other => panic!("a byte is enough: {other:?}"),
    }
}

pub(crate) fn adapters(name: &str, source: &StreamedSource) -> Vec<Option<Arc<PreparedAdapter>>> {
    let precision = LoadedWeights::load(source, 1).unwrap().adapter_precision();
    let entries = fs::read_dir(golden("adapters").join(name)).into_iter().flatten();
    let of_experts = fs::read_dir(golden("adapters/experts").join(name)).into_iter().flatten();
    let entries = entries.chain(of_experts);
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let prepared = paths.iter().map(|path| {
        let adapter = Adapter::read(path, source.config()).unwrap();
        Some(Arc::new(PreparedAdapter::new(&adapter, source.config(), precision).unwrap()))
    });
    [None].into_iter().chain(prepared).collect()
}

/// Bits of the logits of simultaneous prompts, one of them in chunks, and of some steps after them.
pub(crate) fn talk<P: ForwardPass<Adapter = PreparedAdapter>>(
    model: &mut P,
    adapters: &[Option<Arc<PreparedAdapter>>],
) -> Result<Vec<u32>, P::Error> {
    let tokens = |index: u32| (0..40).map(|at| (at * 37 + index * 101 + at * at) % 250).collect::<Vec<u32>>();
    let prompts: Vec<Vec<u32>> = (0..4).map(tokens).collect();
    let blocks: Vec<Vec<BlockId>> =
        (0..4).map(|index| (0..3).map(|block| BlockId(index * 3 + block)).collect()).collect();
    let (mut bits, mut logits) = (Vec::new(), Vec::new());
    for range in [0..17, 17..32, 32..33, 33..34, 34..40] {
        let slice = |index: usize| SequenceSlice {
            tokens: &prompts[index][range.clone()],
            start: range.start,
            blocks: &blocks[index],
            trunk: &[],
            adapter: adapters[index % adapters.len()].as_ref(),
            logits: if index == 3 { LogitRows::All } else { LogitRows::Last },
        };
        let batch: Vec<_> = (0..4).map(slice).collect();
        model.forward(&batch, &mut logits)?;
        bits.extend(logits.iter().map(|logit| logit.to_bits()));
    }
    Ok(bits)
}

fn bounds(source: &StreamedSource, directory: &Path) -> [u64; 3] {
    let (least, all) = (least(source, directory), LoadedWeights::load(source, 1).unwrap().bytes() as u64);
    [least, (least + all) / 2, 4 * all + (8 << 20)]
}

#[test]
fn a_streamed_model_gives_the_bits_of_a_resident_one_under_any_bound() {
    let models =
        ["llama-tied", "llama-bf16", "llama-sharded", "mistral-window", "qwen2-bias", "qwen3-qknorm"];
    for name in models
        .into_iter()
        .chain(["granite", "olmo2", "phi3", "gemma2", "gemma3", "mixtral", "qwen3moe"])
        .chain(["gptoss", "gptoss-mxfp4"])
    {
        let source = open(&golden("models").join(name)).unwrap();
        let adapters = adapters(name, &*source);
        let Ok(wanted) = talk(&mut resident(&*source), &adapters);
        let directory = tempfile::tempdir().unwrap();
        for bound in bounds(&*source, directory.path()) {
            for readahead in [Readahead::Next, Readahead::Nothing] {
                let stream = StreamOptions { readahead, ..stream(directory.path(), bound) };
                let got = talk(&mut streamed(&*source, &stream), &adapters).unwrap();
                assert!(got == wanted, "{name}, {bound} bytes, {readahead:?}");
            }
        }
    }
}

#[test]
fn a_real_model_streamed_through_a_sixth_of_its_memory_gives_the_same_bits() {
    let source = open(&smollm2()).unwrap();
    let Ok(wanted) = talk(&mut resident(&*source), &[None]);
    let directory = tempfile::tempdir().unwrap();
    let bound = LoadedWeights::load(&*source, 2).unwrap().bytes() as u64 / 6;
    let weights = open_streamed(&*source, &stream(directory.path(), bound)).unwrap();
    assert!(weights.bytes() as u64 <= bound);
    let mut model = ResidentModel::new(weights, &options()).unwrap();
    assert!(talk(&mut model, &[None]).unwrap() == wanted);
}

/// A small model with meaningless weights, whose linear layers have one format.
struct StreamedFormatSource(RandomSource, TensorType);

impl StreamedFormatSource {
    fn new(kind: TensorType, directory: &Path) -> Self {
        let config = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
            "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 3000, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false}"#;
        fs::write(directory.join("config.json"), config).unwrap();
        Self(RandomSource::open(directory, 3).unwrap(), kind)
    }

    fn is_linear(id: TensorId) -> bool {
        matches!(id, TensorId::TokenEmbedding | TensorId::Weight(..))
    }
}

impl WeightSource for StreamedFormatSource {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let tensor = self.0.tensor(id)?;
        if !Self::is_linear(id) {
            return Some(tensor);
        }
        let Tensor { rows, cols, .. } = tensor;
        let bytes = rows * self.1.row_bytes(cols).unwrap();
        let salt = format!("{id:?}").bytes().map(usize::from).sum::<usize>();
        // Small bytes give small floats of any width.
        let data = (0..bytes).map(|at| ((at * 31 + at / 7 + salt) % 0x2C) as u8).collect();
        Some(Tensor { kind: self.1, rows, cols, data: Cow::Owned(data) })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.0.kind(id).map(|kind| if Self::is_linear(id) { self.1 } else { kind })
    }
}

const KINDS: [TensorType; 11] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::Bf16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
];

#[test]
fn every_format_of_weights_can_be_streamed() {
    for kind in KINDS {
        let directory = tempfile::tempdir().unwrap();
        let source = StreamedFormatSource::new(kind, directory.path());
        let Ok(wanted) = talk(&mut resident(&source), &[None]);
        let bound = least(&source, directory.path());
        let got = talk(&mut streamed(&source, &stream(directory.path(), bound)), &[None]).unwrap();
        assert!(got == wanted, "{kind:?}");
    }
}

/// Outputs of every site, forward and backward, on both paths, whole and in parts, up and then down.
fn every_site(base: &mut impl EvaluateSites) -> Vec<u32> {
    let sites = base.sites().to_vec();
    let (up, down) = ([SiteOp::Forward, SiteOp::ForwardNoBias], [SiteOp::Backward]);
    let upwards = (0..sites.len()).map(|site| (site, &up[..]));
    let mut bits = Vec::new();
    for (number, ops) in upwards.chain((0..sites.len()).rev().map(|site| (site, &down[..]))) {
        let parts = (0..sites[number].parts.len() as u8).map(Some);
        let cases = [None].into_iter().chain(parts).flat_map(|part| {
            ops.iter().flat_map(move |&op| [SitePath::Fast, SitePath::Linear].map(|path| (part, op, path)))
        });
        for (part, op, path) in cases {
            let (input, output) = sites[number].widths(part, op).unwrap();
            let mut x = Activations::default();
            x.reshape(3, input);
            let values = x.values_mut().iter_mut().enumerate();
            values.for_each(|(at, value)| *value = ((at * 29 + number) % 101) as f32 / 50.0 - 1.0);
            let mut out = vec![0.0; 3 * output];
            let call = SiteCall { site: SiteId(number as u32), part, op, path };
            base.evaluate(call, &mut x, &mut out).unwrap();
            bits.extend(out.iter().map(|value| value.to_bits()));
        }
    }
    bits
}

#[test]
fn single_sites_forward_and_backward_give_the_same_bits() {
    for kind in [TensorType::Q4_1, TensorType::Bf16, TensorType::F32] {
        let directory = tempfile::tempdir().unwrap();
        let source = StreamedFormatSource::new(kind, directory.path());
        let wanted = every_site(&mut resident(&source));
        for bound in bounds(&source, directory.path()) {
            let got = every_site(&mut streamed(&source, &stream(directory.path(), bound)));
            assert!(got == wanted, "{kind:?}, {bound} bytes");
        }
    }
}

#[test]
fn a_pass_reads_what_is_not_pinned_once_and_rows_of_the_embedding() {
    let directory = tempfile::tempdir().unwrap();
    let source = StreamedFormatSource::new(TensorType::Q8_0, directory.path());
    let swept = |bound| open_streamed(&source, &stream(directory.path(), bound)).unwrap().sweep_bytes();
    let least = least(&source, directory.path());
    let (sweep, half) = (swept(least), swept(least + (1 << 20)));
    assert!(half < sweep && sweep > 2 << 20, "{half} of {sweep} bytes");
    let mut model = streamed(&source, &stream(directory.path(), least));
    let stats = model.sweep_figures().unwrap();
    let (passes, tokens) = (5, 34 - 17 + 17 + 6);
    talk(&mut model, &[None]).unwrap();
    // A grain of 64 rows for each token of the four sequences; and the next read may have begun.
    let grain = 64 * (256 + 16) + 2 * 4096;
    let read = stats.read_bytes();
    let most = passes * sweep + 4 * tokens * grain + 2 * sweep / 3;
    assert!(
        read >= passes * sweep && read <= most,
        "{read} bytes in {passes} passes of {sweep}, at most {most}"
    );
    assert!(stats.waited() <= stats.read_time() + std::time::Duration::from_secs(1));
    assert!(stats.computed().as_nanos() > 0);
}

/// Changes a byte near the end of a file: of the token embedding, or of the head.
fn damage(path: &Path, from_end: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let at = file.metadata().unwrap().len() - from_end;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_file_that_was_changed_or_cut_fails_passes_in_words_and_is_made_anew_at_the_next_start() {
    let directory = tempfile::tempdir().unwrap();
    let source = StreamedFormatSource::new(TensorType::Q4_0, directory.path());
    let stream = stream(directory.path(), least(&source, directory.path()));
    let Ok(wanted) = talk(&mut resident(&source), &[None]);
    let mut model = streamed(&source, &stream);
    assert!(talk(&mut model, &[None]).unwrap() == wanted);
    damage(&stream.path, 9000);
    let error = talk(&mut model, &[None]).unwrap_err();
    assert!(matches!(error, WeightReadError::Damaged(_)), "{error}");
    assert!(error.to_string().contains("restart the executor"), "{error}");
    damage(&stream.path, 9000);
    assert!(talk(&mut model, &[None]).unwrap() == wanted, "what is whole again is used again");
    let file = OpenOptions::new().write(true).open(&stream.path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let error = talk(&mut model, &[None]).unwrap_err();
    assert!(matches!(error, WeightReadError::Truncated(_)), "{error}");
    drop(model);
    assert!(talk(&mut streamed(&source, &stream), &[None]).unwrap() == wanted, "made anew");
}

#[test]
fn a_file_of_another_model_or_one_that_is_damaged_is_not_believed_at_a_start() {
    let directory = tempfile::tempdir().unwrap();
    let source = StreamedFormatSource::new(TensorType::Q4_0, directory.path());
    let stream = stream(directory.path(), least(&source, directory.path()));
    drop(streamed(&source, &stream));
    let whole = fs::read(&stream.path).unwrap();
    let spoil = |spoil: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        spoil(&mut bytes);
        fs::write(&stream.path, bytes).unwrap();
        drop(streamed(&source, &stream));
        assert!(fs::read(&stream.path).unwrap() == whole, "the same bytes are made again");
    };
    spoil(&|bytes| bytes[20] ^= 1);
    spoil(&|bytes| bytes[200] ^= 1);
    spoil(&|bytes| bytes[100_000] ^= 1);
    spoil(&|bytes| bytes.truncate(5000));
    spoil(&|bytes| bytes.clear());
    let other = StreamOptions { program: [8; 32], ..stream.clone() };
    drop(streamed(&source, &other));
    assert!(fs::read(&stream.path).unwrap() != whole);
    // Remains of a process that was killed while it packed.
    fs::remove_file(&stream.path).unwrap();
    fs::write(stream.path.with_extension("making"), b"half of it").unwrap();
    drop(streamed(&source, &stream));
    assert!(fs::read(&stream.path).unwrap() == whole);
    assert!(!stream.path.with_extension("making").exists());
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(fs::metadata(&stream.path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn what_happens_to_the_file_behind_what_is_pinned_or_to_another_in_its_place_changes_no_bit() {
    let directory = tempfile::tempdir().unwrap();
    let source = StreamedFormatSource::new(TensorType::Q4_0, directory.path());
    let half = stream(directory.path(), bounds(&source, directory.path())[1]);
    let Ok(wanted) = talk(&mut resident(&source), &[None]);
    let mut model = streamed(&source, &half);
    let whole = fs::read(&half.path).unwrap();
    // The first block and the head are pinned; the file ends with the head.
    let flip = |at: u64| {
        let file = OpenOptions::new().write(true).open(&half.path).unwrap();
        file.write_all_at(&[whole[at as usize] ^ 0x10], at).unwrap();
    };
    flip(whole.len() as u64 - 9000);
    assert!(talk(&mut model, &[None]).unwrap() == wanted, "it is in memory");
    fs::rename(&half.path, directory.path().join("away")).unwrap();
    fs::write(&half.path, b"another file").unwrap();
    assert!(talk(&mut model, &[None]).unwrap() == wanted, "the one that was opened is read");
    drop(model);
    drop(streamed(&source, &half));
    assert!(fs::read(&half.path).unwrap() == whole, "made anew");
    // A bit of each part: damage of pinned weights is found before serving, of others at reading.
    for at in (4096..whole.len() as u64).step_by(whole.len() / 7) {
        flip(at);
        assert!(talk(&mut streamed(&source, &half), &[None]).unwrap() == wanted);
        assert!(fs::read(&half.path).unwrap() == whole, "made anew for byte {at}");
    }
}

/// A file system of limited size, if one may be mounted.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(bytes: u64) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(directory.path());
        let mounted = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        if !mounted {
            eprintln!("no file system can be mounted here, so a full disk is not tested");
        }
        mounted.then(|| Self(directory))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn a_disk_that_is_full_while_weights_are_packed_is_told_and_leaves_nothing_that_is_believed() {
    let Some(disk) = SmallDisk::new(1 << 20) else { return };
    let config = tempfile::tempdir().unwrap();
    let source = StreamedFormatSource::new(TensorType::Q4_0, config.path());
    let elsewhere = stream(config.path(), least(&source, config.path()));
    let full = StreamOptions { path: disk.0.path().join("weights.packed"), ..elsewhere.clone() };
    for _ in 0..2 {
        let error = open_streamed(&source, &full).unwrap_err();
        assert!(matches!(error, StreamError::Make(_)), "{error}");
        assert!(error.to_string().contains("free disk space"), "{error}");
        assert!(!full.path.exists());
    }
    let Ok(wanted) = talk(&mut resident(&source), &[None]);
    assert!(talk(&mut streamed(&source, &elsewhere), &[None]).unwrap() == wanted);
}
