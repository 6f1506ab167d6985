//! Untrained random weights: any known architecture at its real size and speed, from its `config.json` alone.
//!
//! Tensors are bf16. Element `i` of a tensor is a hash of the seed, the tensor and `i` (splitmix64, four
//! elements per hash). Any thread can therefore generate tensors in any order, repeatedly. A linear layer
//! keeps the magnitude of its inputs (uniform with a standard deviation of 1/√inputs). Layers that write to
//! the residual stream are smaller by √(2·layers), so that their sum is about as large as the stream.

use std::{
    borrow::Cow,
    fs, io,
    path::{Path, PathBuf},
};

use kernels::TensorType;
use model_files::{model_files::CONFIG_FILE, text_hash::TextHash};
use scheduling::random::Rng;

use crate::{
    shape::{
        config::ModelConfig,
        experts::ExpertPart,
        identity::{HasIdentity, Identity},
        layout::{layer_targets, tensor_shape},
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::hf_config::{HfConfig, HfConfigError},
};

const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The value 1 as bf16.
const ONE: u16 = 0x3F80;

/// Reasons why random weights cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RandomSourceError {
    /// The configuration cannot be read.
    #[error("cannot read {}: {source}; random weights need the config.json of a model", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The configuration describes no known model.
    #[error("cannot create random weights for {}: {source}", path.display())]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// Reason for refusing the configuration.
        source: HfConfigError,
    },
}

/// A model of random weights.
#[derive(Debug, Clone)]
pub struct RandomSource {
    config: ModelConfig,
    biased: Vec<Target>,
    seed: u64,
}

impl RandomSource {
    /// Creates the model that `directory/config.json` describes, with weights from `seed`.
    ///
    /// # Errors
    /// The file cannot be read or describes no known model.
    pub fn open(directory: &Path, seed: u64) -> Result<Self, RandomSourceError> {
        let path = directory.join(CONFIG_FILE);
        let json =
            read_bounded(&path).map_err(|source| RandomSourceError::Read { path: path.clone(), source })?;
        let parsed = HfConfig::parse(&json);
        let HfConfig { model: config, biased, .. } =
            parsed.map_err(|source| RandomSourceError::Config { path, source })?;
        Ok(Self { config, biased, seed })
    }

    /// Creates a model of this shape, without biases.
    #[must_use]
    pub fn new(config: ModelConfig, seed: u64) -> Self {
        Self { config, biased: Vec::new(), seed }
    }

    fn has(&self, id: TensorId) -> bool {
        let is_layer = |layer: usize| layer < self.config.layers;
        match id {
            TensorId::TokenEmbedding | TensorId::OutputNorm => true,
            TensorId::AttentionNorm(layer) | TensorId::FeedForwardNorm(layer) => {
                self.config.norms_inputs() && is_layer(layer)
            }
            TensorId::QueryNorm(layer) | TensorId::KeyNorm(layer) => self.config.qk_norm && is_layer(layer),
            TensorId::AttentionUpdateNorm(layer) | TensorId::FeedForwardUpdateNorm(layer) => {
                self.config.norms_updates() && is_layer(layer)
            }
            TensorId::Weight(layer, Target::LmHead) => layer == 0 && !self.config.tied_head,
            TensorId::Weight(layer, target) => is_layer(layer) && self.has_target(layer, target),
            TensorId::Bias(layer, target) => {
                is_layer(layer) && self.biased.contains(&target) && self.has_target(layer, target)
            }
            TensorId::Sinks(layer) => self.config.traits.sinks && is_layer(layer),
            TensorId::RouterBias(layer) => {
                self.config.traits.expert_biases && self.has(TensorId::Router(layer))
            }
            TensorId::ExpertBias(layer, id, part) => {
                self.config.traits.expert_biases && self.has(TensorId::Expert(layer, id, part))
            }
            TensorId::Router(layer) => is_layer(layer) && self.config.experts_of(layer).is_some(),
            TensorId::Expert(layer, id, _) => {
                let experts = self.config.experts_of(layer).filter(|_| is_layer(layer));
                experts.is_some_and(|experts| usize::from(id.0) < experts.count)
            }
        }
    }

    fn has_target(&self, layer: usize, target: Target) -> bool {
        layer_targets(&self.config, layer).contains(&target)
    }

    /// Returns the standard deviation of a tensor's elements, or `None` for norms, which are 1 everywhere.
    fn standard_deviation(&self, id: TensorId) -> Option<f32> {
        let [_, inputs] = tensor_shape(&self.config, id);
        let kept = 1.0 / (inputs.max(1) as f32).sqrt();
        match id {
            // A tied head is also the embedding, and its logits should have a magnitude of about 1.
            TensorId::TokenEmbedding if self.config.tied_head => Some(kept),
            TensorId::TokenEmbedding => Some(1.0),
            TensorId::Weight(_, Target::O | Target::Down) | TensorId::Expert(_, _, ExpertPart::Down) => {
                Some(kept / (2.0 * self.config.layers as f32).sqrt())
            }
            TensorId::Weight(..) | TensorId::Expert(..) | TensorId::Router(_) => Some(kept),
            TensorId::Bias(..) | TensorId::RouterBias(_) | TensorId::ExpertBias(..) => Some(0.02),
            TensorId::Sinks(_) => Some(1.0),
            _ => None,
        }
    }
}

impl WeightSource for RandomSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        if !self.has(id) {
            return None;
        }
        let [rows, cols] = tensor_shape(&self.config, id);
        let data = match self.standard_deviation(id) {
            None => ONE.to_le_bytes().repeat(rows * cols),
            Some(spread) => uniform(key(self.seed, id), spread, rows * cols),
        };
        Some(Tensor { kind: TensorType::Bf16, rows, cols, data: Cow::Owned(data) })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.has(id).then_some(TensorType::Bf16)
    }
}

