//! Adapters before they have learned anything: as PEFT begins them, with random numbers that a seed decides.

use std::{collections::BTreeSet, f64::consts::TAU, fmt, str::FromStr, sync::Arc};

use model::{
    adapter::{LoraModule, MethodWeights, Prefix, ScaleVector, ScaledSide, Scales},
    shape::{
        config::ModelConfig,
        layout::{layer_targets, linear_shape},
        source::Target,
    },
};
use scheduling::random::Rng;
use serde::{Deserialize, Serialize};

/// A linear layer by the name that PEFT's `target_modules` has for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TargetModule(pub Target);

/// All modules by name, in the order of a pass.
const MODULES: [(&str, Target); 8] = [
    ("q_proj", Target::Q),
    ("k_proj", Target::K),
    ("v_proj", Target::V),
    ("o_proj", Target::O),
    ("gate_proj", Target::Gate),
    ("up_proj", Target::Up),
    ("down_proj", Target::Down),
    ("lm_head", Target::LmHead),
];

impl fmt::Display for TargetModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MODULES.iter().find(|(_, target)| *target == self.0).map_or("", |(name, _)| name))
    }
}

/// There is no module of this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no linear layer; use q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj or lm_head"
)]
pub struct NoModule(String);

impl FromStr for TargetModule {
    type Err = NoModule;

    fn from_str(name: &str) -> Result<Self, NoModule> {
        let found = MODULES.iter().find(|(known, _)| *known == name);
        found.map(|&(_, target)| Self(target)).ok_or_else(|| NoModule(name.to_owned()))
    }
}

impl Serialize for TargetModule {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TargetModule {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What kind of adapter learns, and how large it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub enum AdapterSpec {
    /// Low-rank deltas.
    Lora {
        /// Of every delta.
        rank: usize,
        /// `lora_alpha`.
        alpha: f64,
        /// Whether alpha is divided by the root of the rank.
        rslora: bool,
        /// The layers that get one, in every block.
        targets: BTreeSet<TargetModule>,
    },
    /// Vectors that scale: outputs, or where inputs are one layer's alone, these.
    Ia3 {
        /// The layers that get one, in every block.
        targets: BTreeSet<TargetModule>,
    },
    /// Keys and values before the first token.
    Prefix {
        /// As many tokens of them.
        virtual_tokens: usize,
    },
}

/// The deviation of a prefix' first numbers.
const PREFIX_DEVIATION: f64 = 0.02;

impl AdapterSpec {
    /// The kind of adapter, in a word.
    #[must_use]
    pub fn method(&self) -> &'static str {
        match self {
            Self::Lora { .. } => "lora",
            Self::Ia3 { .. } => "ia3",
            Self::Prefix { .. } => "prefix",
        }
    }

    /// An adapter of this shape that changes nothing yet (a prefix cannot but change something): A as torch's
    /// `kaiming_uniform_(a=√5)` draws it, B zero; vectors of ones; a prefix of small normal numbers.
    #[must_use]
    pub fn start(&self, config: &ModelConfig, seed: u64) -> MethodWeights {
        match self {
            &Self::Lora { rank, ref targets, .. } => {
                let places = places(config, targets).enumerate();
                MethodWeights::Lora(
                    places
                        .map(|(number, place)| self.module(config, place, rank, draw(seed, number)))
                        .collect(),
                )
            }
            Self::Ia3 { targets } => {
                let vector = |(layer, target)| {
                    let ([outputs, inputs], side) = (linear_shape(config, target), scaled_side(target));
                    let width = if side == ScaledSide::Input { inputs } else { outputs };
                    ScaleVector { layer, target, side, values: vec![1.0; width] }
                };
                MethodWeights::Ia3(Arc::new(Scales::new(places(config, targets).map(vector).collect())))
            }
            &Self::Prefix { virtual_tokens: tokens } => {
                let (layers, width) = (config.layers, config.kv_heads * config.head_dim);
                let draw = draw(seed, 0);
                let values = (0..tokens * layers * 2 * width).map(|at| normal(draw, at as u64)).collect();
                MethodWeights::Prefix(Arc::new(Prefix { tokens, layers, width, values }))
            }
        }
    }

    /// What it has of a model of this shape: nothing learns in experts, and there may be no plain feed-forward.
    #[must_use]
    pub fn on(mut self, config: &ModelConfig) -> Self {
        if let Self::Lora { targets, .. } | Self::Ia3 { targets } = &mut self {
            targets.retain(|&module| is_there(config, module));
        }
        self
    }

