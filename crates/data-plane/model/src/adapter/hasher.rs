//! Computes an adapter version ([`AdapterVersion`]) from the adapter's contents.

use kernels::TensorType;
use types::AdapterVersion;

use super::method::ScaledSide;
use crate::shape::{experts::ExpertTarget, source::Target};

/// Domains of the hash; a new encoding needs a new name.
const LORA: &str = "holobiont 2025 adapter generation v1";
const IA3: &str = "holobiont 2026 ia3 adapter generation v1";
const PREFIX: &str = "holobiont 2026 prefix adapter generation v1";
const PROMPT: &str = "holobiont 2026 prompt adapter generation v1";
const BIASED: &str = "holobiont 2026 biased adapter generation v1";
const DORA: &str = "holobiont 2026 dora adapter generation v1";
const ACTIVATED: &str = "holobiont 2026 activated adapter generation v1";
const DRAFT: &str = "holobiont 2026 draft adapter generation v1";
const EMBEDDING: &str = "holobiont 2026 embedding adapter generation v1";
const SAVED: &str = "holobiont 2026 saved modules adapter generation v1";
const CLASSIFICATION: &str = "holobiont 2026 classification adapter generation v1";

/// Hashes an adapter's effective contents, independent of their form in files. Two directories with the same
/// modules have the same version, for any names, patterns and tensor order.
///
/// Every hashed value has a fixed width or follows its length, so no two adapters share an encoding:
///
/// ```text
/// LoRA   = modules u64 | modules x { layer u64 | target | rank u64 | scale f32 bits u32 | A | B }
/// IA3    = vectors u64 | vectors x { layer u64 | target | side u8 | vector }
/// target = code u8, and of an expert's layer also the expert's number u16
/// prefix = virtual tokens u64 | keys and values
/// prompt = virtual tokens u64 | scaled u8 | embeddings
/// biased = biases u64 | biases x { layer u64 | target u8 | offset } | modules u64 | modules as of LoRA
/// DoRA   = modules u64 | modules x magnitude | modules as of LoRA
/// aLoRA  = modules u64 | tokens u64 | tokens x id u32 | modules as of LoRA
/// draft  = modules u64 | layers u64 | shortlisted u64, 0: all | shortlisted x id u32 | modules as of LoRA
/// embedding = modules u64 | rank u64 | scale f32 bits u32 | A | B | modules as of LoRA
/// saved  = modules u64 | change of the embedding | change of the head | modules as of LoRA
/// classes = modules u64 | labels u64 | labels x { bytes u64 | name } | weight | bias | modules as of LoRA
/// bias   = 0 u8, or 2 u8 | vector
/// change = 0 u8, or 1 u8 | rank u64 | scale f32 bits u32 | A | B, or 2 u8 | matrix,
///          or 3 u8 | tokens u64 | tokens x id u32 | rows
/// weight = matrix
/// A, B, matrix, rows, vector, offset, magnitude, embeddings, keys and values
///        = type u8 | bytes u64 | stored bytes, half-rotation rows
/// ```
///
/// Each method has its own domain.
pub(super) struct VersionHasher(blake3::Hasher);

impl VersionHasher {
    /// Begins a LoRA of `modules` modules, which must follow sorted by layer and target.
    pub(super) fn lora(modules: usize) -> Self {
        Self::of(LORA, modules)
    }

    /// Begins a DoRA of `modules` modules: magnitudes must follow, then modules, sorted by layer and target.
    pub(super) fn dora(modules: usize) -> Self {
        Self::of(DORA, modules)
    }

    /// Begins an IA3 adapter of `vectors` vectors, which must follow sorted by layer and target.
    pub(super) fn ia3(vectors: usize) -> Self {
        Self::of(IA3, vectors)
    }

    /// Begins a prefix of `virtual_tokens` tokens; its keys and values must follow.
    pub(super) fn prefix(virtual_tokens: usize) -> Self {
        Self::of(PREFIX, virtual_tokens)
    }

    /// Begins prompt embeddings of `virtual_tokens` tokens; the embeddings must follow.
    pub(super) fn prompt(virtual_tokens: usize, is_scaled: bool) -> Self {
        let mut hasher = Self::of(PROMPT, virtual_tokens);
        hasher.0.update(&[is_scaled.into()]);
        hasher
    }

    /// Begins an adapter with `biases`, which must be sorted by layer and target; the modules must follow.
    pub(super) fn biased<'b>(
        biases: impl ExactSizeIterator<Item = (usize, Target, &'b [f32])>,
        modules: usize,
    ) -> Self {
        let mut hasher = Self::of(BIASED, biases.len());
        for (layer, target, offset) in biases {
            hasher.count(layer);
            hasher.0.update(&[target_code(target)]);
            let bytes: Vec<u8> = offset.iter().flat_map(|value| value.to_le_bytes()).collect();
            hasher.matrix(TensorType::F32, &bytes);
        }
        hasher.count(modules);
        hasher
    }

