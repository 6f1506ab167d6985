//! The route over one executor, with pads whose effects this client has precomputed from its own weights.
//!
//! A row is sent as `x + r`, with `r` uniform and used once; `r W` is in a [`pool`] and is subtracted from
//! the answer. Every attempt at a call takes new pads. An empty pool is an error or is filled, but rows are
//! never sent without pads.
//!
//! # Layout
//!
//! - this file: the route
//! - [`pool`]: pads on disk; `file`: the pads of a site; `journal`: which pads are used; `manifest`: identity
//!   of pool and weights; `shape`: shapes of the sites
//! - [`maker`]: making of pads

mod file;
mod journal;
pub mod maker;
mod manifest;
pub mod pool;
mod shape;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kernels::Modulus;
use shmproto::layer::{RowSource, SiteOp, seeded_rows};
use zeroize::Zeroize as _;

use self::{
    maker::PadGenerator,
    pool::{PadPool, PadShape, PoolError, TakenPads},
};
use super::{
    Direction,
    modular::ModularRoute,
    modular_rows::{cover, first, offers, uncover},
};
use crate::{
    error::CallError,
    session::{
        Session,
        calls::{CallAttempt, LayerCall},
    },
};

/// Minimum number of pads that are made when a call finds too few.
const FILLED_ROWS: u64 = 16;

/// A pool of pads, with an optional maker. Clones share both.
#[derive(Clone)]
pub struct Pads {
    pool: Arc<Mutex<PadPool>>,
    maker: Option<Arc<Mutex<PadGenerator>>>,
}

impl fmt::Debug for Pads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pads").field("maker", &self.maker).finish_non_exhaustive()
    }
}

impl Pads {
    /// Uses the pads of `pool`. If too few are left, `maker` makes some during the call, or the call fails.
    #[must_use]
    pub fn new(pool: PadPool, maker: Option<PadGenerator>) -> Self {
        let maker = maker.map(|maker| Arc::new(Mutex::new(maker)));
        Self { pool: Arc::new(Mutex::new(pool)), maker }
    }

    fn pool(&self) -> MutexGuard<'_, PadPool> {
        // Pads are marked as used before they are returned, so a panic may lose some but reuses none.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, ask: LayerCall, rows: usize) -> Result<TakenPads, CallError> {
        let direction = if ask.op == SiteOp::Backward { Direction::Backward } else { Direction::Forward };
        let (site, rows) = (ask.site, rows as u64);
        let mut pool = self.pool();
        let lacking = rows.saturating_sub(pool.left(site, direction));
        if let (1.., Some(maker)) = (lacking, &self.maker) {
            let mut maker = maker.lock().unwrap_or_else(PoisonError::into_inner);
            maker.make(&mut pool, site, direction, lacking.max(FILLED_ROWS))?;
        }
        Ok(pool.take(site, direction, rows)?)
    }
}

pub(super) struct Padded {
    pads: Pads,
    masked: Vec<f32>,
    answer: Vec<f32>,
    effects: Vec<f32>,
}

impl fmt::Debug for Padded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Padded").field("pads", &self.pads).finish_non_exhaustive()
    }
}

impl Padded {
    /// # Errors
    /// Fails if the pads belong to other weights than the executor's.
    pub(super) fn new(pads: &Pads, session: &Session) -> Result<Self, CallError> {
        let commitment = super::commitment(&offers(session)?);
        let shapes = session.catalog().sites.iter().map(PadShape::of).collect::<Option<Vec<_>>>();
        pads.pool().expect(&commitment, &shapes.unwrap_or_default())?;
        let (masked, answer, effects) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { pads: pads.clone(), masked, answer, effects })
    }

    /// Makes one attempt at some rows with new pads; false if another attempt is worthwhile.
    fn attempt(
        &mut self,
        session: &mut Session,
        trial: &mut CallAttempt,
        (ask, modulus): (LayerCall, Modulus),
        (x, rows): (&[u64], usize),
        out: &mut [u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<bool, CallError> {
        let Self { pads, masked, answer, effects } = self;
        let taken = pads.take(ask, rows)?;
        let (masked, answer) =
            (first(masked, modulus.words(x.len())), first(answer, modulus.words(out.len())));
        seeded_rows::fill_first(taken.keys(), masked);
        cover(modulus, masked, x);
        // The effects are read while the executor computes, because they are needed only for the answer.
        let mut read = None;
        let answered = session.attempt(trial, masked, answer, &mut || {
            read = Some(pads.pool().effects(&taken, effects));
            meanwhile();
        });
        // The effects of rows that were not sent are read too, which erases them.
        read.unwrap_or_else(|| pads.pool().effects(&taken, effects))?;
        if !answered? {
            return Ok(false);
        }
        uncover(modulus, answer, effects, out);
        Ok(true)
    }
}

impl Drop for Padded {
    fn drop(&mut self) {
        for rows in [&mut self.masked, &mut self.answer, &mut self.effects] {
            rows.zeroize();
        }
    }
}

impl ModularRoute for Padded {
    fn mode(&self) -> &'static str {
        "pads"
    }

    fn call(
        &mut self,
        session: &mut Session,
        ask: LayerCall,
        modulus: Modulus,
        x: &[u64],
        out: &mut [u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), CallError> {
        let (input, output) = session.words(ask)?;
        let none = CallError::Shape { site: ask.site.0, rows: 1, reason: "not one row is taken" };
        let most = session.rows_of_call(input + output).ok_or(none)?;
        let (input, output) = session.widths(ask)?;
        for (x, out) in x.chunks(most * input).zip(out.chunks_mut(most * output)) {
            let rows = x.len() / input;
            let mut trial = CallAttempt::new(session, ask, rows, RowSource::Rows)?;
            while !self.attempt(session, &mut trial, (ask, modulus), (x, rows), out, meanwhile)? {
                trial.renew();
            }
        }
        Ok(())
    }
}

impl From<PoolError> for CallError {
    fn from(error: PoolError) -> Self {
        Self::Pads(Box::new(error))
    }
}
