//! Masking: protection of a client's activations and gradients from its executor.
//!
//! [`Masking::Off`] sends activations and gradients as they are. [`Masking::Paper`] is the paper's scheme
//! (Symbiosis §3.8), which is *obfuscation*, not secrecy. A client adds one of a few noises to each row and
//! subtracts the noise's effect, which the executor itself computed in advance, from the answer. `g W` is as
//! linear as `x Wᵀ`, so gradients are covered in the same way, by noises of their own. An executor that logs
//! the noises finds them again in the rows; the documentation says how.
//!
//! [`RowProtection::Pads`] and [`RowProtection::Shares`] are secret. Rows are integers modulo 2^48 or 2^64,
//! and each gets its own uniform pad, so that the executor sees uniform numbers for all rows. Pads are
//! removed by this client, which computed their effects in advance, or with a second executor, which must not
//! collude with the first. Every answer can be checked, with or without a cover. All these modes are
//! [`Exact`]: the results have the same bits with and without masking.
//!
//! No masking mode ever falls back to sending rows as they are.
//!
//! # Layout
//!
//! - this file: the trait of masks, and the mask that hides nothing
//! - `noise`: rotating noises
//! - `modular`: exact arithmetic over any route; `fixed_point`: rows as integers; `modular_rows`: wire format
//! - [`secret_sharing`]: the route over two executors; [`one_time_pads`]: the route over one, with pads
//! - [`verify`]: verification of answers

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
use shmproto::layer::{CallClass, Dtype, SiteOp, SitePath, control};

use self::{
    modular::{ModularMask, ModularRoute, SingleExecutorRoute},
    noise::RotatingNoise,
    one_time_pads::{Padded, Pads},
    secret_sharing::{SecondExecutor, SecretShareRoute},
    verify::Verifier,
};
use crate::{
    error::CallError,
    session::{Session, calls::LayerCall},
};

/// A mask between a client's rows and its executor.
pub trait Mask: Send + fmt::Debug {
    /// Returns the mode's name in answers and logs.
    fn mode(&self) -> &'static str;

    /// Takes `rows` through a site into `out`, and reveals to the executor only what the mode permits.
    ///
    /// # Errors
    /// Fails if the executor is gone, or refuses.
    fn call(
        &mut self,
        session: &mut Session,
        place: CallSite,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError>;
}

/// Destination and purpose of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallSite {
    /// Site that computes the rows.
    pub site: SiteId,
    /// Direction of the rows through the site.
    pub direction: Direction,
    /// Purpose of the rows, which decides their priority.
    pub class: CallClass,
}

impl CallSite {
    /// Returns the call of this site with the arithmetic `path`.
    #[must_use]
    pub fn ask(self, path: SitePath) -> LayerCall {
        let op = match self.direction {
            Direction::Forward => SiteOp::Forward,
            Direction::Backward => SiteOp::Backward,
        };
        LayerCall { site: self.site, part: None, op, path, class: self.class }
    }
}

/// Direction of rows through a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Activations: `x Wᵀ + bias`.
    Forward,
    /// Gradients of activations: `g W`.
    Backward,
}

/// Protection of activations and gradients.
#[derive(Debug, Clone)]
pub enum Masking {
    /// No protection at all.
    Off {
        /// Arithmetic of the site; `Ring` means [`Exact`] without a cover.
        path: SitePath,
    },
    /// Obfuscation by rotating noises.
    Paper(NoiseSettings),
    /// Exact arithmetic, with an optional cover.
    Exact(Exact),
}

/// Exact arithmetic, with a cover, a check of answers and padding.
#[derive(Debug, Clone)]
pub struct Exact {
    /// Cover of the rows.
    pub cover: RowProtection,
    /// Check of every answer, if requested.
    pub verifier: Option<Arc<Verifier>>,
    /// Whether zero rows pad each call to a power of two, which hides the exact number of rows.
    pub pad_rows: bool,
}

