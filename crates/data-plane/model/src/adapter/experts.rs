//! Low-rank factors of experts, in the three forms that trainers write.
//!
//! - PEFT's `target_parameters`: `mlp.experts.lora_A` is `[experts * rank, in]`, with the ranks of an expert
//!   side by side; `lora_B` is `[out, rank * experts]`, with the experts of a rank side by side. Of two
//!   parameters, gate and up are at `mlp.experts.base_layer`.
//! - Tinker's `mlp.experts.w1` (gate), `w3` (up) and `w2` (down): `lora_A` is `[experts, rank, in]` and
//!   `lora_B` is `[experts, out, rank]`, with 1 instead of `experts` for a factor that all experts share.
//! - Modules of transformers 4: `mlp.experts.N.gate_proj`, `up_proj` and `down_proj`, and for Mixtral
//!   `block_sparse_moe.experts.N.w1`, `w3` and `w2`, each like any linear layer.
//!
//! PEFT's gate and up have one A, so they are one [`ExpertTarget`]; the other forms have separate factors. In
//! gpt-oss, outputs of gate and up alternate, and so do the rows of their B.

use std::{borrow::Cow, iter};

use super::{
    error::AdapterError,
    expert_names::{PARAMETERS, STACKS, sparse_layers, target_of},
    limits::MAX_EXPANDED_BYTES,
    lora::LoraConfig,
    matrix::{StoredFactors, StoredMatrix, StoredModule},
    weight_file::{TensorEntry, WeightFile},
};
use crate::{
    shape::{
        config::ModelConfig,
        experts::{ExpertId, ExpertPart, ExpertTarget, Experts, MAX_EXPERTS},
        layout::linear_shape,
        source::{Target, TensorId},
    },
    sources::hf_names::{experts_name, interleaves_experts, linear_name},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertForm {
    Parameters,
    Stacks,
    Modules,
}

impl ExpertForm {
    /// Returns the form of the experts in a file, or `None` if the file adapts no experts.
    fn of(config: &LoraConfig, weights: &WeightFile<'_>) -> Option<Self> {
        if config.parameters().are_any() {
            return Some(Self::Parameters);
        }
        weights.names().find_map(|name| {
            let (_, inside) = name.split_once(".experts.")?;
            let (part, _) = inside.split_once('.')?;
            let is_stack = STACKS.iter().any(|(stack, _)| *stack == part);
            let is_number = part.bytes().all(|byte| byte.is_ascii_digit());
            is_stack.then_some(Self::Stacks).or(is_number.then_some(Self::Modules))
        })
    }
}

/// Takes the factors of all experts that the adapter changes.
///
/// # Errors
/// A selected factor is missing or has another shape, or a parameter belongs to no expert of the base.
pub(super) fn read<'a>(
    config: &LoraConfig,
    weights: &mut WeightFile<'a>,
    model: &ModelConfig,
) -> Result<Vec<StoredModule<'a>>, AdapterError> {
    config.parameters().check(config.path(), |name| config.written(name), model)?;
    let Some(form) = ExpertForm::of(config, weights) else { return Ok(Vec::new()) };
    let (mut modules, mut expanded) = (Vec::new(), 0);
    let is_drafted = |layer: &usize| config.draft_layers().is_none_or(|layers| *layer < layers);
    for layer in sparse_layers(model).filter(is_drafted) {
        let (name, shape) = (experts_name(layer), |target| StackShape::of(model, target));
        let stacks = match form {
            ExpertForm::Parameters => {
                let stacks = parameters(config, weights, &name, shape)?;
                let are_interleaved = interleaves_experts(model);
                stacks.into_iter().map(|stack| stack.with_gate_before_up(are_interleaved)).collect()
            }
            ExpertForm::Stacks => stacks(config, weights, &name, shape)?,
            ExpertForm::Modules => {
                modules.extend(separate(config, weights, model, layer)?);
                continue;
            }
        };
        expanded += stacks.iter().map(StackedFactors::expanded_bytes).sum::<u64>();
        if expanded > MAX_EXPANDED_BYTES {
            let path = weights.path().to_path_buf();
            return Err(AdapterError::TooLarge { path, limit: MAX_EXPANDED_BYTES });
        }
        modules.extend(stacks.into_iter().flat_map(|stack| stack.modules(layer)));
    }
    Ok(modules)
}

