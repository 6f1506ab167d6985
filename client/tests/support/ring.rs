//! A base whose ring path follows its definition, one product after the other.

use std::{path::Path, sync::Arc};

use client::{
    masking::{
        Masking, RowProtection,
        one_time_pads::{Pads, maker::PadGenerator, pool::PadPool},
        secret_sharing::SecondExecutor,
    },
    transport::{Connect, loopback::Loopback},
};
use kernels::Activations;
use model::{
    linear_sites::{EvaluateError, EvaluateSites, ModularSite, Site, SiteCall, SiteId, SiteOp, SitePath},
    resident::ResidentModel,
};

use super::{catalog, resident, settings};

/// Weights are integers times 2^-24.
const EXPONENT: i32 = -24;

/// Hook that changes an answer of the ring path before it is sent.
pub type TamperHook = Box<dyn FnMut(SiteCall, &mut [u64]) + Send>;

pub struct ModularTestBase {
    base: ResidentModel,
    sites: Vec<Site>,
    /// Integers of each site, `[outputs, columns]`.
    weights: Vec<Vec<i64>>,
    tampering: Option<TamperHook>,
}

impl ModularTestBase {
    pub fn new(path: &Path) -> (Self, bool) {
        let (mut base, is_exact) = resident(path);
        let mut sites = base.sites().to_vec();
        let mut weights = Vec::new();
        for (site, number) in sites.iter_mut().zip(0..) {
            let own = integers(&mut base, SiteId(number), site);
            site.ring = Some(modular_site(site, &own));
            weights.push(own);
        }
        (Self { base, sites, weights, tampering: None }, is_exact)
    }

    pub fn tampered(self, tampering: TamperHook) -> Self {
        Self { tampering: Some(tampering), ..self }
    }

    pub fn with_another_weight(mut self, site: usize) -> Self {
        self.weights[site][0] += 1;
        self.sites[site].ring = Some(modular_site(&self.sites[site], &self.weights[site]));
        self
    }

    pub fn executor(self, is_exact: bool) -> Loopback {
        let catalog = catalog(&self.base, &self.sites, is_exact);
        Loopback::new(Box::new(self), &catalog, Vec::new())
    }
}

pub fn ring_executor(path: &Path) -> Loopback {
    let (base, is_exact) = ModularTestBase::new(path);
    base.executor(is_exact)
}

pub fn maker(path: &Path, most_bytes: u64) -> PadGenerator {
    PadGenerator::new(Box::new(ModularTestBase::new(path).0), most_bytes)
}

pub fn pool(path: &Path, directory: &Path) -> PadPool {
    let maker = maker(path, 0);
    PadPool::create(directory, maker.commitment().unwrap(), &maker.shapes()).unwrap()
}

/// Pads for the model at `path`; missing ones are made.
pub fn pads(path: &Path, directory: &Path) -> Pads {
    Pads::new(pool(path, directory), Some(maker(path, 1 << 30)))
}

/// Exact arithmetic without masking.
pub const RING: Masking = Masking::Off { path: SitePath::Ring };

pub fn shares(second: impl Connect + 'static) -> RowProtection {
    RowProtection::Shares(Arc::new(SecondExecutor { connector: Arc::new(second), settings: settings() }))
}

fn outputs(site: &Site) -> usize {
    site.parts.iter().map(|part| part.rows).sum()
}

/// Weights of a site in units of 2^-24, each read through a row with a single 1.
fn integers(base: &mut ResidentModel, number: SiteId, site: &Site) -> Vec<i64> {
    let (columns, outputs) = (site.columns, outputs(site));
    let mut ones = Activations::default();
    ones.reshape(columns, columns);
    ones.values_mut().fill(0.0);
    ones.values_mut().iter_mut().step_by(columns + 1).for_each(|one| *one = 1.0);
    let mut seen = vec![0.0; columns * outputs];
    let call = SiteCall { site: number, part: None, op: SiteOp::ForwardNoBias, path: SitePath::Linear };
    base.evaluate(call, &mut ones, &mut seen).unwrap();
    let mut weights = vec![0; columns * outputs];
    for (column, row) in seen.chunks(outputs).enumerate() {
        for (output, &weight) in row.iter().enumerate() {
            weights[output * columns + column] =
                (f64::from(weight) * f64::from(1 << 24)).round_ties_even() as i64;
        }
    }
    weights
}

fn modular_site(site: &Site, weights: &[i64]) -> ModularSite {
    let magnitude = |weight: &i64| weight.unsigned_abs();
    let forward = weights.chunks(site.columns).map(|row| row.iter().map(magnitude).sum()).max();
    let backward =
        (0..site.columns).map(|at| weights.iter().skip(at).step_by(site.columns).map(magnitude).sum()).max();
    let bytes: Vec<u8> = weights.iter().flat_map(|&weight| (weight as i32).to_le_bytes()).collect();
    let l1 = [forward.unwrap(), backward.unwrap()];
    ModularSite { weight_exponent: EXPONENT, l1, commitment: blake3::hash(&bytes).into() }
}

impl EvaluateSites for ModularTestBase {
    fn sites(&self) -> &[Site] {
        &self.sites
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        if call.path != SitePath::Ring {
            return self.base.evaluate(call, x, out);
        }
        assert!(call.part.is_none() && call.op != SiteOp::Forward, "whole sites, without bias");
        let (site, weights) = (&self.sites[call.site.0 as usize], &self.weights[call.site.0 as usize]);
        let (columns, outputs) = (site.columns, outputs(site));
        let number_bytes = site.modular_range(call.op).unwrap().modulus.bytes();
        let x = unpacked(number_bytes, x.values());
        let mut answers = Vec::new();
        if call.op == SiteOp::Backward {
            for g in x.chunks(outputs) {
                let mut row = vec![0_u64; columns];
                for (g, weights) in g.iter().zip(weights.chunks(columns)) {
                    row.iter_mut()
                        .zip(weights)
                        .for_each(|(y, w)| *y = y.wrapping_add(g.wrapping_mul(*w as u64)));
                }
                answers.extend(row);
            }
        } else {
            for x in x.chunks(columns) {
                answers.extend(weights.chunks(columns).map(|weights| {
                    x.iter()
                        .zip(weights)
                        .fold(0_u64, |sum, (x, w)| sum.wrapping_add(x.wrapping_mul(*w as u64)))
                }));
            }
        }
        if let Some(tampering) = &mut self.tampering {
            tampering(call, &mut answers);
        }
        let bytes: Vec<u8> =
            answers.iter().flat_map(|answer| answer.to_le_bytes()[..number_bytes].to_vec()).collect();
        for (word, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *word = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }
}

/// Unpacks unsigned numbers of `number_bytes` bytes from 32-bit words.
pub fn unpacked(number_bytes: usize, words: &[f32]) -> Vec<u64> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let word = |number: &[u8]| number.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    bytes.chunks(number_bytes).map(word).collect()
}
