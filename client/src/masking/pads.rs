//! One executor, and pads whose effects this client has computed beforehand, from weights of its own.
//!
//! A row goes out as `x + r`, with `r` uniform and used once; `r W` is in a [`pool`] and is taken out of the answer. Every attempt
//! at a call takes pads that no other took. An empty pool is an error, or is filled, but never passed by.
//!
//! # Layout
//!
//! - this file: the route
//! - [`pool`]: pads on a disk; `file`: those of a site; `journal`: which of them are gone; `manifest`: of which weights they are; `pad`: one of them
//! - [`maker`]: how they are made

mod file;
mod journal;
pub mod maker;
mod manifest;
mod pad;
pub mod pool;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kernels::Modulus;
use shmproto::layer::{Op, Source};
use zeroize::Zeroize as _;

use self::{
    maker::Maker,
    pool::{Pad, Pool, PoolError, Shape},
};
use super::{
    Direction,
    ring::Route,
    whole::{cover, first, offers, uncover},
};
use crate::{
    error::CallError,
    session::{
        Session,
        calls::{Ask, Trial},
    },
};

/// Pads made for lack of any, at a time, at least.
const FILLED_ROWS: u64 = 16;

/// Pads, and what is done where there are none. Clones are the same.
#[derive(Clone)]
pub struct Pads {
    pool: Arc<Mutex<Pool>>,
    maker: Option<Arc<Mutex<Maker>>>,
}

impl fmt::Debug for Pads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pads").field("maker", &self.maker).finish_non_exhaustive()
    }
}

impl Pads {
    /// Pads of `pool`. Where there are none, the `maker` makes some while the call waits; without one it is refused.
    #[must_use]
    pub fn new(pool: Pool, maker: Option<Maker>) -> Self {
        let maker = maker.map(|maker| Arc::new(Mutex::new(maker)));
        Self { pool: Arc::new(Mutex::new(pool)), maker }
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        // Marks are written before pads are handed out: a holder of the lock that panicked has lost some, and no more.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pads that nobody had, for so many rows.
    fn take(&self, ask: Ask, rows: usize, pads: &mut Vec<Pad>) -> Result<(), CallError> {
        let direction = if ask.op == Op::Backward { Direction::Backward } else { Direction::Forward };
        let (site, rows) = (ask.site, rows as u64);
        let mut pool = self.pool();
        let lacking = rows.saturating_sub(pool.left(site, direction));
        if let (1.., Some(maker)) = (lacking, &self.maker) {
            let mut maker = maker.lock().unwrap_or_else(PoisonError::into_inner);
            maker.make(&mut pool, site, direction, lacking.max(FILLED_ROWS))?;
        }
        Ok(pool.take(site, direction, rows, pads)?)
    }
}

/// A route with pads.
pub(super) struct Padded {
    pads: Pads,
    taken: Vec<Pad>,
    masked: Vec<f32>,
    answer: Vec<f32>,
}

impl fmt::Debug for Padded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Padded").field("pads", &self.pads).finish_non_exhaustive()
    }
}

impl Padded {
    /// # Errors
    /// They are of other weights than the executor's.
    pub(super) fn new(pads: &Pads, session: &Session) -> Result<Self, CallError> {
        let commitment = super::commitment(&offers(session)?);
        let shapes = session.catalog().sites.iter().map(Shape::of).collect::<Option<Vec<_>>>();
        pads.pool().expect(&commitment, &shapes.unwrap_or_default())?;
        Ok(Self { pads: pads.clone(), taken: Vec::new(), masked: Vec::new(), answer: Vec::new() })
    }

    /// Covers the rows `x` with pads that nobody had.
    fn cover(&mut self, ask: Ask, modulus: Modulus, x: &[u64], width: usize) -> Result<(), CallError> {
        self.taken.clear();
        self.pads.take(ask, x.len() / width, &mut self.taken)?;
        let masked = first(&mut self.masked, modulus.words(x.len()));
        let rows = masked.chunks_mut(modulus.words(width)).zip(x.chunks(width));
        for (pad, (row, x)) in self.taken.iter().zip(rows) {
            pad.fill(row);
            cover(modulus, row, x);
        }
        Ok(())
    }
}

impl Drop for Padded {
    fn drop(&mut self) {
        self.masked.zeroize();
        self.answer.zeroize();
    }
}

impl Route for Padded {
    fn mode(&self) -> &'static str {
        "pads"
    }

    fn call(
        &mut self,
        session: &mut Session,
        ask: Ask,
        modulus: Modulus,
        x: &[u64],
        out: &mut [u64],
    ) -> Result<(), CallError> {
        let (input, output) = session.words(ask)?;
        let none = CallError::Shape { site: ask.site.0, rows: 1, reason: "not one row is taken" };
        let most = session.rows_of_call(input + output).ok_or(none)?;
        let (coming, going) = (input, output);
        let (input, output) = session.widths(ask)?;
        for (x, out) in x.chunks(most * input).zip(out.chunks_mut(most * output)) {
            let rows = x.len() / input;
            let mut trial = Trial::new(session, ask, rows, Source::Rows)?;
            self.cover(ask, modulus, x, input)?;
            loop {
                let (masked, answer) = (&self.masked[..rows * coming], first(&mut self.answer, rows * going));
                if session.attempt(&mut trial, masked, answer, &mut || {})? {
                    break;
                }
                trial.renew();
                self.cover(ask, modulus, x, input)?;
            }
            let answers = self.answer.chunks(going).zip(out.chunks_mut(output));
            for (pad, (answer, row)) in self.taken.iter().zip(answers) {
                uncover(modulus, answer, pad.effect(), row);
            }
            self.taken.clear();
        }
        Ok(())
    }
}

impl From<PoolError> for CallError {
    fn from(error: PoolError) -> Self {
        Self::Pads(Box::new(error))
    }
}
