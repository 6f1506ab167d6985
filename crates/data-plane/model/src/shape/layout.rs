//! The tensors of a model of a given shape, and the shape of each.
//!
//! A shape from a file is untrusted. [`check_config`] bounds every number before any multiplication, and
//! [`check_tensors`] compares a file's tensors with those that the shape requires.

use kernels::elementwise::Gate;

use crate::shape::{
    config::{ModelConfig, Rope, RopeScaling},
    experts::{ExpertId, ExpertPart, ExpertTarget, Experts, MAX_EXPERTS, MAX_EXPERTS_OF_MODEL},
    source::{Target, TensorId},
};

/// Maximum number of transformer blocks.
pub const MAX_LAYERS: usize = 1 << 10;
/// Maximum width, number of heads or vocabulary size; the product of any two fits 64 bits.
pub const MAX_DIMENSION: usize = 1 << 24;
/// Maximum context length in tokens.
pub const MAX_CONTEXT: usize = 1 << 24;

/// The linear layers of a transformer block without experts, in the order of a forward pass.
pub const BLOCK_TARGETS: [Target; 7] =
    [Target::Q, Target::K, Target::V, Target::O, Target::Gate, Target::Up, Target::Down];

impl Target {
    /// Returns the index in [`BLOCK_TARGETS`], or `None` for the head and for experts.
    #[must_use]
    pub fn index_in_block(self) -> Option<usize> {
        BLOCK_TARGETS.iter().position(|&target| target == self)
    }
}

/// Linear layers with a common input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinearGroup {
    /// `[q | k | v]` of the normed residual.
    Qkv,
    /// Output projection of the attention.
    O,
    /// `[gate | up]` of the normed residual.
    GateUp,
    /// Output projection of the feed-forward.
    Down,
    /// `[gate | up]` of an expert, for the rows of the normed residual that the router sends to it.
    ExpertGateUp(ExpertId),
    /// Output projection of an expert.
    ExpertDown(ExpertId),
    /// Logits; the layer index of the head is 0.
    Head,
}

/// Reasons for refusing a declared shape.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum ModelConfigError {
    #[error("{what} is {found}, which is not between 1 and {limit}")]
    OutOfRange { what: &'static str, found: usize, limit: usize },
    #[error("{kv_heads} key-value heads do not divide {heads} query heads")]
    Heads { heads: usize, kv_heads: usize },
    #[error("a head has width {0}, but rotary embeddings need an even width")]
    OddHead(usize),
    #[error(
        "{rotary_dim} of the {head_dim} features of a head are rotated, and it must be an even part of them"
    )]
    RotaryDim { head_dim: usize, rotary_dim: usize },
    #[error("{what} is {found}, which is not a positive finite number")]
    Number { what: &'static str, found: f32 },
    #[error("the rotary embedding has {found} frequency factors, but a head needs {expected}")]
    Factors { expected: usize, found: usize },
}

/// Reasons for refusing a file's tensors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum LayoutError {
    #[error("tensor `{tensor}` is missing")]
    Missing { tensor: String },
    #[error("tensor `{tensor}` has the shape {found:?}, but the configuration requires {expected:?}")]
    Shape { tensor: String, expected: [usize; 2], found: [usize; 2] },
    #[error("tensor `{tensor}` names the group {group}, but there are {groups}")]
    Group { tensor: String, group: usize, groups: usize },
}

