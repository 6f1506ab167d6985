//! Single linear groups of a base, for those who run the rest of the pass elsewhere.
//!
//! A *site* is a linear group with a number: `[q | k | v]` of layer 0 is site 0, `o` site 1, `[gate | up]` site 2, `down`
//! site 3, and so on; the head is the last. A block with experts has, behind its `o`, the two groups of each of them. Of a base
//! whose architecture is not known, every linear layer is a site.
//! A call takes rows through a site, forward or backward, and leaves nothing behind.

use std::error::Error;

use kernels::{Activations, Modulus, Rounding};

use crate::{
    shape::{config::ModelConfig, experts::ExpertId, layout::LinearGroup},
    weight_stream_stats::PendingWeights,
};

/// Which site, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteId(pub u32);

impl SiteId {
    /// The site of a group of a model.
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
        // Experts are few enough.
        Self(first_site(config, layer) + within as u32)
    }

    /// Layer and group of a site of a model.
    #[must_use]
    pub fn group(self, config: &ModelConfig) -> Option<(usize, LinearGroup)> {
        let (mut layer, mut behind) = (0, config.layers + 1);
        // The last whose first site is not behind it.
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

/// Sites of a block's attention, and of a plain feed-forward.
const OF_ATTENTION: usize = 2;
const OF_FEED_FORWARD: usize = 2;

/// The first site of a block, or behind the last one that of the head.
fn first_site(config: &ModelConfig, layer: usize) -> u32 {
    let (sparse, experts) =
        config.experts.as_ref().map_or((0, 0), |experts| (experts.layers_below(layer), experts.count));
    let first = OF_ATTENTION * layer + OF_FEED_FORWARD * (layer - sparse) + 2 * experts * sparse;
    u32::try_from(first).expect("layers and experts are within their limits")
}

/// What is done with rows at a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SiteOp {
    /// `x Wᵀ + bias`.
    Forward,
    /// `x Wᵀ`.
    ForwardNoBias,
    /// `g W`: the gradient at the inputs, from that at the outputs.
    Backward,
}

/// With which arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SitePath {
    /// As the resident engine computes; activations may be rounded to what the weights call for.
    Fast,
    /// Activations of 32 bits meet the weights as they are stored: linear up to the rounding of floats.
    Linear,
    /// Whole numbers modulo 2^64 meet the whole numbers that the weights consist of: exact. Rows are pairs of words of 32 bits, the
    /// lower half of a number first, that are no floats. There is no bias.
    Ring,
}

/// What a call asks for, besides its rows. Calls that ask for the same are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteCall {
    /// The site that its rows go through.
    pub site: SiteId,
    /// One of the site's linear layers, or all of them side by side.
    pub part: Option<u8>,
    /// Forward with or without bias, or backward.
    pub op: SiteOp,
    /// With which arithmetic.
    pub path: SitePath,
}

/// A linear layer of a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePart {
    /// The module's name, as in the model's own files or, for files that have others, in the Hugging Face layout
    /// (`model.layers.0.self_attn.q_proj`).
    pub name: String,
    /// Output features.
    pub rows: usize,
    /// Whether it adds a bias.
    pub has_bias: bool,
}

/// The whole numbers that the weights of a site consist of: each weight is one of them times `2^weight_exponent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModularSite {
    /// Of all parts.
    pub weight_exponent: i32,
    /// The largest sums of magnitudes: forward of an output's weights, backward of an input's.
    pub l1: [u64; 2],
    /// BLAKE3 of the columns, the number of parts, the rows of each (u64, little-endian), the exponent and the weights, row after
    /// row (i32): the same for the same weights, however they are packed.
    pub commitment: [u8; 32],
}

impl ModularSite {
    /// Whether rows may have bits enough both ways.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.l1.iter().all(|&l1| ModularRange::new(l1, false).is_some())
    }
}

/// What rows of a site are on the ring path, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModularRange {
    /// What their numbers are taken modulo.
    pub modulus: Modulus,
    /// Bits that the magnitudes of a row's numbers have at most: with more an answer could wrap around.
    pub bits: u32,
}

/// Most bits of a row's largest number on the ring path.
const MAX_RING_BITS: u32 = 30;
/// Fewest by either modulus: weights that leave less room by the narrow one take the wide one, and else have no ring path.
const MIN_NARROW_BITS: u32 = 18;
const MIN_WIDE_BITS: u32 = 12;
/// Bits of a number that an answer does not have: with one more it could wrap around.
const SPARE_RING_BITS: u32 = 2;

impl ModularRange {
    /// That of a site where sums of the weights' magnitudes come to `l1`; whether it `is_even` says if rows of it have an even number
    /// of numbers both ways, whichever of its parts they are of. `None` if rows would have too few bits.
    #[must_use]
    pub fn new(l1: u64, is_even: bool) -> Option<Self> {
        // Of the smallest power of two that is not below.
        let sum_bits = u64::BITS - l1.saturating_sub(1).leading_zeros();
        let room = |modulus: Modulus, least: u32| {
            let bits = (modulus.bits() - SPARE_RING_BITS).checked_sub(sum_bits)?.min(MAX_RING_BITS);
            (bits >= least).then_some(Self { modulus, bits })
        };
        // Rows are whole words of 32 bits where they travel.
        let narrow = if is_even { room(Modulus::Bits48, MIN_NARROW_BITS) } else { None };
        narrow.or_else(|| room(Modulus::Bits64, MIN_WIDE_BITS))
    }
}