    /// Begins a draft adapter of `modules` modules, which must follow sorted by layer and target.
    pub(super) fn draft(modules: usize, layers: usize, shortlist: Option<&[u32]>) -> Self {
        let mut hasher = Self::of(DRAFT, modules);
        hasher.count(layers);
        hasher.ids(shortlist.unwrap_or_default());
        hasher
    }

    /// Begins an activated LoRA of `modules` modules, which must follow sorted by layer and target.
    pub(super) fn activated(modules: usize, invocation: &[u32]) -> Self {
        let mut hasher = Self::of(ACTIVATED, modules);
        hasher.ids(invocation);
        hasher
    }

    /// Begins a LoRA with embedding factors: factors, A and B must follow, then the sorted modules.
    pub(super) fn embedding(modules: usize) -> Self {
        Self::of(EMBEDDING, modules)
    }

    /// Begins a LoRA with saved modules: changes of embedding and head must follow, then the sorted modules.
    pub(super) fn saved(modules: usize) -> Self {
        Self::of(SAVED, modules)
    }

    /// Begins a LoRA with a classification head: weight and bias must follow, then the sorted modules.
    pub(super) fn classification(modules: usize, labels: &[String]) -> Self {
        let mut hasher = Self::of(CLASSIFICATION, modules);
        hasher.count(labels.len());
        for label in labels {
            hasher.count(label.len());
            hasher.0.update(label.as_bytes());
        }
        hasher
    }

    /// Adds an unchanged embedding or head, or an absent bias.
    pub(super) fn nothing(&mut self) {
        self.0.update(&[0]);
    }

    /// Adds a low-rank change; its factors, A and B must follow.
    pub(super) fn adapted(&mut self) {
        self.0.update(&[1]);
    }

    /// Adds a replacement matrix as stored.
    pub(super) fn replaced(&mut self, kind: TensorType, bytes: &[u8]) {
        self.0.update(&[2]);
        self.matrix(kind, bytes);
    }

    /// Adds rows of some tokens, as stored; `tokens` are in the order of the rows.
    pub(super) fn rows(&mut self, tokens: &[u32], kind: TensorType, bytes: &[u8]) {
        self.0.update(&[3]);
        self.ids(tokens);
        self.matrix(kind, bytes);
    }

    fn ids(&mut self, ids: &[u32]) {
        self.count(ids.len());
        for id in ids {
            self.0.update(&id.to_le_bytes());
        }
    }

    fn of(context: &str, count: usize) -> Self {
        let mut hasher = Self(blake3::Hasher::new_derive_key(context));
        hasher.count(count);
        hasher
    }

    /// Begins a module; its A and B must follow.
    pub(super) fn module(&mut self, layer: usize, target: Target, rank: usize, scale: f32) {
        self.count(layer);
        self.target(target);
        self.factors(rank, scale);
    }

    pub(super) fn factors(&mut self, rank: usize, scale: f32) {
        self.count(rank);
        self.0.update(&scale.to_bits().to_le_bytes());
    }

    /// Begins a vector; its values must follow.
    pub(super) fn vector(&mut self, layer: usize, target: Target, side: ScaledSide) {
        self.count(layer);
        let side_code = match side {
            ScaledSide::Input => 0,
            ScaledSide::Output => 1,
        };
        self.target(target);
        self.0.update(&[side_code]);
    }

    fn target(&mut self, target: Target) {
        self.0.update(&[target_code(target)]);
        if let Target::Expert(expert, _) = target {
            self.0.update(&expert.0.to_le_bytes());
        }
    }

    pub(super) fn matrix(&mut self, kind: TensorType, bytes: &[u8]) {
        self.0.update(&[type_code(kind)]);
        self.count(bytes.len());
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> AdapterVersion {
        AdapterVersion(*self.0.finalize().as_bytes())
    }

    fn count(&mut self, count: usize) {
        self.0.update(&(count as u64).to_le_bytes());
    }
}

/// Codes of the encoding; never renumber them.
fn target_code(target: Target) -> u8 {
    match target {
        Target::Q => 0,
        Target::K => 1,
        Target::V => 2,
        Target::O => 3,
        Target::Gate => 4,
        Target::Up => 5,
        Target::Down => 6,
        Target::LmHead => 7,
        Target::Expert(_, ExpertTarget::GateUp) => 8,
        Target::Expert(_, ExpertTarget::Gate) => 9,
        Target::Expert(_, ExpertTarget::Up) => 10,
        Target::Expert(_, ExpertTarget::Down) => 11,
    }
}

/// Codes of the encoding; never renumber them. Adapters are stored in one of three types.
fn type_code(kind: TensorType) -> u8 {
    match kind {
        TensorType::F32 => 0,
        TensorType::F16 => 1,
        TensorType::Bf16 => 2,
        _ => unreachable!("adapters of other types are refused before they are hashed"),
    }
}