/// Takes the factors that a file has for all experts of a block together, by the name of each expert's layer.
///
/// # Errors
/// The errors of [`read`]; the shapes of the file itself decide how many experts there are.
pub(super) fn read_by_name<'a>(
    config: &LoraConfig,
    weights: &mut WeightFile<'a>,
) -> Result<Vec<(String, StoredFactors<'a>)>, AdapterError> {
    let mut found = Vec::new();
    for name in weights.adapted() {
        if !weights.has(&format!("{name}.lora_A.weight")) {
            continue;
        }
        let (holder, stacks) = match name.rsplit_once(".experts") {
            Some((_, "")) if config.parameters().are_any() => {
                (name.as_str(), parameters(config, weights, &name, |_| None)?)
            }
            Some((before, stack))
                if STACKS.iter().any(|(known, _)| stack.strip_prefix('.') == Some(*known)) =>
            {
                let holder = &name[..before.len() + ".experts".len()];
                (holder, stacks(config, weights, holder, |_| None)?)
            }
            _ => continue,
        };
        for stack in stacks {
            let named = |expert| (format!("{holder}.{expert}.{}", stack.name), stack.factors(expert));
            found.extend((0..stack.shape.experts).map(named));
        }
    }
    Ok(found)
}

/// Takes the factors of the selected parameters of the experts `name`.
fn parameters<'a>(
    config: &LoraConfig,
    weights: &mut WeightFile<'a>,
    name: &str,
    shape: impl Fn(ExpertTarget) -> Option<StackShape>,
) -> Result<Vec<StackedFactors<'a>>, AdapterError> {
    let is_selected = |(parameter, _): &(&str, ExpertTarget)| {
        config.parameters().select(&config.written(&format!("{name}.{parameter}")))
    };
    let selected: Vec<_> = PARAMETERS.into_iter().filter(is_selected).collect();
    let mut found = Vec::new();
    for (place, &(parameter, target)) in selected.iter().enumerate() {
        // PEFT wraps the first parameter first, so a wrapper of the second holds the first's.
        let holder = [name].into_iter().chain(iter::repeat_n("base_layer", selected.len() - 1 - place));
        let holder = holder.collect::<Vec<_>>().join(".");
        let [a, b] = ["A", "B"].map(|part| weights.required(&format!("{holder}.lora_{part}.weight")));
        let (a, b) = (a?, b?);
        let (rank, scale) = config.rank_and_scale(&config.written(&format!("{name}.{parameter}")))?;
        let in_file = || StackShape::bounded(size(&a, 0) / rank, size(&b, 0), size(&a, 1));
        let shape = shape(target).unwrap_or_else(in_file);
        let a = weights.matrix(a, [shape.experts * rank, shape.inputs])?;
        let b = weights.matrix(b, [shape.outputs, rank * shape.experts])?;
        let (a, b) =
            (Stack { of: a, order: StackOrder::Experts }, Stack { of: b, order: StackOrder::Columns });
        found.push(StackedFactors { name: parameter, target, rank, scale, shape, a, b });
    }
    Ok(found)
}

/// Takes Tinker's factors of the experts `name`.
fn stacks<'a>(
    config: &LoraConfig,
    weights: &mut WeightFile<'a>,
    name: &str,
    shape: impl Fn(ExpertTarget) -> Option<StackShape>,
) -> Result<Vec<StackedFactors<'a>>, AdapterError> {
    let mut found = Vec::new();
    for (stack, target) in STACKS {
        let module = format!("{name}.{stack}");
        let names = ["A", "B"].map(|part| format!("{module}.lora_{part}.weight"));
        let Some([a, b]) = weights.take_all(&module, names, config.selects(&module)?)? else { continue };
        let (rank, scale) = config.rank_and_scale(&config.written(&module))?;
        let in_file = || StackShape::bounded(size(&a, 0).max(size(&b, 0)), size(&b, 1), size(&a, 2));
        let shape = shape(target).unwrap_or_else(in_file);
        let order = |entry| if size(entry, 0) == 1 { StackOrder::Shared } else { StackOrder::Experts };
        let (of_a, of_b) = (order(&a), order(&b));
        let a = weights.matrix(a, [of_a.depth(shape.experts), rank, shape.inputs])?;
        let b = weights.matrix(b, [of_b.depth(shape.experts), shape.outputs, rank])?;
        let (a, b) = (Stack { of: a, order: of_a }, Stack { of: b, order: of_b });
        found.push(StackedFactors { name: stack, target, rank, scale, shape, a, b });
    }
    Ok(found)
}

/// Takes the factors of a block's experts that have linear layers of their own.
fn separate<'a>(
    config: &LoraConfig,
    weights: &mut WeightFile<'a>,
    model: &ModelConfig,
    layer: usize,
) -> Result<Vec<StoredModule<'a>>, AdapterError> {
    let experts = model.experts_of(layer).into_iter().flat_map(Experts::ids);
    let parts = experts.flat_map(|expert| ExpertPart::ALL.map(|part| (expert, part)));
    let mut module = |(expert, part)| {
        let name = linear_name(model, TensorId::Expert(layer, expert, part));
        let place = (layer, Target::Expert(expert, target_of(part)));
        let trained = (config.written(&name), config.selects(&name)?);
        config.factors_of(weights, model, place, &name, trained)
    };
    parts.filter_map(|part| module(part).transpose()).collect()
}