    /// The first of its modules that such a model has nowhere.
    #[must_use]
    pub fn missing_on(&self, config: &ModelConfig) -> Option<TargetModule> {
        match self {
            Self::Lora { targets, .. } | Self::Ia3 { targets } => {
                targets.iter().copied().find(|&module| !is_there(config, module))
            }
            Self::Prefix { .. } => None,
        }
    }

    fn module(
        &self,
        config: &ModelConfig,
        (layer, target): (usize, Target),
        rank: usize,
        draw: Rng,
    ) -> LoraModule {
        let [outputs, inputs] = linear_shape(config, target);
        let bound = 1.0 / (inputs as f64).sqrt();
        let a = (0..rank * inputs).map(|at| uniform(draw, at as u64, bound)).collect();
        LoraModule { layer, target, rank, scale: self.scale(), a, b: vec![0.0; outputs * rank] }
    }

    /// The shape of an adapter that was trained, as far as one can be said: one with several ranks has the largest.
    #[must_use]
    pub fn like(method: &MethodWeights) -> Self {
        let targets = |of: &mut dyn Iterator<Item = Target>| of.map(TargetModule).collect();
        match method {
            MethodWeights::Lora(modules) | MethodWeights::Activated(modules, _) => {
                let rank = method.rank();
                let alpha = f64::from(modules.first().map_or(1.0, |module| module.scale)) * rank as f64;
                let targets = targets(&mut modules.iter().map(|module| module.target));
                Self::Lora { rank, alpha, rslora: false, targets }
            }
            MethodWeights::Ia3(scales) => {
                Self::Ia3 { targets: targets(&mut scales.vectors().iter().map(|vector| vector.target)) }
            }
            MethodWeights::Prefix(prefix) => Self::Prefix { virtual_tokens: prefix.tokens },
        }
    }

    /// What a delta is multiplied with; 1 for what has none.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "PEFT rounds the scale to single precision too")]
    pub fn scale(&self) -> f32 {
        match *self {
            Self::Lora { rank, alpha, rslora: true, .. } => (alpha / (rank as f64).sqrt()) as f32,
            Self::Lora { rank, alpha, .. } => (alpha / rank as f64) as f32,
            Self::Ia3 { .. } | Self::Prefix { .. } => 1.0,
        }
    }
}

/// Which side of a layer IA3 scales: PEFT's `feedforward_modules` are those whose inputs it does.
#[must_use]
pub fn scaled_side(target: Target) -> ScaledSide {
    if target == Target::Down { ScaledSide::Input } else { ScaledSide::Output }
}

/// Whether a model has a module in any block, or as its head.
fn is_there(config: &ModelConfig, module: TargetModule) -> bool {
    let mut blocks = 0..config.layers;
    module.0 == Target::LmHead || blocks.any(|layer| layer_targets(config, layer).contains(&module.0))
}

/// The linear layers of all blocks, then the head. Experts are none of them: a block that has some has those of its attention alone.
fn places(config: &ModelConfig, targets: &BTreeSet<TargetModule>) -> impl Iterator<Item = (usize, Target)> {
    let in_blocks = targets.iter().filter(|module| module.0 != Target::LmHead).map(|module| module.0);
    let in_blocks: Vec<Target> = in_blocks.collect();
    let head = targets.contains(&TargetModule(Target::LmHead)).then_some((0, Target::LmHead));
    let mut places: Vec<_> = (0..config.layers)
        .flat_map(|layer| in_blocks.iter().map(move |&target| (layer, target)))
        .filter(|&(layer, target)| layer_targets(config, layer).contains(&target))
        .chain(head)
        .collect();
    places.sort_unstable();
    places.into_iter()
}

/// The random numbers of one tensor.
fn draw(seed: u64, tensor: usize) -> Rng {
    Rng::keyed(Rng::seeded(seed).bits(tensor as u64))
}

#[expect(clippy::cast_possible_truncation, reason = "parameters are numbers of 32 bits")]
fn uniform(draw: Rng, at: u64, bound: f64) -> f32 {
    ((2.0 * draw.uniform(at) - 1.0) * bound) as f32
}

/// A normal number of two uniform ones (Box, Muller 1958).
#[expect(clippy::cast_possible_truncation, reason = "parameters are numbers of 32 bits")]
fn normal(draw: Rng, at: u64) -> f32 {
    let radius = (-2.0 * (1.0 - draw.uniform(2 * at)).ln()).sqrt();
    (PREFIX_DEVIATION * radius * (TAU * draw.uniform(2 * at + 1)).cos()) as f32
}
