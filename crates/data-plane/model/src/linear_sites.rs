//! Single linear groups of a base, for split clients that run the rest of the pass.
//!
//! A *site* is a linear group with a number: `[q | k | v]` of layer 0 is site 0, `o` site 1, `[gate | up]`
//! site 2, `down` site 3, and so on; the head is the last. In a block with experts, the two groups of each
//! expert follow `o`. In a base of unknown architecture, every linear layer is a site.
//! A call takes rows through a site, forward or backward, and leaves no state.

use std::error::Error;

use kernels::{Activations, Modulus, Rounding};
use shmproto::layer::control::{ModularWeights, Site as CatalogSite, SiteLayer, SitePaths};
pub use shmproto::layer::{SiteOp, SitePath};

use crate::{
    shape::{config::ModelConfig, experts::ExpertId, layout::LinearGroup},
    weight_stream_stats::PendingWeights,
};

/// Number of a site, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteId(pub u32);

impl SiteId {
    /// Returns the site of a linear group; the head ignores `layer`.
    #[must_use]
    pub fn of(config: &ModelConfig, layer: usize, group: LinearGroup) -> Self {
        let within = match group {
            LinearGroup::Qkv => 0,
            LinearGroup::O => 1,
            LinearGroup::GateUp => OF_ATTENTION,
            LinearGroup::Down => OF_ATTENTION + 1,
            LinearGroup::ExpertGateUp(id) => OF_ATTENTION + 2 * usize::from(id.0),
            LinearGroup::ExpertDown(id) => OF_ATTENTION + 2 * usize::from(id.0) + 1,
            LinearGroup::Head => return Self(first_site(config, config.layers)),
        };
        // The limit on experts keeps the number within 32 bits.
        Self(first_site(config, layer) + within as u32)
    }

    /// Returns the layer and linear group of this site, or `None` beyond the last site.
    #[must_use]
    pub fn group(self, config: &ModelConfig) -> Option<(usize, LinearGroup)> {
        let (mut layer, mut behind) = (0, config.layers + 1);
        // Binary search for the last layer whose first site is not above this site.
        while behind - layer > 1 {
            let middle = layer.midpoint(behind);
            let is_behind = first_site(config, middle) > self.0;
            *(if is_behind { &mut behind } else { &mut layer }) = middle;
        }
        let within = (self.0 - first_site(config, layer)) as usize;
        if layer == config.layers {
            return (within == 0).then_some((0, LinearGroup::Head));
        }
        let is_plain = config.experts_of(layer).is_none();
        let of_expert = |at: usize| ExpertId((at / 2) as u16);
        let group = match within {
            0 => LinearGroup::Qkv,
            1 => LinearGroup::O,
            OF_ATTENTION if is_plain => LinearGroup::GateUp,
            _ if is_plain => LinearGroup::Down,
            at if at % 2 == 0 => LinearGroup::ExpertGateUp(of_expert(at - OF_ATTENTION)),
            at => LinearGroup::ExpertDown(of_expert(at - OF_ATTENTION)),
        };
        Some((layer, group))
    }
}

/// Number of sites of a block's attention, and of a plain feed-forward.
const OF_ATTENTION: usize = 2;
const OF_FEED_FORWARD: usize = 2;

/// Returns the first site of block `layer`; one past the last block gives the head's site.
fn first_site(config: &ModelConfig, layer: usize) -> u32 {
    let (sparse, experts) =
        config.experts.as_ref().map_or((0, 0), |experts| (experts.layers_below(layer), experts.count));
    let first = OF_ATTENTION * layer + OF_FEED_FORWARD * (layer - sparse) + 2 * experts * sparse;
    u32::try_from(first).expect("layers and experts are within their limits")
}

/// The request of a call without its rows; equal requests are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteCall {
    /// The site that the rows go through.
    pub site: SiteId,
    /// Index of one of the site's linear layers, or `None` for all, side by side.
    pub part: Option<u8>,
    /// Forward with or without bias, or backward.
    pub op: SiteOp,
    /// The arithmetic of the call.
    pub path: SitePath,
}

/// One linear layer of a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePart {
    /// Module name as in the model's files, or in the Hugging Face layout for files with other names
    /// (`model.layers.0.self_attn.q_proj`).
    pub name: String,
    /// Number of output features.
    pub rows: usize,
    /// Whether the layer adds a bias.
    pub has_bias: bool,
}