/// Cover of rows in exact arithmetic.
#[derive(Debug, Clone)]
pub enum RowProtection {
    /// No cover: rows are sent as they are.
    Bare,
    /// Each of two executors, which must not collude, sees numbers that are independent of the rows.
    Shares(Arc<SecondExecutor>),
    /// The executor sees numbers independent of the rows; this client precomputed what removes the pads.
    Pads(Pads),
}

impl From<RowProtection> for Masking {
    /// Selects exact arithmetic without checks and without padding.
    fn from(cover: RowProtection) -> Self {
        Self::Exact(Exact { cover, verifier: None, pad_rows: false })
    }
}

/// Settings of the mode [`Masking::Paper`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NoiseSettings {
    /// Number of noises per site and direction; rows take them in turn.
    pub noises: usize,
    /// Scale of the noise. For activations the unit is the root mean square of the site's first rows; for
    /// gradients it is the largest magnitude in a call.
    pub scale: f32,
    /// Number of rows in one direction after which a site gets fresh noises.
    pub rotate_rows: u64,
}

impl Default for NoiseSettings {
    /// Returns two noises, as in the paper.
    fn default() -> Self {
        Self { noises: 2, scale: 1.0, rotate_rows: 1 << 14 }
    }
}

impl Masking {
    /// Returns the mode's name in [`shmproto::layer::control::SessionOpen`].
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Off { .. } | Self::Exact(Exact { cover: RowProtection::Bare, .. }) => "off",
            Self::Paper(_) => "paper",
            Self::Exact(Exact { cover: RowProtection::Shares(_), .. }) => "shares",
            Self::Exact(Exact { cover: RowProtection::Pads(_), .. }) => "pads",
        }
    }

    /// Whether the executor sees only numbers that are independent of the rows.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        matches!(self, Self::Exact(Exact { cover: RowProtection::Shares(_) | RowProtection::Pads(_), .. }))
    }

    /// Makes the mask; calls `on_progress` with the numbers of prepared sites and of all sites.
    ///
    /// # Errors
    /// Fails if the base does not support the mode, the system has no randomness, or an executor is gone.
    pub fn prepare(
        self,
        session: &mut Session,
        on_progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Box<dyn Mask>, CallError> {
        match self {
            Self::Off { path: SitePath::Ring } => {
                Self::from(RowProtection::Bare).prepare(session, on_progress)
            }
            Self::Off { path } => Ok(Box::new(Unmasked { path })),
            Self::Paper(settings) => Ok(Box::new(RotatingNoise::new(settings, session, on_progress)?)),
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
            RowProtection::Bare => Box::new(SingleExecutorRoute::default()),
            RowProtection::Shares(second) => Box::new(SecretShareRoute::new(second, session)?),
            RowProtection::Pads(pads) => Box::new(Padded::new(pads, session)?),
        };
        ModularMask::new(route, verifying, self.pad_rows, session)
    }
}

/// Returns the hash of all sites' weights, which a client can pin: BLAKE3 of the concatenated commitments.
#[must_use]
pub fn commitment(rings: &[control::ModularWeights]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for ring in rings {
        hasher.update(&ring.commitment);
    }
    hasher.finalize().into()
}

/// Returns the hash of the weights that the session's executor commits to.
///
/// # Errors
/// Fails if a site has no modular path, and so no commitment.
pub fn session_commitment(session: &Session) -> Result<[u8; 32], CallError> {
    Ok(commitment(&modular_rows::offers(session)?))
}

/// Returns the name of a site for messages; `shapes` are the inputs and outputs of all sites.
///
/// If the shapes repeat every four sites, the sites are the linear groups of blocks without experts, and the
/// name says which.
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

fn shapes_of(sites: &[control::Site]) -> Vec<[usize; 2]> {
    let outputs = |site: &control::Site| site.parts.iter().map(|part| part.rows as usize).sum();
    sites.iter().map(|site| [site.columns as usize, outputs(site)]).collect()
}

/// The mask that sends rows as they are.
#[derive(Debug)]
struct Unmasked {
    path: SitePath,
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
