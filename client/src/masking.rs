//! What an executor sees of a client's activations and gradients.
//!
//! [`Masking::Off`] shows them as they are. [`Masking::Paper`] is the paper's scheme (Symbiosis §3.8): *obfuscation*, not
//! secrecy. A client adds one of a few noises to each row and takes the noise's effect, computed ahead by the executor
//! itself, out of the answer. `g W` is as linear as `x Wᵀ`, so gradients are covered in the same way, by noises of their
//! own. Whoever keeps a log of the noises finds them again in the rows; the documentation says how.
//!
//! [`RowProtection::Pads`] and [`RowProtection::Shares`] are sound: rows are whole numbers modulo 2^48 or 2^64 and a pad that is uniform there is added to
//! each, and never to another, so that what an executor sees is uniform whatever the rows are. Who can take pads away differs: this
//! client alone, which computed their effects beforehand, or a second executor, which must not collude with the first. With or
//! without a cover, every answer can be checked. All of these are [`Exact`]: the same bits with and without masking.
//!
//! No mask ever falls back to sending rows as they are.
//!
//! # Layout
//!
//! - this file: what a mask is, and the one that hides nothing
//! - `noise`: rotating noises
//! - `modular`: exact arithmetic, over any route; `fixed_point`: rows as whole numbers; `modular_rows`: how these travel
//! - [`secret_sharing`]: the route over two executors; [`one_time_pads`]: that over one, with pads from a disk
//! - [`verify`]: whether answers are true

mod fixed_point;
#[cfg(test)]
mod golden;
mod modular;
mod modular_rows;
mod noise;
pub mod one_time_pads;
pub mod secret_sharing;
#[cfg(test)]
mod timing;
pub mod verify;

use std::{fmt, sync::Arc};

use model::linear_sites::SiteId;
use shmproto::layer::{CallClass, Dtype, Op, Path, control};

use self::{
    modular::{ModularMask, ModularRoute, PlainRoute},
    noise::RotatingNoise,
    one_time_pads::{Padded, Pads},
    secret_sharing::{SecondExecutor, SecretShareRoute},
    verify::Verifier,
};
use crate::{
    error::CallError,
    session::{Session, calls::LayerCall},
};

/// Who stands between a client's rows and its executor.
pub trait Mask: Send + fmt::Debug {
    /// The mode, as answers and logs say it.
    fn mode(&self) -> &'static str;

    /// Takes `rows` through a site into `out`, while the executor sees of them only what the mode lets it see.
    ///
    /// # Errors
    /// The executor is gone, or refuses.
    fn call(
        &mut self,
        session: &mut Session,
        place: CallSite,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError>;
}

/// Where rows go, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallSite {
    /// Which site.
    pub site: SiteId,
    /// Which way they go through it.
    pub direction: Direction,
    /// What the rows are for.
    pub class: CallClass,
}

impl CallSite {
    /// The call that takes rows there.
    #[must_use]
    pub fn ask(self, path: Path) -> LayerCall {
        let op = match self.direction {
            Direction::Forward => Op::Forward,
            Direction::Backward => Op::Backward,
        };
        LayerCall { site: self.site, part: None, op, path, class: self.class }
    }
}

/// Which way rows go through a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Activations: `x Wᵀ + bias`.
    Forward,
    /// Gradients: `g W`.
    Backward,
}

/// How activations and gradients are protected.
#[derive(Debug, Clone)]
pub enum Masking {
    /// Not at all.
    Off {
        /// With which arithmetic; exact as [`Exact`] is without a cover.
        path: Path,
    },
    /// Obfuscation by rotating noises.
    Paper(NoiseSettings),
    /// Exact arithmetic.
    Exact(Exact),
}

/// Exact arithmetic: what covers rows, and what is done besides.
#[derive(Debug, Clone)]
pub struct Exact {
    /// What covers them.
    pub cover: RowProtection,
    /// What every answer is checked with, if it is.
    pub verifier: Option<Arc<Verifier>>,
    /// Whether calls are filled up with rows of zeros to a power of two, so that executors see no other number of rows.
    pub pad_rows: bool,
}

/// What covers rows of exact arithmetic.
#[derive(Debug, Clone)]
pub enum RowProtection {
    /// Nothing.
    Bare,
    /// Each of two executors, which must not collude, sees numbers that have nothing to do with rows.
    Shares(Arc<SecondExecutor>),
    /// The executor sees numbers that have nothing to do with rows; this client has computed beforehand what takes them away.
    Pads(Pads),
}

impl From<RowProtection> for Masking {
    /// Answers are not checked, and calls not filled up.
    fn from(cover: RowProtection) -> Self {
        Self::Exact(Exact { cover, verifier: None, pad_rows: false })
    }
}