/// Integer weights of a site: each weight is an integer times `2^weight_exponent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModularSite {
    /// Common exponent of all parts.
    pub weight_exponent: i32,
    /// Largest sums of absolute integer weights: over one output forward, over one input backward.
    pub l1: [u64; 2],
    /// BLAKE3 of columns, number of parts, rows of each part (u64, little-endian), exponent, and weights by
    /// row (i32). The hash depends on the weights alone, not on their packing.
    pub commitment: [u8; 32],
}

impl ModularSite {
    /// Whether rows of both directions can have enough bits.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.l1.iter().all(|&l1| ModularRange::new(l1, false).is_some())
    }
}

/// Number range of rows on the modular path, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModularRange {
    /// Modulus of the arithmetic.
    pub modulus: Modulus,
    /// Maximum bits of a row value's magnitude; more bits could make a result wrap around.
    pub bits: u32,
}

/// Maximum bits of a row value on the modular path.
const MAX_RING_BITS: u32 = 30;
/// Minimum bits of a row value, by modulus. Weights that leave fewer with both have no modular path.
const MIN_NARROW_BITS: u32 = 18;
const MIN_WIDE_BITS: u32 = 12;
/// Bits of the modulus that a result leaves unused, so that it cannot wrap around.
const SPARE_RING_BITS: u32 = 2;

impl ModularRange {
    /// Returns the range for a site whose largest sum of absolute weights is `l1`, or `None` for too few
    /// bits. `is_even` says whether rows of every part have an even number of values in both directions.
    #[must_use]
    pub fn new(l1: u64, is_even: bool) -> Option<Self> {
        // Bits of the smallest power of two that is at least `l1`.
        let sum_bits = u64::BITS - l1.saturating_sub(1).leading_zeros();
        let range = |modulus: Modulus, least: u32| {
            let bits = (modulus.bits() - SPARE_RING_BITS).checked_sub(sum_bits)?.min(MAX_RING_BITS);
            (bits >= least).then_some(Self { modulus, bits })
        };
        // Rows travel as complete 32-bit words, so 48-bit values must come in pairs.
        let narrow = if is_even { range(Modulus::Bits48, MIN_NARROW_BITS) } else { None };
        narrow.or_else(|| range(Modulus::Bits64, MIN_WIDE_BITS))
    }
}

/// Arithmetic of a site's quantized path on a CPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arithmetic {
    /// Activations are never rounded.
    Unrounded,
    /// Activations are rounded where they meet integer weights, and to bf16 where they meet bf16 weights.
    Quantized(Rounding),
    /// Activations and weights are rounded to bf16, and sums have the order of the matrix unit.
    Bf16,
}

/// Shape and arithmetic of a site.
#[derive(Debug, Clone, PartialEq)]
pub struct Site {
    /// Input features, common to all parts.
    pub columns: usize,
    /// Linear layers of the site, whose outputs lie side by side.
    pub parts: Vec<SitePart>,
    /// Whether the quantized path takes activations unrounded and so equals the float path.
    pub fast_is_linear: bool,
    /// Arithmetic of the quantized path on a CPU.
    pub arithmetic: Arithmetic,
    /// Integer weights, if the site has a modular path and the base was told to commit to its weights.
    pub ring: Option<ModularSite>,
}

impl Site {
    /// Returns the values per input row and output row, or `None` if there is no such part.
    #[must_use]
    pub fn widths(&self, part: Option<u8>, op: SiteOp) -> Option<(usize, usize)> {
        let outputs = match part {
            None => self.parts.iter().map(|part| part.rows).sum(),
            Some(part) => self.parts.get(usize::from(part))?.rows,
        };
        Some(match op {
            SiteOp::Forward | SiteOp::ForwardNoBias => (self.columns, outputs),
            SiteOp::Backward => (outputs, self.columns),
        })
    }

    /// Returns the 32-bit words per input row and output row, or `None` if the part or path does not exist.
    #[must_use]
    pub fn words(&self, call: SiteCall) -> Option<(usize, usize)> {
        let (inputs, outputs) = self.widths(call.part, call.op)?;
        if call.path != SitePath::Ring {
            return Some((inputs, outputs));
        }
        let modulus = self.modular_range(call.op)?.modulus;
        Some((modulus.words(inputs), modulus.words(outputs)))
    }