/// Checks that all values of a declared shape are in range and consistent.
///
/// # Errors
/// The first problem found.
pub fn check_config(config: &ModelConfig) -> Result<(), ModelConfigError> {
    let counts = [
        ("the number of layers", config.layers, MAX_LAYERS),
        ("the vocabulary size", config.vocab_size, MAX_DIMENSION),
        ("the hidden size", config.hidden_size, MAX_DIMENSION),
        ("the feed-forward size", config.intermediate_size, MAX_DIMENSION),
        ("the number of heads", config.heads, MAX_DIMENSION),
        ("the number of key-value heads", config.kv_heads, MAX_DIMENSION),
        ("the width of a head", config.head_dim, MAX_DIMENSION),
        ("the context length", config.context_length, MAX_CONTEXT),
        ("the sliding window", config.sliding_window.unwrap_or(1), usize::MAX),
    ];
    for (what, found, limit) in counts {
        if found == 0 || found > limit {
            return Err(ModelConfigError::OutOfRange { what, found, limit });
        }
    }
    if !config.heads.is_multiple_of(config.kv_heads) {
        return Err(ModelConfigError::Heads { heads: config.heads, kv_heads: config.kv_heads });
    }
    if !config.head_dim.is_multiple_of(2) {
        return Err(ModelConfigError::OddHead(config.head_dim));
    }
    let rotary_dim = config.rotary_dim();
    if rotary_dim == 0 || rotary_dim > config.head_dim || !rotary_dim.is_multiple_of(2) {
        return Err(ModelConfigError::RotaryDim { head_dim: config.head_dim, rotary_dim });
    }
    config.experts.as_ref().map_or(Ok(()), |experts| check_experts(experts, config.layers))?;
    check_numbers(config)
}

fn check_experts(experts: &Experts, layers: usize) -> Result<(), ModelConfigError> {
    let sparse = experts.layers_below(layers);
    let counts = [
        ("the number of experts", experts.count, MAX_EXPERTS),
        ("the number of experts of a token", experts.chosen, experts.count),
        ("the width of experts", experts.width, MAX_DIMENSION),
        ("the number of blocks with experts", sparse, layers),
        ("the number of experts of all blocks", experts.count.saturating_mul(sparse), MAX_EXPERTS_OF_MODEL),
    ];
    let wrong = counts.into_iter().find(|&(_, found, limit)| found == 0 || found > limit);
    wrong.map_or(Ok(()), |(what, found, limit)| Err(ModelConfigError::OutOfRange { what, found, limit }))
}

fn check_numbers(config: &ModelConfig) -> Result<(), ModelConfigError> {
    positive("the norms' epsilon", config.norm_eps)?;
    let traits = &config.traits;
    positive("what embeddings are multiplied with", traits.embedding_scale.unwrap_or(1.0))?;
    positive("what scores are multiplied with", traits.score_scale.unwrap_or(1.0))?;
    positive("the cap of scores", traits.score_cap.unwrap_or(1.0))?;
    positive("the cap of logits", traits.logit_cap.unwrap_or(1.0))?;
    positive("what updates are multiplied with", traits.update_scale.unwrap_or(1.0))?;
    positive("what logits are divided by", traits.logit_divisor.unwrap_or(1.0))?;
    positive("what is rotated is multiplied with", traits.rotary_magnitude.unwrap_or(1.0))?;
    if let Gate::SwigluOai { limit } = traits.gate {
        positive("the limit of gates", limit)?;
    }
    check_rope(&config.rope, config.rotary_dim())?;
    traits.local_rope.as_ref().map_or(Ok(()), |rope| check_rope(rope, config.rotary_dim()))
}

fn check_rope(rope: &Rope, rotary_dim: usize) -> Result<(), ModelConfigError> {
    positive("the rotary embedding's base", rope.theta)?;
    match &rope.scaling {
        RopeScaling::None => Ok(()),
        RopeScaling::Linear { factor } => positive("the rotary embedding's factor", *factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            positive("the rotary embedding's factor", *factor)?;
            positive("low_freq_factor", *low_freq_factor)?;
            positive("high_freq_factor", *high_freq_factor)?;
            // The ramp between low and high frequencies divides by this difference.
            positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)?;
            positive("the original context length", *original_context)
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate: _ } => {
            positive("the rotary embedding's factor", *factor)?;
            positive("beta_fast", *beta_fast)?;
            positive("beta_slow", *beta_slow)?;
            positive("the original context length", *original_context)?;
            // The ramp divides by the logarithm of the base.
            positive("the rotary embedding's base - 1", rope.theta - 1.0)
        }
        RopeScaling::Factors(factors) => {
            let expected = rotary_dim / 2;
            if factors.len() != expected {
                return Err(ModelConfigError::Factors { expected, found: factors.len() });
            }
            factors.iter().try_for_each(|&factor| positive("a frequency factor", factor))
        }
    }
}

