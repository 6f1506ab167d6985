//! What an executor sees of a client's activations and gradients.
//!
//! [`Masking::Off`] shows them as they are. [`Masking::Paper`] is the paper's scheme (Symbiosis §3.8): *obfuscation*, not
//! secrecy. A client adds one of a few noises to each row and takes the noise's effect, computed ahead by the executor
//! itself, out of the answer. `g W` is as linear as `x Wᵀ`, so gradients are covered in the same way, by noises of their
//! own. Whoever keeps a log of the noises finds them again in the rows; the documentation says how.
//!
//! [`Masking::Pads`] and [`Masking::Shares`] are sound: rows are whole numbers modulo 2^64 and a pad that is uniform there is added to
//! each, and never to another, so that what an executor sees is uniform whatever the rows are. Who can take pads away differs: this
//! client alone, which computed their effects beforehand, or a second executor, which must not collude with the first. Whatever
//! the mode, [`Masking::Verified`] checks every answer. All of these are exact: the same bits with and without masking.
//!
//! No mask ever falls back to sending rows as they are.
//!
//! # Layout
//!
//! - this file: what a mask is, and the one that hides nothing
//! - `paper`: rotating noises
//! - `ring`: exact arithmetic, over any route; `fixed_point`: rows as whole numbers; `whole`: how these travel
//! - [`shares`]: the route over two executors; [`pads`]: that over one, with pads from a disk
//! - [`verify`]: whether answers are true

mod fixed_point;
#[cfg(test)]
mod golden;
pub mod pads;
mod paper;
mod ring;
pub mod shares;
#[cfg(test)]
mod timing;
pub mod verify;
mod whole;

use std::{fmt, sync::Arc};

use model::{shape::layout::LinearGroup, sites::SiteId};
use shmproto::layer::{Class, Dtype, Op, Path, control};

use self::{
    pads::{Padded, Pads},
    paper::Paper,
    ring::{Bare, Ring, Route},
    shares::{Second, Shares},
    verify::Verifier,
};
use crate::{
    error::CallError,
    session::{Session, calls::Ask},
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
        place: Place,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError>;
}

/// Where rows go, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which site.
    pub site: SiteId,
    /// Which way they go through it.
    pub direction: Direction,
    /// What the rows are for.
    pub class: Class,
}

impl Place {
    /// The call that takes rows there.
    #[must_use]
    pub fn ask(self, path: Path) -> Ask {
        let op = match self.direction {
            Direction::Forward => Op::Forward,
            Direction::Backward => Op::Backward,
        };
        Ask { site: self.site, part: None, op, path, class: self.class }
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
        /// With which arithmetic.
        path: Path,
    },
    /// Obfuscation by rotating noises.
    Paper(PaperSettings),
    /// Each of two executors, which must not collude, sees numbers that have nothing to do with rows.
    Shares(Arc<Second>),
    /// The executor sees numbers that have nothing to do with rows; this client has computed beforehand what takes them away.
    Pads(Pads),
    /// As another mode of exact arithmetic, and every answer is checked.
    Verified(Box<Self>, Arc<Verifier>),
}

/// Settings of [`Masking::Paper`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PaperSettings {
    /// Noises of a site in each direction; rows take them in turn.
    pub noises: usize,
    /// Size of the noise: of activations in root mean squares of the first rows that pass the site, of gradients in the
    /// largest number of a call.
    pub scale: f32,
    /// Rows of a direction after which a site gets fresh noises.
    pub rotate_rows: u64,
}

impl Default for PaperSettings {
    /// Two noises, as the paper has it.
    fn default() -> Self {
        Self { noises: 2, scale: 1.0, rotate_rows: 1 << 14 }
    }
}

impl Masking {
    /// The mode as [`shmproto::layer::control::Open`] has it.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Off { .. } => "off",
            Self::Paper(_) => "paper",
            Self::Shares(_) => "shares",
            Self::Pads(_) => "pads",
            Self::Verified(masking, _) => masking.word(),
        }
    }

    /// Whether what an executor sees has nothing to do with rows.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        match self {
            Self::Off { .. } | Self::Paper(_) => false,
            Self::Shares(_) | Self::Pads(_) => true,
            Self::Verified(masking, _) => masking.is_sound(),
        }
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
            Self::Off { path: Path::Ring } | Self::Shares(_) | Self::Pads(_) => self.exact(None, session),
            Self::Off { path } => Ok(Box::new(Unmasked { path })),
            Self::Paper(settings) => Ok(Box::new(Paper::new(settings, session, told)?)),
            Self::Verified(masking, verifier) => masking.exact(Some(&verifier), session),
        }
    }

    /// A mask of exact arithmetic.
    fn exact(
        &self,
        verifier: Option<&Arc<Verifier>>,
        session: &mut Session,
    ) -> Result<Box<dyn Mask>, CallError> {
        if session.settings().dtype != Dtype::F32 {
            return Err(CallError::Masking("bf16 would round what is exact: use f32"));
        }
        let verifying = verifier.map(|verifier| verifier.over(session)).transpose()?;
        let route: Box<dyn Route> = match self {
            Self::Off { path: Path::Ring } => Box::new(Bare),
            Self::Shares(second) => Box::new(Shares::new(second, session)?),
            Self::Pads(pads) => Box::new(Padded::new(pads, session)?),
            Self::Off { .. } | Self::Paper(_) | Self::Verified(..) => {
                return Err(CallError::Masking(
                    "only exact answers can be checked: --verify takes --path ring, pads or shares",
                ));
            }
        };
        Ok(Box::new(Ring::new(route, verifying, session)?))
    }
}

/// The hash of all sites' weights, as a client pins it: BLAKE3 of their commitments, one behind the other.
#[must_use]
pub fn commitment(rings: &[control::Ring]) -> [u8; 32] {
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
    Ok(commitment(&whole::offers(session)?))
}

/// A site of `sites` as people read it: its number, and where they are the groups of blocks, which group of which layer.
fn site_name(site: SiteId, sites: usize) -> String {
    let layers = sites / 4;
    let group = if sites % 4 == 1 { site.group(layers) } else { None };
    match group {
        Some((_, LinearGroup::Head)) => format!("site {} (head)", site.0),
        Some((layer, group)) => {
            let word = match group {
                LinearGroup::Qkv => "q, k, v",
                LinearGroup::O => "o",
                LinearGroup::GateUp => "gate, up",
                LinearGroup::Down => "down",
                LinearGroup::Head => "head",
            };
            format!("site {} (layer {layer} {word})", site.0)
        }
        None => format!("site {}", site.0),
    }
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
        place: Place,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        session.call(place.ask(self.path), rows, out)
    }
}
