//! Single linear groups of a base, for those who run the rest of the pass elsewhere.
//!
//! A *site* is a linear group with a number: `[q | k | v]` of layer 0 is site 0, `o` site 1, `[gate | up]` site 2, `down`
//! site 3, and so on; the head is the last. Of a base whose architecture is not known, every linear layer is a site.
//! A call takes rows through a site, forward or backward, and leaves nothing behind.

use std::error::Error;

use kernels::{Activations, Rounding};

use crate::{shape::layout::LinearGroup, sweep::Waiting};

/// Which site, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteId(pub u32);

impl SiteId {
    /// The site of a group of a known architecture with `layers` blocks.
    #[must_use]
    pub fn of(layers: usize, layer: usize, group: LinearGroup) -> Self {
        let number = match group {
            LinearGroup::Qkv => 4 * layer,
            LinearGroup::O => 4 * layer + 1,
            LinearGroup::GateUp => 4 * layer + 2,
            LinearGroup::Down => 4 * layer + 3,
            LinearGroup::Head => 4 * layers,
        };
        Self(u32::try_from(number).expect("a model has at most 1,024 layers"))
    }

    /// Layer and group of a site of a known architecture with `layers` blocks.
    #[must_use]
    pub fn group(self, layers: usize) -> Option<(usize, LinearGroup)> {
        let number = self.0 as usize;
        let groups = [LinearGroup::Qkv, LinearGroup::O, LinearGroup::GateUp, LinearGroup::Down];
        match number {
            head if head == 4 * layers => Some((0, LinearGroup::Head)),
            beyond if beyond > 4 * layers => None,
            _ => Some((number / 4, groups[number % 4])),
        }
    }
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
pub struct RingSite {
    /// Of all parts.
    pub weight_exponent: i32,
    /// The largest sums of magnitudes: forward of an output's weights, backward of an input's.
    pub l1: [u64; 2],
    /// BLAKE3 of the columns, the number of parts, the rows of each (u64, little-endian), the exponent and the weights, row after
    /// row (i32): the same for the same weights, however they are packed.
    pub commitment: [u8; 32],
}

impl RingSite {
    /// Whether rows may have bits enough both ways.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.l1.iter().all(|&l1| ring_bits(l1).is_some())
    }
}

/// Most bits of a row's largest number on the ring path.
const MAX_RING_BITS: u32 = 30;
/// Fewest: weights that leave less room have no ring path.
const MIN_RING_BITS: u32 = 12;
/// Bits that an answer may have: with one more it could wrap around.
const RING_ANSWER_BITS: u32 = 62;

/// Bits that the magnitudes of a row may have on the ring path where sums of the weights' magnitudes come to `l1`: with more an
/// answer could wrap around. `None` if there would be too few.
#[must_use]
pub fn ring_bits(l1: u64) -> Option<u32> {
    // Of the smallest power of two that is not below.
    let sum_bits = u64::BITS - l1.saturating_sub(1).leading_zeros();
    let bits = RING_ANSWER_BITS.checked_sub(sum_bits)?.min(MAX_RING_BITS);
    (bits >= MIN_RING_BITS).then_some(bits)
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
    pub ring: Option<RingSite>,
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

    /// Words of 32 bits of a row that goes in and of one that comes out; `None` if there is no such part.
    #[must_use]
    pub fn words(&self, call: SiteCall) -> Option<(usize, usize)> {
        let (inputs, outputs) = self.widths(call.part, call.op)?;
        Some(if call.path == SitePath::Ring { (2 * inputs, 2 * outputs) } else { (inputs, outputs) })
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
pub trait Company {
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
    fn while_waiting(&mut self, wait: &dyn Waiting) {
        let _ = wait;
    }
}

/// No company.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Company for Alone {
    fn is_waiting(&mut self) -> bool {
        false
    }

    fn before_site(&mut self, _site: SiteId, _base: &mut dyn EvaluateSites) {}

    fn join(&mut self, _call: SiteCall, _x: &mut Activations) -> usize {
        0
    }

    fn part(&mut self, _out: &[f32]) {}
}
