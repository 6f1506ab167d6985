//! Secret sharing over two executors that do not collude: one sees rows plus pads, the other the pads' key.
//!
//! `(x + r) W - r W = x W` modulo 2^48 or 2^64. A pad is uniform, so the rows that the first executor sees
//! are independent of `x`; the second executor sees only the key. Every attempt takes new rows of the key.

use std::{fmt, sync::Arc};

use kernels::Modulus;
use shmproto::layer::{RowSource, seeded_rows::SeededRows};
use zeroize::Zeroize as _;

use super::{
    modular::ModularRoute,
    modular_rows::{cover, first, offers, uncover},
    shapes_of, site_name,
};
use crate::{
    error::CallError,
    secrets,
    session::{
        ClientSettings, Session,
        calls::{CallAttempt, LayerCall},
        distinct_executors::DistinctExecutors,
    },
    transport::Connect,
};

/// The second executor of secret sharing.
#[derive(Debug, Clone)]
pub struct SecondExecutor {
    /// Connector to the second executor.
    pub connector: Arc<dyn Connect>,
    /// Settings of the second session.
    pub settings: ClientSettings,
}

pub(super) struct SecretShareRoute {
    second: Session,
    /// Seeded rows; those from `first` on are unused.
    draw: SeededRows,
    masked: Vec<f32>,
    answer: Vec<f32>,
    effect: Vec<f32>,
}

impl fmt::Debug for SecretShareRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shares").field("rows", &self.draw.first).finish_non_exhaustive()
    }
}

impl SecretShareRoute {
    /// Opens the second session, beside `session`.
    ///
    /// # Errors
    /// Fails if the second executor is unreachable, is the same one, or has other weights.
    pub(super) fn new(second: &SecondExecutor, session: &mut Session) -> Result<Self, CallError> {
        let own = offers(session)?;
        let mut other = Session::open(Box::new(Arc::clone(&second.connector)), second.settings.clone())?;
        let (sites, others) = (&session.catalog().sites, &other.catalog().sites);
        if sites.len() != others.len() {
            return Err(CallError::OtherWeights { site: "the number of sites".to_owned() });
        }
        let theirs = offers(&other)?;
        let differs = |at: &usize| own[*at] != theirs[*at] || sites[*at].columns != others[*at].columns;
        if let Some(site) = (0..own.len()).find(differs) {
            let number = model::linear_sites::SiteId(u32::try_from(site).unwrap_or(u32::MAX));
            return Err(CallError::OtherWeights { site: site_name(number, &shapes_of(sites)) });
        }
        DistinctExecutors::keep(session, &mut other)?;
        let draw = SeededRows { key: secrets::key()?, first: 0 };
        let (masked, answer, effect) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { second: other, draw, masked, answer, effect })
    }

    fn take(&mut self, rows: usize) -> Result<SeededRows, CallError> {
        let draw = self.draw.clone();
        let next = self.draw.first.checked_add(rows as u64);
        self.draw.first = next.ok_or(CallError::Masking("all rows of this session's key are used up"))?;
        Ok(draw)
    }

    /// Makes one attempt at some rows with new pads; false if another attempt is worthwhile.
    fn attempt(
        &mut self,
        session: &mut Session,
        trials: &mut [CallAttempt; 2],
        modulus: Modulus,
        (x, rows): (&[u64], usize),
        out: &mut [u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<bool, CallError> {
        let draw = self.take(rows)?;
        let Self { second, masked, answer, effect, .. } = self;
        let masked = first(masked, modulus.words(x.len()));
        let answered_words = modulus.words(out.len());
        let (answer, effect) = (first(answer, answered_words), first(effect, answered_words));
        let ([first_trial, second_trial], mut answered) = (trials, None);
        // The seed goes first: the second executor computes while this client covers and sends the rows.
        let mut first_meanwhile = || {
            draw.fill(0, masked.len() / rows, masked);
            cover(modulus, masked, x);
            answered = Some(session.attempt(first_trial, masked, answer, meanwhile));
        };
        let seconded = second.attempt(second_trial, &*draw.to_words(), effect, &mut first_meanwhile)?;
        if answered.transpose()? != Some(true) || !seconded {
            return Ok(false);
        }
        uncover(modulus, answer, effect, out);
        Ok(true)
    }
}

impl Drop for SecretShareRoute {
    fn drop(&mut self) {
        for rows in [&mut self.masked, &mut self.answer, &mut self.effect] {
            rows.zeroize();
        }
    }
}

impl ModularRoute for SecretShareRoute {
    fn mode(&self) -> &'static str {
        "shares"
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
        let most = |session: &Session| {
            let none = CallError::Shape { site: ask.site.0, rows: 1, reason: "not one row is taken" };
            session.rows_of_call(input + output).ok_or(none)
        };
        let most = most(session)?.min(most(&self.second)?);
        let (input, output) = session.widths(ask)?;
        for (x, out) in x.chunks(most * input).zip(out.chunks_mut(most * output)) {
            let rows = x.len() / input;
            let mut trials = [
                CallAttempt::new(session, ask, rows, RowSource::Rows)?,
                CallAttempt::new(&self.second, ask, rows, RowSource::Draw)?,
            ];
            while !self.attempt(session, &mut trials, modulus, (x, rows), out, meanwhile)? {
                trials.iter_mut().for_each(CallAttempt::renew);
            }
        }
        Ok(())
    }
}
