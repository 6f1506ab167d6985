//! T3: a secret combination of known noises lies in their span, so the row's component outside of the span is
//! not masked.

use std::collections::HashMap;

use client::{
    error::CallError,
    masking::{CallSite, Direction, Mask},
    session::{Session, calls::LayerCall},
};
use model::linear_sites::SiteId;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use shmproto::layer::{CallClass, SiteOp, SitePath};

use crate::{
    algebra::{Basis, to_f64},
    executor::FloatRows,
};

/// A plausible but weak mask, unlike [`client::masking::Masking::Paper`]: every row at `sites` gets its own
/// combination of `noises` known noises with secret weights. Other rows are not masked.
#[derive(Debug)]
pub(crate) struct CombinedNoiseMask {
    noises: usize,
    sites: Vec<SiteId>,
    random: StdRng,
    pairs: HashMap<SiteId, (FloatRows, FloatRows)>,
}

impl CombinedNoiseMask {
    pub(crate) fn new(noises: usize, sites: Vec<SiteId>, seed: u64) -> Self {
        Self { noises, sites, random: StdRng::seed_from_u64(seed), pairs: HashMap::new() }
    }

    /// Gets the noises of a site and their effects from the executor.
    fn buy(&mut self, session: &mut Session, site: SiteId, widths: (usize, usize)) -> Result<(), CallError> {
        if self.pairs.contains_key(&site) {
            return Ok(());
        }
        let count = self.noises * widths.0;
        let noise: Vec<f32> = (0..count).map(|_| self.weight()).collect();
        let mut effect = vec![0.0; self.noises * widths.1];
        let ask = LayerCall {
            site,
            part: None,
            op: SiteOp::ForwardNoBias,
            path: SitePath::Linear,
            class: CallClass::Noise,
        };
        session.call(ask, &noise, &mut effect)?;
        let pairs =
            (FloatRows { width: widths.0, values: noise }, FloatRows { width: widths.1, values: effect });
        self.pairs.insert(site, pairs);
        Ok(())
    }

    /// Secret weight of variance 1.
    fn weight(&mut self) -> f32 {
        self.random.random_range(-1.0..1.0_f32) * 3.0_f32.sqrt()
    }
}

/// Computes `row += weights . rows`.
fn combine(row: &mut [f32], weights: &[f32], rows: &FloatRows) {
    for (weight, other) in weights.iter().zip(rows.iter()) {
        row.iter_mut().zip(other).for_each(|(x, n)| *x += weight * n);
    }
}

impl Mask for CombinedNoiseMask {
    fn mode(&self) -> &'static str {
        "secret combinations"
    }

    fn call(
        &mut self,
        session: &mut Session,
        place: CallSite,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        let (ask, site) = (place.ask(SitePath::Linear), place.site);
        if place.direction == Direction::Backward || !self.sites.contains(&site) {
            return session.call(ask, x, out);
        }
        let shape = &session.catalog().sites[site.0 as usize];
        let outputs = shape.parts.iter().map(|part| part.rows as usize).sum();
        let columns = shape.columns as usize;
        self.buy(session, site, (columns, outputs))?;
        let mut covered = x.to_vec();
        let mut secrets = Vec::new();
        for row in covered.chunks_exact_mut(columns) {
            let weights: Vec<f32> = (0..self.noises).map(|_| self.weight()).collect();
            combine(row, &weights, &self.pairs[&site].0);
            secrets.push(weights);
        }
        session.call(ask, &covered, out)?;
        for (row, mut weights) in out.chunks_exact_mut(outputs).zip(secrets) {
            weights.iter_mut().for_each(|weight| *weight = -*weight);
            combine(row, &weights, &self.pairs[&site].1);
        }
        Ok(())
    }
}

/// Orthogonal complement of the noises' span.
pub(crate) struct OrthogonalResidual(Basis);

impl OrthogonalResidual {
    pub(crate) fn by(noises: &FloatRows) -> Self {
        let noises: Vec<Vec<f64>> = noises.iter().map(to_f64).collect();
        Self(Basis::of(noises.iter().map(Vec::as_slice)))
    }

    pub(crate) fn of(&self, row: &[f32]) -> Vec<f64> {
        self.0.complement(&to_f64(row))
    }

    pub(crate) fn parts(&self, rows: &FloatRows) -> FloatRows {
        let bare = |row| self.of(row).into_iter().map(|x| x as f32);
        FloatRows { width: rows.width, values: rows.iter().flat_map(bare).collect() }
    }
}