impl HasIdentity for RandomSource {
    /// The identity follows from shape and seed, so no element is generated.
    fn identity(&self, text: TextHash) -> [u8; 32] {
        let mut identity = Identity::new(text);
        identity.add(&format!("random {:?} {:?} {}", self.config, self.biased, self.seed));
        identity.finish()
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    use io::Read as _;
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is longer than 1 MiB"));
    }
    Ok(bytes)
}

/// Returns the position of a tensor's elements in the random sequence of a seed.
fn key(seed: u64, id: TensorId) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("holobiont random weights 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(format!("{id:?}").as_bytes());
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Generates `count` bf16 values, uniform around 0.
fn uniform(key: u64, spread: f32, count: usize) -> Vec<u8> {
    // A uniform value in -1..1 has the standard deviation 1/√3.
    let step = spread * 3f32.sqrt() / 32768.0;
    let mut data = vec![0u8; 2 * count];
    let random = Rng::keyed(key);
    for (chunk, counter) in data.chunks_mut(8).zip(0u64..) {
        let hash = random.bits(counter).to_le_bytes();
        for (number, bits) in chunk.chunks_exact_mut(2).zip(hash.chunks_exact(2)) {
            // The middle of the step avoids 0 and makes both signs symmetric.
            let value = (f32::from(i16::from_le_bytes([bits[0], bits[1]])) + 0.5) * step;
            number.copy_from_slice(&bf16(value).to_le_bytes());
        }
    }
    data
}

/// Returns the nearest bf16 of a finite value, ties to even.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    u16::try_from(rounded).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use types::BlockId;

    use super::*;
    use crate::{
        forward::{ForwardPass as _, LogitRows, SequenceSlice},
        resident::{LoadedWeights, ResidentModel, ResidentOptions},
        shape::config::{ArchFlags, Rope, RopeScaling},
    };

    /// First bytes of the second layer's queries with seed 7.
    const FIRST_BYTES: [u8; 8] = [238, 61, 84, 189, 207, 61, 48, 62];

    fn shape(layers: usize) -> ModelConfig {
        ModelConfig {
            architecture: "llama".to_owned(),
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 96,
            layers,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            norm_eps: 1e-5,
            rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
            qk_norm: false,
            tied_head: false,
            context_length: 64,
            sliding_window: None,
            traits: ArchFlags::default(),
            experts: None,
        }
    }

    fn numbers(source: &RandomSource, id: TensorId) -> Vec<f32> {
        let tensor = source.tensor(id).unwrap();
        let bits = tensor.data.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]]));
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect()
    }

    fn deviation(values: &[f32]) -> f32 {
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
    }

    #[test]
    fn the_same_seed_makes_the_same_numbers_and_nothing_else_does() {
        let query = TensorId::Weight(1, Target::Q);
        let of = |seed, id| numbers(&RandomSource::new(shape(2), seed), id);
        assert_eq!(of(7, query), of(7, query));
        assert_ne!(of(7, query), of(8, query));
        assert_ne!(of(7, query), of(7, TensorId::Weight(0, Target::Q)));
        // The expected bytes are fixed, so a seed's model is the same on every machine and in every release.
        let first: Vec<u8> = RandomSource::new(shape(2), 7).tensor(query).unwrap().data[..8].to_vec();
        assert_eq!(first, FIRST_BYTES);
        let identity = |layers, seed| RandomSource::new(shape(layers), seed).identity(TextHash([0; 32]));
        assert_eq!(identity(2, 7), identity(2, 7));
        assert!(identity(2, 7) != identity(2, 8) && identity(2, 7) != identity(3, 7));
    }

    #[test]
    fn numbers_are_spread_as_their_place_asks_and_norms_are_one() {
        let source = RandomSource::new(shape(8), 1);
        let spread = |id| deviation(&numbers(&source, id));
        assert!((spread(TensorId::Weight(3, Target::Gate)) - 0.125).abs() < 0.004);
        assert!((spread(TensorId::Weight(3, Target::O)) - 0.125 / 4.0).abs() < 0.001);
        assert!((spread(TensorId::TokenEmbedding) - 1.0).abs() < 0.03);
        assert!(numbers(&source, TensorId::AttentionNorm(7)).iter().all(|&value| value == 1.0));
        let missing = [TensorId::AttentionNorm(8), TensorId::QueryNorm(0), TensorId::Bias(0, Target::Q)];
        assert!(missing.iter().all(|&id| source.tensor(id).is_none() && source.kind(id).is_none()));
    }

    #[test]
    fn a_deep_model_neither_explodes_nor_says_the_same_everywhere() {
        let source = RandomSource::new(shape(40), 3);
        let weights = LoadedWeights::load(&source, 1).unwrap();
        let options = ResidentOptions { cores: Vec::new(), kv_bytes: 1 << 22, kv_dtype: None };
        let mut model = ResidentModel::new(weights, &options).unwrap();
        let (tokens, blocks, mut logits) = ([1, 200, 30, 4], [BlockId(0)], Vec::new());
        let (start, adapter) = (0, None);
        let slice = SequenceSlice {
            trunk: &[],
            tokens: &tokens,
            start,
            blocks: &blocks,
            adapter,
            logits: LogitRows::All,
        };
        model.forward(&[slice], &mut logits).unwrap();
        let spreads: Vec<f32> = logits.chunks(256).map(deviation).collect();
        assert!(spreads.iter().all(|spread| (0.5..2.0).contains(spread)), "{spreads:?}");
        assert_ne!(logits[..256], logits[256..512]);
    }
}