/// A site's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Site {
    /// Input features, the same for all parts.
    pub columns: usize,
    /// Its linear layers, whose outputs lie side by side.
    pub parts: Vec<SitePart>,
    /// The fast path takes activations unrounded, so that both paths are one.
    pub fast_is_linear: bool,
    /// How the fast path rounds them for integer weights on a CPU; `None`: it takes them unrounded, whatever the weights are.
    pub rounding: Option<Rounding>,
    /// The whole numbers that its weights consist of, if it has the ring path and whoever serves it has asked for that.
    pub ring: Option<ModularSite>,
}

impl Site {
    /// Elements of a row that goes in and of one that comes out; `None` if there is no such part.
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

    /// Words of 32 bits of a row that goes in and of one that comes out; `None` if there is no such part, or no such path.
    #[must_use]
    pub fn words(&self, call: SiteCall) -> Option<(usize, usize)> {
        let (inputs, outputs) = self.widths(call.part, call.op)?;
        if call.path != SitePath::Ring {
            return Some((inputs, outputs));
        }
        let modulus = self.ring_room(call.op)?.modulus;
        Some((modulus.words(inputs), modulus.words(outputs)))
    }

    /// What rows of it are on the ring path; `None` without one.
    #[must_use]
    pub fn ring_room(&self, op: SiteOp) -> Option<ModularRange> {
        let is_even = self.parts.iter().map(|part| part.rows).chain([self.columns]).all(|size| size % 2 == 0);
        ModularRange::new(self.ring?.l1[usize::from(op == SiteOp::Backward)], is_even)
    }

    /// Refuses what the ring path of this site cannot do.
    pub(crate) fn check_ring(&self, call: SiteCall) -> Result<(), EvaluateError> {
        match call.path {
            SitePath::Fast | SitePath::Linear => Ok(()),
            SitePath::Ring if self.ring.is_none() => Err(EvaluateError::NoRing(call.site)),
            SitePath::Ring if call.op == SiteOp::Forward => Err(EvaluateError::RingBias(call.site)),
            SitePath::Ring => Ok(()),
        }
    }
}

/// Why a site was not evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// There was no memory for so many rows; there may be later.
    #[error("the device that holds the base has no memory for a batch")]
    NoMemory(#[source] Box<dyn Error + Send + Sync>),
    /// The device failed.
    #[error("the device that holds the base failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
    /// The site has no ring path.
    #[error("site {} has no ring path: its base is not served with one, or its weights are no whole numbers", .0.0)]
    NoRing(SiteId),
    /// The ring path adds no bias.
    #[error("site {} adds no bias on the ring path; ask for the product without and add it to the answer", .0.0)]
    RingBias(SiteId),
}

/// Whoever can evaluate single sites.
pub trait EvaluateSites {
    /// The sites there are.
    fn sites(&self) -> &[Site];

    /// Of a base whose weights come from a disk, floor by floor, the floor of each site: ascending from the first site, those of
    /// a block the same. Whoever asks for sites of one floor after another of that floor has its weights read once. `None` if all
    /// weights are in memory.
    fn floors(&self) -> Option<Vec<u32>> {
        None
    }

    /// Evaluates `call` for all rows of `x` into rows of `out`.
    ///
    /// # Errors
    /// The device that holds the weights fails, or the site has no ring path and is asked for it.
    ///
    /// # Panics
    /// If the call's shape is not that of the site: whoever lets calls in has compared them with [`Site::words`].
    fn evaluate(&mut self, call: SiteCall, x: &mut Activations, out: &mut [f32])
    -> Result<(), EvaluateError>;
}

/// Those whose calls are served in the course of somebody else's pass.
pub trait PassHooks {
    /// Whether anybody waits now, so that a pass must look at each site whether it can serve them.
    fn is_waiting(&mut self) -> bool;

    /// A pass is about to evaluate `site`: others' urgent calls may be evaluated first, with `base`.
    fn before_site(&mut self, site: SiteId, base: &mut dyn EvaluateSites);

    /// Appends to `x` the rows of calls that ask for what the pass is about to evaluate
    /// ([`Activations::append`]); says how many there are.
    fn join(&mut self, call: SiteCall, x: &mut Activations) -> usize;

    /// The outputs of the rows that joined, in the same order.
    fn part(&mut self, out: &[f32]);

    /// The pass waits for weights on their way from a disk: its thread is free until `wait` is over.
    fn while_waiting(&mut self, wait: &dyn PendingWeights) {
        let _ = wait;
    }
}

/// No company.
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
