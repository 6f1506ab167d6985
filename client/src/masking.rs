//! What an executor sees of a client's activations and gradients.
//!
//! [`Masking::Off`] shows them as they are. [`Masking::Paper`] is the paper's scheme (Symbiosis §3.8): *obfuscation*, not
//! secrecy. A client adds one of a few noises to each row and takes the noise's effect, computed ahead by the executor
//! itself, out of the answer. `g W` is as linear as `x Wᵀ`, so gradients are covered in the same way, by noises of their
//! own. Whoever keeps a log of the noises finds them again in the rows; the documentation says how. Sound modes take the
//! same place: a [`Mask`] is handed the session and the rows, and decides what is sent, and to whom (a pad for every row;
//! shares for two executors).
//!
//! No mask ever falls back to sending rows as they are.
//!
//! # Layout
//!
//! - this file: what a mask is, and the one that hides nothing
//! - `paper`: rotating noises

mod paper;

use std::fmt;

use model::sites::SiteId;
use shmproto::layer::{Class, Op, Path};

use self::paper::Paper;
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
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Masking {
    /// Not at all.
    Off {
        /// With which arithmetic; gradients always take the linear path.
        path: Path,
    },
    /// Obfuscation by rotating noises.
    Paper(PaperSettings),
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
        }
    }

    /// Makes the mask; tells `told` how many of how many sites are ready.
    ///
    /// # Errors
    /// The base cannot serve it, the operating system gives no randomness, or the executor is gone.
    pub fn prepare(
        self,
        session: &mut Session,
        told: &mut dyn FnMut(usize, usize),
    ) -> Result<Box<dyn Mask>, CallError> {
        match self {
            Self::Off { path } => Ok(Box::new(Unmasked { path })),
            Self::Paper(settings) => Ok(Box::new(Paper::new(settings, session, told)?)),
        }
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