/// Settings of [`Masking::Paper`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NoiseSettings {
    /// Noises of a site in each direction; rows take them in turn.
    pub noises: usize,
    /// Size of the noise: of activations in root mean squares of the first rows that pass the site, of gradients in the
    /// largest number of a call.
    pub scale: f32,
    /// Rows of a direction after which a site gets fresh noises.
    pub rotate_rows: u64,
}

impl Default for NoiseSettings {
    /// Two noises, as the paper has it.
    fn default() -> Self {
        Self { noises: 2, scale: 1.0, rotate_rows: 1 << 14 }
    }
}

impl Masking {
    /// The mode as [`shmproto::layer::control::SessionOpen`] has it.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Off { .. } | Self::Exact(Exact { cover: RowProtection::Bare, .. }) => "off",
            Self::Paper(_) => "paper",
            Self::Exact(Exact { cover: RowProtection::Shares(_), .. }) => "shares",
            Self::Exact(Exact { cover: RowProtection::Pads(_), .. }) => "pads",
        }
    }

    /// Whether what an executor sees has nothing to do with rows.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        matches!(self, Self::Exact(Exact { cover: RowProtection::Shares(_) | RowProtection::Pads(_), .. }))
    }

    /// Makes the mask; tells `told` how many of how many sites are ready.
    ///
    /// # Errors
    /// The base cannot serve it, the operating system gives no randomness, or an executor is gone.
    pub fn prepare(
        self,
        session: &mut Session,
        told: &mut dyn FnMut(usize, usize),
    ) -> Result<Box<dyn Mask>, CallError> {
        match self {
            Self::Off { path: Path::Ring } => Self::from(RowProtection::Bare).prepare(session, told),
            Self::Off { path } => Ok(Box::new(Unmasked { path })),
            Self::Paper(settings) => Ok(Box::new(RotatingNoise::new(settings, session, told)?)),
            Self::Exact(exact) => Ok(Box::new(exact.prepare(session)?)),
        }
    }
}

impl Exact {
    fn prepare(&self, session: &mut Session) -> Result<ModularMask, CallError> {
        if session.settings().dtype != Dtype::F32 {
            return Err(CallError::Masking("bf16 would round what is exact: use f32"));
        }
        let verifying = self.verifier.as_ref().map(|verifier| verifier.over(session)).transpose()?;
        let route: Box<dyn ModularRoute> = match &self.cover {
            RowProtection::Bare => Box::new(PlainRoute::default()),
            RowProtection::Shares(second) => Box::new(SecretShareRoute::new(second, session)?),
            RowProtection::Pads(pads) => Box::new(Padded::new(pads, session)?),
        };
        ModularMask::new(route, verifying, self.pad_rows, session)
    }
}

/// The hash of all sites' weights, as a client pins it: BLAKE3 of their commitments, one behind the other.
#[must_use]
pub fn commitment(rings: &[control::ModularWeights]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for ring in rings {
        hasher.update(&ring.commitment);
    }
    hasher.finalize().into()
}

/// What the executor of a session commits to.
///
/// # Errors
/// It does not: a site has no ring path.
pub fn session_commitment(session: &Session) -> Result<[u8; 32], CallError> {
    Ok(commitment(&modular_rows::offers(session)?))
}

/// Sites as people read them, of a base whose sites have these shapes: inputs and outputs.
///
/// Where shapes come again every four sites they are the groups of blocks without experts, and a site is named by them.
fn site_name(site: SiteId, shapes: &[[usize; 2]]) -> String {
    let (blocks, at) = shapes.split_at(shapes.len().saturating_sub(1));
    let are_groups = blocks.len().is_multiple_of(4) && blocks.iter().skip(4).zip(blocks).all(|(a, b)| a == b);
    match (site.0 as usize, site.0 % 4) {
        _ if !are_groups || at.is_empty() => format!("site {}", site.0),
        (head, _) if head == blocks.len() => format!("site {} (head)", site.0),
        (beyond, _) if beyond > blocks.len() => format!("site {}", site.0),
        (_, group) => {
            let word = ["q, k, v", "o", "gate, up", "down"][group as usize];
            format!("site {} (layer {} {word})", site.0, site.0 / 4)
        }
    }
}

/// The shapes of an executor's sites, as [`site_name`] takes them.
fn shapes_of(sites: &[control::Site]) -> Vec<[usize; 2]> {
    let outputs = |site: &control::Site| site.parts.iter().map(|part| part.rows as usize).sum();
    sites.iter().map(|site| [site.columns as usize, outputs(site)]).collect()
}

/// Rows as they are.
#[derive(Debug)]
struct Unmasked {
    path: Path,
}

impl Mask for Unmasked {
    fn mode(&self) -> &'static str {
        "off"
    }

    fn call(
        &mut self,
        session: &mut Session,
        place: CallSite,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        session.call(place.ask(self.path), rows, out)
    }
}
