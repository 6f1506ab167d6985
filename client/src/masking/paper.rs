//! The paper's scheme: obfuscation by rotating noises.

use std::{fmt, io::Read as _};

use model::sites::SiteId;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use shmproto::layer::{Class, Dtype, Op, Path, control::Site};

use super::{Mask, PaperSettings, Place};
use crate::{
    error::CallError,
    session::{
        Session,
        calls::{Ask, has_path},
    },
};

/// The noises of a site, of unit variance, and their effects.
#[derive(Debug)]
struct Noises {
    columns: usize,
    /// `[noises, columns]`.
    noise: Vec<f32>,
    /// `[noises, outputs]`: the noise through the site, without bias.
    effect: Vec<f32>,
    /// How much of them a row gets; set by the first rows.
    scale: Option<f32>,
    /// Rows covered so far.
    used_rows: u64,
}

impl Noises {
    /// Fresh noises, whose effects the executor computes.
    fn refresh(&mut self, session: &mut Session, site: SiteId, random: &mut StdRng) -> Result<(), CallError> {
        fill_normal(random, &mut self.noise);
        let ask = Ask { site, part: None, op: Op::ForwardNoBias, path: Path::Linear, class: Class::Noise };
        session.call(ask, &self.noise, &mut self.effect)?;
        self.used_rows = 0;
        Ok(())
    }

    /// Which noise the row after `row` others of this call takes.
    fn turn(&self, row: usize) -> usize {
        let noises = self.noise.len() / self.columns;
        usize::try_from(self.used_rows % noises as u64).unwrap_or_default().wrapping_add(row) % noises
    }
}

/// Obfuscation by rotating noises.
pub(super) struct Paper {
    settings: PaperSettings,
    sites: Vec<Noises>,
    random: StdRng,
    covered: Vec<f32>,
}

impl fmt::Debug for Paper {
    /// Noises are nobody's business.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paper").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Paper {
    pub(super) fn new(
        settings: PaperSettings,
        session: &mut Session,
        told: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, CallError> {
        let PaperSettings { noises, scale, rotate_rows } = settings;
        let is_scale = scale.is_finite() && scale > 0.0;
        if !is_scale || !(1..=1024).contains(&noises) || rotate_rows == 0 {
            return Err(CallError::Masking("1 to 1024 noises of a positive scale are possible"));
        }
        if session.settings().dtype != Dtype::F32 {
            return Err(CallError::Masking("bf16 would round rows and noises together: use f32"));
        }
        let catalog = &session.catalog().sites;
        if let Some(site) = catalog.iter().position(|site| !has_path(site, Path::Linear)) {
            return Err(CallError::Nonlinear { site: u32::try_from(site).unwrap_or(u32::MAX) });
        }
        let shape = |site: &Site| {
            let outputs: usize = site.parts.iter().map(|part| part.rows as usize).sum();
            (site.columns as usize, outputs)
        };
        let shapes: Vec<_> = catalog.iter().map(shape).collect();
        let mut random = seeded()?;
        let mut sites = Vec::with_capacity(shapes.len());
        for (number, &(columns, outputs)) in (0_u32..).zip(&shapes) {
            let (noise, effect) = (vec![0.0; noises * columns], vec![0.0; noises * outputs]);
            let mut site = Noises { columns, noise, effect, scale: None, used_rows: 0 };
            site.refresh(session, SiteId(number), &mut random)?;
            sites.push(site);
            told(sites.len(), shapes.len());
        }
        Ok(Self { settings, sites, random, covered: Vec::new() })
    }
}

impl Mask for Paper {
    fn mode(&self) -> &'static str {
        "paper (obfuscation)"
    }

    fn forward(
        &mut self,
        session: &mut Session,
        Place { site, class }: Place,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        let unknown = CallError::UnknownSite { site: site.0 };
        let noises = self.sites.get_mut(site.0 as usize).ok_or(unknown)?;
        if noises.used_rows >= self.settings.rotate_rows {
            noises.refresh(session, site, &mut self.random)?;
        }
        let columns = noises.columns;
        let scale = *noises.scale.get_or_insert_with(|| self.settings.scale * typical_size(x, columns));
        self.covered.clear();
        for (row, x) in x.chunks(columns).enumerate() {
            let noise = &noises.noise[noises.turn(row) * columns..];
            self.covered.extend(x.iter().zip(noise).map(|(x, n)| x + scale * n));
        }
        let ask = Ask { site, part: None, op: Op::Forward, path: Path::Linear, class };
        session.call(ask, &self.covered, out)?;
        let outputs = noises.effect.len() / (noises.noise.len() / columns);
        for (row, out) in out.chunks_mut(outputs).enumerate() {
            let effect = &noises.effect[noises.turn(row) * outputs..];
            out.iter_mut().zip(effect).for_each(|(out, n)| *out -= scale * n);
        }
        noises.used_rows += (x.len() / columns) as u64;
        Ok(())
    }
}

/// The median of the rows' root mean squares: a single row of outliers must not set the scale for all.
fn typical_size(x: &[f32], columns: usize) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "rows are short")]
    let size = |row: &[f32]| (row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32).sqrt();
    let mut sizes: Vec<f32> = x.chunks(columns).map(size).collect();
    sizes.sort_by(f32::total_cmp);
    let median = sizes.get(sizes.len() / 2).copied().unwrap_or_default();
    // Rows of zeros, or of overflown numbers, are covered all the same.
    if median.is_finite() && median > 0.0 { median } else { 1.0 }
}

/// A generator that nobody can foresee.
fn seeded() -> Result<StdRng, CallError> {
    let mut seed = [0; 32];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut seed));
    read.map_err(|_| CallError::Masking("/dev/urandom gives no randomness: noise would be foreseeable"))?;
    Ok(StdRng::from_seed(seed))
}

/// Normal numbers of variance 1, two from two uniform ones (Box and Muller).
fn fill_normal(random: &mut StdRng, values: &mut [f32]) {
    for pair in values.chunks_mut(2) {
        // In (0, 1], whose logarithm is finite.
        let radius = (-2.0 * (1.0 - random.random::<f32>()).ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * random.random::<f32>()).sin_cos();
        pair.iter_mut().zip([radius * cos, radius * sin]).for_each(|(value, normal)| *value = normal);
    }
}
