//! New adapters, initialised as PEFT initialises them, with random numbers from a seed.

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

/// A linear layer, by its name in PEFT's `target_modules`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TargetModule(pub Target);

/// All modules by name, in the order of a forward pass.
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

/// Error of an unknown module name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a linear layer; use q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj or \
     lm_head"
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

/// Kind and size of an adapter to train.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub enum AdapterSpec {
    Lora {
        /// Rank of every delta.
        rank: usize,
        /// PEFT's scaling parameter `lora_alpha`.
        alpha: f64,
        /// Whether alpha is divided by the square root of the rank.
        rslora: bool,
        /// The adapted layers, in every block.
        targets: BTreeSet<TargetModule>,
    },
    /// Vectors that scale the outputs of a layer, or its inputs where only this layer uses them.
    Ia3 {
        /// The scaled layers, in every block.
        targets: BTreeSet<TargetModule>,
    },
    /// Keys and values of virtual tokens before the first token.
    Prefix { virtual_tokens: usize },
}

/// Standard deviation of a prefix's initial values.
const PREFIX_DEVIATION: f64 = 0.02;

impl AdapterSpec {
    #[must_use]
    pub fn adapter_type(&self) -> &'static str {
        match self {
            Self::Lora { .. } => "lora",
            Self::Ia3 { .. } => "ia3",
            Self::Prefix { .. } => "prefix",
        }
    }

    /// Creates an adapter of this kind that does not change the base yet.
    ///
    /// LoRA: A is drawn as torch's `kaiming_uniform_(a=√5)` does, B is zero. IA3: vectors of ones. Only a
    /// prefix changes the base from the start; its values are small normal random numbers.
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

    /// Removes the targets that the model `config` lacks: experts are not trained, and a model may have no
    /// plain feed-forward network.
    #[must_use]
    pub fn on(mut self, config: &ModelConfig) -> Self {
        if let Self::Lora { targets, .. } | Self::Ia3 { targets } = &mut self {
            targets.retain(|&module| is_there(config, module));
        }
        self
    }

    /// Returns the first target that the model `config` has in no block.
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

    /// Returns the kind of a trained adapter, with the largest rank of its modules.
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
            MethodWeights::Prompt(_) => unreachable!("prompts are refused before"),
        }
    }

    /// Returns the factor of a delta; 1 for IA3 and prefix.
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

/// Returns the side that IA3 scales: the inputs of PEFT's `feedforward_modules`, else the outputs.
#[must_use]
pub fn scaled_side(target: Target) -> ScaledSide {
    if target == Target::Down { ScaledSide::Input } else { ScaledSide::Output }
}

/// True if the model has this module in some block or as its head.
fn is_there(config: &ModelConfig, module: TargetModule) -> bool {
    let mut blocks = 0..config.layers;
    module.0 == Target::LmHead || blocks.any(|layer| layer_targets(config, layer).contains(&module.0))
}

/// Returns (layer, target) of all adapted layers, then the head; blocks with experts have only attention.
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

/// Returns the random numbers of the tensor with number `tensor`.
fn draw(seed: u64, tensor: usize) -> Rng {
    Rng::keyed(Rng::seeded(seed).bits(tensor as u64))
}

#[expect(clippy::cast_possible_truncation, reason = "parameters are numbers of 32 bits")]
fn uniform(draw: Rng, at: u64, bound: f64) -> f32 {
    ((2.0 * draw.uniform(at) - 1.0) * bound) as f32
}

/// Returns a normal random number from two uniform ones (Box, Muller 1958).
#[expect(clippy::cast_possible_truncation, reason = "parameters are numbers of 32 bits")]
fn normal(draw: Rng, at: u64) -> f32 {
    let radius = (-2.0 * (1.0 - draw.uniform(2 * at)).ln()).sqrt();
    (PREFIX_DEVIATION * radius * (TAU * draw.uniform(2 * at + 1)).cos()) as f32
}