    /// Returns the number range of rows on the modular path, or `None` without that path.
    #[must_use]
    pub fn modular_range(&self, op: SiteOp) -> Option<ModularRange> {
        let is_even = self.parts.iter().map(|part| part.rows).chain([self.columns]).all(|size| size % 2 == 0);
        ModularRange::new(self.ring?.l1[usize::from(op == SiteOp::Backward)], is_even)
    }

    /// Refuses modular calls to a site without the modular path, and modular calls with a bias.
    pub(crate) fn check_ring(&self, call: SiteCall) -> Result<(), EvaluateError> {
        match call.path {
            SitePath::Fast | SitePath::Linear => Ok(()),
            SitePath::Ring if self.ring.is_none() => Err(EvaluateError::NoRing(call.site)),
            SitePath::Ring if call.op == SiteOp::Forward => Err(EvaluateError::RingBias(call.site)),
            SitePath::Ring => Ok(()),
        }
    }
}

/// Returns the entries of `sites` in the catalog of a layer service.
#[must_use]
pub fn catalog_sites(sites: &[Site]) -> Vec<CatalogSite> {
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let sites = sites.iter().map(|site| CatalogSite {
        columns: word(site.columns),
        paths: SitePaths { fast_is_linear: site.fast_is_linear, has_ring: site.ring.is_some() }.to_bits(),
        ring: site.ring.map(to_wire),
        parts: site
            .parts
            .iter()
            .map(|part| SiteLayer {
                name: part.name.clone(),
                rows: word(part.rows),
                has_bias: part.has_bias.into(),
            })
            .collect(),
    });
    sites.collect()
}

fn to_wire(site: ModularSite) -> ModularWeights {
    let ModularSite { weight_exponent, l1, commitment } = site;
    ModularWeights { weight_exponent, l1, commitment }
}

/// Reasons why a site was not evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// Memory for the batch's rows is short; a retry may succeed.
    #[error("the device of the base has no memory for a batch")]
    NoMemory(#[source] Box<dyn Error + Send + Sync>),
    /// The device failed during the evaluation.
    #[error("the device of the base failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
    /// The site has no modular path.
    #[error("site {} has no ring path: the base is served without it, or its weights are not integers", .0.0)]
    NoRing(SiteId),
    /// The modular path adds no bias.
    #[error("site {} adds no bias on the ring path; request the product without bias and add the bias to \
             the answer", .0.0)]
    RingBias(SiteId),
}

/// Evaluates calls at single sites.
pub trait EvaluateSites {
    /// Returns all sites of the base, in order.
    fn sites(&self) -> &[Site];

    /// Returns the layer chunk of each site for streamed weights, ascending and equal within a block.
    /// Consecutive calls to sites of one chunk read its weights once. `None` if all weights are in memory.
    fn floors(&self) -> Option<Vec<u32>> {
        None
    }

    /// Evaluates `call` for all rows of `x` and writes the results to `out`.
    ///
    /// # Errors
    /// The device that holds the weights fails, or a modular call meets a site without that path.
    ///
    /// # Panics
    /// If the shapes of `x` and `out` do not match the site; callers check them with [`Site::words`].
    fn evaluate(&mut self, call: SiteCall, x: &mut Activations, out: &mut [f32])
    -> Result<(), EvaluateError>;
}

/// Serves calls of split clients during a pass of the resident engine.
pub trait PassHooks {
    /// Whether any call waits; if so, the pass offers each of its sites.
    fn is_waiting(&mut self) -> bool;

    /// Lets urgent calls be evaluated with `base` before the pass evaluates `site`.
    fn before_site(&mut self, site: SiteId, base: &mut dyn EvaluateSites);

    /// Appends to `x` the rows of waiting calls equal to `call` ([`Activations::append`]); returns their
    /// number.
    fn join(&mut self, call: SiteCall, x: &mut Activations) -> usize;

    /// Takes the outputs of the joined rows, in the order of [`join`](Self::join).
    fn part(&mut self, out: &[f32]);

    /// Lends the pass's thread while the pass waits for streamed weights, until `wait` is over.
    fn while_waiting(&mut self, wait: &dyn PendingWeights) {
        let _ = wait;
    }
}

/// Hooks that serve no calls.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl PassHooks for NoHooks {
    fn is_waiting(&mut self) -> bool {
        false
    }

    fn before_site(&mut self, _site: SiteId, _base: &mut dyn EvaluateSites) {}

    fn join(&mut self, _call: SiteCall, _x: &mut Activations) -> usize {
        0
    }

    fn part(&mut self, _out: &[f32]) {}
}