fn positive(what: &'static str, found: f32) -> Result<(), ModelConfigError> {
    if found.is_finite() && found > 0.0 { Ok(()) } else { Err(ModelConfigError::Number { what, found }) }
}

/// Returns `[out, in]` of a linear layer. The configuration must have passed [`check_config`].
#[must_use]
pub fn linear_shape(config: &ModelConfig, target: Target) -> [usize; 2] {
    let hidden = config.hidden_size;
    let queries = config.heads * config.head_dim;
    let keys = config.kv_heads * config.head_dim;
    match target {
        Target::Q => [queries, hidden],
        Target::K | Target::V => [keys, hidden],
        Target::O => [hidden, queries],
        Target::Gate | Target::Up => [config.intermediate_size, hidden],
        Target::Down => [hidden, config.intermediate_size],
        Target::LmHead => [config.vocab_size, hidden],
        Target::Expert(_, target) => {
            let width = config.experts.as_ref().map_or(0, |experts| experts.width);
            match target {
                ExpertTarget::GateUp => [2 * width, hidden],
                ExpertTarget::Gate | ExpertTarget::Up => [width, hidden],
                ExpertTarget::Down => [hidden, width],
            }
        }
    }
}

/// Returns `[rows, cols]` of a tensor, one row for a vector; `config` must have passed [`check_config`].
#[must_use]
pub fn tensor_shape(config: &ModelConfig, id: TensorId) -> [usize; 2] {
    match id {
        TensorId::TokenEmbedding => [config.vocab_size, config.hidden_size],
        TensorId::OutputNorm
        | TensorId::AttentionNorm(_)
        | TensorId::FeedForwardNorm(_)
        | TensorId::AttentionUpdateNorm(_)
        | TensorId::FeedForwardUpdateNorm(_) => [1, config.hidden_size],
        TensorId::QueryNorm(_) if config.traits.wide_query_norms => [1, config.heads * config.head_dim],
        TensorId::KeyNorm(_) if config.traits.wide_query_norms => [1, config.kv_heads * config.head_dim],
        TensorId::QueryNorm(_) | TensorId::KeyNorm(_) => [1, config.head_dim],
        TensorId::Weight(_, target) => linear_shape(config, target),
        TensorId::Bias(_, target) => [1, linear_shape(config, target)[0]],
        TensorId::Sinks(_) => [1, config.heads],
        TensorId::Router(_) => [expert_count(config), config.hidden_size],
        TensorId::RouterBias(_) => [1, expert_count(config)],
        TensorId::Expert(_, _, part) => expert_shape(config, part),
        TensorId::ExpertBias(_, _, part) => [1, expert_shape(config, part)[0]],
    }
}

fn expert_count(config: &ModelConfig) -> usize {
    config.experts.as_ref().map_or(0, |experts| experts.count)
}

fn expert_shape(config: &ModelConfig, part: ExpertPart) -> [usize; 2] {
    let (hidden, width) = (config.hidden_size, config.experts.as_ref().map_or(0, |experts| experts.width));
    match part {
        ExpertPart::Gate | ExpertPart::Up => [width, hidden],
        ExpertPart::Down => [hidden, width],
    }
}