fn size((_, stored): &TensorEntry, dimension: usize) -> usize {
    stored.shape.get(dimension).copied().unwrap_or_default()
}

#[derive(Debug, Clone, Copy)]
struct StackShape {
    experts: usize,
    outputs: usize,
    inputs: usize,
}

impl StackShape {
    fn of(model: &ModelConfig, target: ExpertTarget) -> Option<Self> {
        let [outputs, inputs] = linear_shape(model, Target::Expert(ExpertId(0), target));
        Some(Self { experts: model.experts.as_ref()?.count, outputs, inputs })
    }

    /// Returns the shape in a file; a tensor of more experts than any model has does not fit the result.
    fn bounded(experts: usize, outputs: usize, inputs: usize) -> Self {
        Self { experts: experts.min(MAX_EXPERTS), outputs, inputs }
    }
}

/// Order of the experts' elements in a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StackOrder {
    /// One matrix for all experts.
    Shared,
    /// A matrix for each expert, one after the other.
    Experts,
    /// The experts' columns of each rank, one after the other.
    Columns,
}

impl StackOrder {
    fn depth(self, experts: usize) -> usize {
        if self == Self::Shared { 1 } else { experts }
    }
}

/// One factor of all experts.
struct Stack<'a> {
    of: StoredMatrix<'a>,
    order: StackOrder,
}

impl<'a> Stack<'a> {
    /// Returns the factor of one of `experts`.
    fn of_expert(&self, expert: usize, experts: usize) -> StoredMatrix<'a> {
        let StoredMatrix { name, kind, bytes } = &self.of;
        let element = kind.row_bytes(1).unwrap_or(1);
        let size = bytes.len() / experts;
        let bytes = match self.order {
            StackOrder::Shared => bytes.clone(),
            StackOrder::Experts => cut(bytes, expert * size, size),
            StackOrder::Columns => {
                bytes.chunks_exact(element).skip(expert).step_by(experts).flatten().copied().collect()
            }
        };
        StoredMatrix { name: name.clone(), kind: *kind, bytes }
    }

    fn expanded_bytes(&self, experts: usize) -> u64 {
        if self.order == StackOrder::Shared { self.of.bytes.len() as u64 * experts as u64 } else { 0 }
    }
}

fn cut<'a>(bytes: &Cow<'a, [u8]>, first: usize, size: usize) -> Cow<'a, [u8]> {
    match bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[first..first + size]),
        Cow::Owned(bytes) => Cow::Owned(bytes[first..first + size].to_vec()),
    }
}

/// Factors of one linear layer of all experts of a block.
struct StackedFactors<'a> {
    /// Name of the layer in the file.
    name: &'static str,
    target: ExpertTarget,
    rank: usize,
    scale: f32,
    shape: StackShape,
    a: Stack<'a>,
    b: Stack<'a>,
}

impl<'a> StackedFactors<'a> {
    /// Returns the bytes of shared factors, once for each expert.
    fn expanded_bytes(&self) -> u64 {
        [&self.a, &self.b].into_iter().map(|stack| stack.expanded_bytes(self.shape.experts)).sum()
    }

    /// Returns the factors with the outputs of gate before those of up, if files of the model alternate them.
    fn with_gate_before_up(mut self, are_interleaved: bool) -> Self {
        if are_interleaved && self.target == ExpertTarget::GateUp {
            self.b.of = self.b.of.even_rows_first(self.shape.outputs);
        }
        self
    }

    fn factors(&self, expert: usize) -> StoredFactors<'a> {
        let &Self { rank, scale, shape: StackShape { experts, outputs, inputs }, ref a, ref b, .. } = self;
        let [a, b] = [a, b].map(|stack| stack.of_expert(expert, experts));
        StoredFactors { rank, scale, inputs, outputs, a, b, magnitude: None }
    }

    fn modules(self, layer: usize) -> impl Iterator<Item = StoredModule<'a>> {
        // The number of experts is at most `MAX_EXPERTS`.
        (0..self.shape.experts as u16).map(move |expert| {
            let StoredFactors { rank, scale, a, b, .. } = self.factors(usize::from(expert));
            let target = Target::Expert(ExpertId(expert), self.target);
            StoredModule { layer, target, rank, scale, a, b }
        })
    }
}
