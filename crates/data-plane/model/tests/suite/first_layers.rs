//! The first layers of a base as a model of their own: the base's bits, from the base's memory.

use testkit::paths::golden_model as golden;

use model::{
    adapter::DraftShape,
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass, LogitRows, SequenceSlice},
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions, SharedBase},
    shape::source::WeightSource,
    sources::open::open,
    weights::{
        first::FirstLayersError,
        served::ServedLayers,
        streamed::{Readahead, StreamOptions},
    },
};
use types::BlockId;

const TOKENS: usize = 40;

fn options() -> ResidentOptions {
    ResidentOptions { cores: vec![0; 2], kv_bytes: 4 << 20, kv_dtype: Some(KvPrecision::F16) }
}

fn logits<P: ForwardPass<Adapter = PreparedAdapter>>(model: &mut P) -> Vec<Vec<u32>> {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|at| (at * 37 + at * at) % 250).collect();
    let blocks: Vec<BlockId> = (0..3).map(BlockId).collect();
    let (mut rows, mut logits) = (Vec::new(), Vec::new());
    for range in [0..17, 17..39, 39..TOKENS] {
        let (tokens, start) = (&tokens[range.clone()], range.start);
        let (trunk, adapter) = (&[][..], None);
        let slice = SequenceSlice { tokens, start, blocks: &blocks, trunk, adapter, logits: LogitRows::All };
        assert!(model.forward(&[slice], &mut logits).is_ok());
        let bits = |row: &[f32]| row.iter().map(|logit| logit.to_bits()).collect();
        rows.extend(logits.chunks_exact(model.vocab_size()).map(bits));
    }
    rows
}

fn first(base: &SharedBase, layers: usize, ids: Option<&[u32]>) -> Result<Vec<Vec<u32>>, FirstLayersError> {
    let shape = DraftShape { layers, shortlist: ids.map(Into::into) };
    Ok(logits(&mut ResidentModel::new(base.first_layers(&shape)?, &options()).unwrap()))
}

fn resident(source: &(dyn WeightSource + Sync)) -> LoadedWeights<ServedLayers> {
    LoadedWeights::open(source, None, 2, &|_| {}).unwrap()
}

#[test]
fn all_layers_are_the_base_and_a_shortlist_is_a_part_of_its_logits() {
    let models = ["llama-tied", "llama-bf16", "mistral-window", "qwen2-bias", "qwen3-qknorm"];
    for name in models.into_iter().chain(["olmo2", "phi3", "gemma2"]) {
        let source = open(&golden(name)).unwrap();
        let weights = resident(&*source);
        let (base, layers) = (weights.shared(), source.config().layers);
        let wanted = logits(&mut ResidentModel::new(weights, &options()).unwrap());
        assert_eq!(first(&base, layers, None).unwrap(), wanted, "{name}");
        let ids: Vec<u32> = (0..source.config().vocab_size as u32).step_by(7).collect();
        let listed: Vec<Vec<u32>> =
            wanted.iter().map(|row| ids.iter().map(|&id| row[id as usize]).collect()).collect();
        assert_eq!(first(&base, layers, Some(&ids)).unwrap(), listed, "{name}");
        assert_ne!(first(&base, 1, None).unwrap(), wanted, "{name}: fewer layers say something else");
    }
}

#[test]
fn of_a_base_that_comes_from_a_disk_what_is_pinned_gives_the_same_bits_and_the_rest_is_refused() {
    let source = open(&golden("llama-tied")).unwrap();
    let (wanted, layers) = (resident(&*source).shared(), source.config().layers);
    let directory = tempfile::tempdir().unwrap();
    let open_with = |bound_bytes| {
        let path = directory.path().join("weights.packed");
        let stream = StreamOptions {
            path,
            program: [7; 32],
            bound_bytes,
            readahead: Readahead::Next,
            bytes_per_s: None,
        };
        LoadedWeights::open(&*source, Some((&[1; 32], &stream)), 2, &|_| {})
    };
    let (mut refused, mut shared) = (0, 0);
    for bound in (1..200).map(|part| part * (32 << 10)) {
        // Another test covers bounds that are too small.
        let Ok(weights) = open_with(bound) else { continue };
        let (base, sweep_bytes) = (weights.shared(), weights.sweep_bytes());
        let ids = [3, 5, 200];
        match first(&base, layers, Some(&ids)) {
            Ok(logits) => {
                assert_eq!(logits, first(&wanted, layers, Some(&ids)).unwrap());
                shared += 1;
            }
            Err(FirstLayersError::NotInMemory { wanted, in_memory }) => {
                assert!(wanted == layers && in_memory < layers && sweep_bytes > 0);
                refused += 1;
            }
            Err(FirstLayersError::NoEnd(_)) => refused += 1,
            Err(error @ (FirstLayersError::Memory(_) | FirstLayersError::Grouped)) => panic!("{error}"),
        }
    }
    assert!(refused > 0 && shared > 0, "{refused} refused, {shared} shared");
}
