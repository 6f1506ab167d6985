//! What an executor sees of a client's activations.
//!
//! [`Masking::Off`] shows them as they are. [`Masking::Paper`] is the paper's scheme (Symbiosis §3.8): *obfuscation*, not
//! secrecy. A client adds one of a few noises to each row and takes the noise's effect, computed ahead by the executor
//! itself, out of the answer. Whoever keeps a log of the noises finds them again in the rows; the documentation says
//! how. Sound modes take the same place: a [`Mask`] is handed the session and the rows, and decides what is sent, and
//! to whom (a pad for every row; shares for two executors).
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

    /// `out = x Wᵀ + bias` of a site, while the executor sees of `x` only what the mode lets it see.
    ///
    /// # Errors
    /// The executor is gone, or refuses.
    fn forward(
        &mut self,
        session: &mut Session,
        place: Place,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError>;
}

/// Where rows go, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which site.
    pub site: SiteId,
    /// What the rows are for.
    pub class: Class,
}

/// How activations are protected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Masking {
    /// Not at all.
    Off {
        /// With which arithmetic.
        path: Path,
    },
    /// Obfuscation by rotating noises.
    Paper(PaperSettings),
}

/// Settings of [`Masking::Paper`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PaperSettings {
    /// Noises of a site; rows take them in turn.
    pub noises: usize,
    /// Size of the noise, in root mean squares of the first rows that pass the site.
    pub scale: f32,
    /// Rows after which a site gets fresh noises.
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

    fn forward(
        &mut self,
        session: &mut Session,
        Place { site, class }: Place,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        session.call(Ask { site, part: None, op: Op::Forward, path: self.path, class }, x, out)
    }
}