/// Returns the tensors that a model must have. `biased` names the linear layers of a block with a bias.
pub fn required_tensors<'a>(
    config: &'a ModelConfig,
    biased: &'a [Target],
) -> impl Iterator<Item = TensorId> + 'a {
    let head = (!config.tied_head).then_some(TensorId::Weight(0, Target::LmHead));
    let blocks = (0..config.layers).flat_map(move |layer| block_tensors(config, layer, biased));
    [TensorId::TokenEmbedding, TensorId::OutputNorm].into_iter().chain(head).chain(blocks)
}

pub(crate) fn norm_tensors(config: &ModelConfig, layer: usize) -> impl Iterator<Item = TensorId> + use<> {
    let of_inputs = [TensorId::AttentionNorm(layer), TensorId::FeedForwardNorm(layer)];
    let of_heads = [TensorId::QueryNorm(layer), TensorId::KeyNorm(layer)];
    let of_updates = [TensorId::AttentionUpdateNorm(layer), TensorId::FeedForwardUpdateNorm(layer)];
    let there = [config.norms_inputs(), config.qk_norm, config.norms_updates()];
    let all = [of_inputs, of_heads, of_updates].into_iter().zip(there);
    all.filter(|(_, there)| *there).flat_map(|(norms, _)| norms)
}

fn block_tensors<'a>(
    config: &'a ModelConfig,
    layer: usize,
    biased: &'a [Target],
) -> impl Iterator<Item = TensorId> + 'a {
    let has = move |target: &&Target| layer_targets(config, layer).contains(target);
    let biases = biased.iter().filter(has).map(move |&target| TensorId::Bias(layer, target));
    norm_tensors(config, layer)
        .chain(sinks(config, layer))
        .chain(router(config, layer))
        .chain(router_bias(config, layer))
        .chain(block_weights(config, layer))
        .chain(expert_biases(config, layer))
        .chain(biases)
}

pub(crate) fn sinks(config: &ModelConfig, layer: usize) -> Option<TensorId> {
    config.traits.sinks.then_some(TensorId::Sinks(layer))
}

pub(crate) fn router_bias(config: &ModelConfig, layer: usize) -> Option<TensorId> {
    router(config, layer).filter(|_| config.traits.expert_biases).map(|_| TensorId::RouterBias(layer))
}

fn expert_biases(config: &ModelConfig, layer: usize) -> impl Iterator<Item = TensorId> + use<> {
    let experts = config.experts_of(layer).filter(|_| config.traits.expert_biases).map(Experts::ids);
    let of_expert = move |id| ExpertPart::ALL.map(|part| TensorId::ExpertBias(layer, id, part));
    experts.into_iter().flatten().flat_map(of_expert)
}

pub(crate) fn router(config: &ModelConfig, layer: usize) -> Option<TensorId> {
    config.experts_of(layer).map(|_| TensorId::Router(layer))
}

/// Checks that every tensor of `required` exists with the right shape.
///
/// `required` has names as in the file with the expected `[rows, cols]`; `found` returns those in the file.
///
/// # Errors
/// The first tensor that is missing or has another shape.
pub fn check_tensors(
    required: impl Iterator<Item = (String, [usize; 2])>,
    found: impl Fn(&str) -> Option<[usize; 2]>,
) -> Result<(), LayoutError> {
    for (tensor, expected) in required {
        match found(&tensor) {
            Some(found) if found == expected => {}
            Some(found) => {
                return Err(LayoutError::Shape { tensor, expected, found });
            }
            None => return Err(LayoutError::Missing { tensor }),
        }
    }
    Ok(())
}

/// Returns the linear layers of a block that every model names alike: all, or with experts only attention's.
#[must_use]
pub fn layer_targets(config: &ModelConfig, layer: usize) -> &'static [Target] {
    const OF_ATTENTION: usize = 4;
    if config.experts_of(layer).is_some() { &BLOCK_TARGETS[..OF_ATTENTION] } else { &BLOCK_TARGETS }
}

/// Returns the linear groups of a block, in the order of a forward pass, expert by expert.
pub fn block_groups(config: &ModelConfig, layer: usize) -> impl Iterator<Item = LinearGroup> + use<> {
    let experts = config.experts_of(layer).map(Experts::ids);
    let plain: &[LinearGroup] =
        if experts.is_none() { &[LinearGroup::GateUp, LinearGroup::Down] } else { &[] };
    let of_expert = |id| [LinearGroup::ExpertGateUp(id), LinearGroup::ExpertDown(id)];
    let experts = experts.into_iter().flatten().flat_map(of_expert);
    [LinearGroup::Qkv, LinearGroup::O].into_iter().chain(plain.iter().copied()).chain(experts)
}

/// Returns the weights of a group, in the order of its outputs.
#[must_use]
pub fn group_weights(layer: usize, group: LinearGroup) -> Vec<TensorId> {
    let of_expert =
        |id, parts: &[ExpertPart]| parts.iter().map(|&part| TensorId::Expert(layer, id, part)).collect();
    match group {
        LinearGroup::ExpertGateUp(id) => of_expert(id, &[ExpertPart::Gate, ExpertPart::Up]),
        LinearGroup::ExpertDown(id) => of_expert(id, &[ExpertPart::Down]),
        _ => targets_of(group).iter().map(|&target| TensorId::Weight(layer, target)).collect(),
    }
}

/// Returns the weights of a block's linear layers, group by group.
pub fn block_weights(config: &ModelConfig, layer: usize) -> impl Iterator<Item = TensorId> + use<> {
    block_groups(config, layer).flat_map(move |group| group_weights(layer, group))
}

/// Returns the linear groups of a model, in the order of a forward pass.
pub fn model_groups(config: &ModelConfig) -> impl Iterator<Item = (usize, LinearGroup)> {
    let block = |layer| block_groups(config, layer).map(move |group| (layer, group));
    (0..config.layers).flat_map(block).chain([(0, LinearGroup::Head)])
}

/// Returns the linear layers of an expert's group that an adapter may change, each with the first column of
/// its outputs. The layers of one set have no outputs in common. The result is empty for other groups.
#[must_use]
pub fn expert_targets(config: &ModelConfig, group: LinearGroup) -> Vec<Vec<(Target, usize)>> {
    let width = config.experts.as_ref().map_or(0, |experts| experts.width);
    let of = |id, targets: &[(ExpertTarget, usize)]| {
        targets.iter().map(|&(target, column)| (Target::Expert(id, target), column)).collect()
    };
    match group {
        LinearGroup::ExpertGateUp(id) => {
            let apart = [(ExpertTarget::Gate, 0), (ExpertTarget::Up, width)];
            vec![of(id, &[(ExpertTarget::GateUp, 0)]), of(id, &apart)]
        }
        LinearGroup::ExpertDown(id) => vec![of(id, &[(ExpertTarget::Down, 0)])],
        _ => Vec::new(),
    }
}

/// Returns the adaptable linear layers of a group; [`expert_targets`] has those of experts.
fn targets_of(group: LinearGroup) -> &'static [Target] {
    match group {
        LinearGroup::Qkv => &[Target::Q, Target::K, Target::V],
        LinearGroup::O => &[Target::O],
        LinearGroup::GateUp => &[Target::Gate, Target::Up],
        LinearGroup::Down => &[Target::Down],
        LinearGroup::ExpertGateUp(_) | LinearGroup::ExpertDown(_) => &[],
        LinearGroup::Head => &[Target::LmHead],
    }
}

/// Returns the targets of a group, each with the first column of its outputs.
#[must_use]
pub fn group_targets(config: &ModelConfig, group: LinearGroup) -> Vec<(Target, usize)> {
    let mut column = 0;
    let place = |&target| {
        let at = column;
        column += linear_shape(config, target)[0];
        (target, at)
    };
    targets_of(group).iter().map(place).collect()
}
