//! Masking as in the paper: obfuscation by rotating noises.

use std::{fmt, io::Read as _};

use model::linear_sites::SiteId;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use shmproto::layer::{CallClass, Dtype, SiteOp, SitePath, control::Site};

use super::{CallSite, Direction, Mask, NoiseSettings};
use crate::{
    error::CallError,
    session::{Session, calls::LayerCall},
};

/// Noises of a site in one direction, of unit variance, and their effects.
#[derive(Debug)]
struct SiteNoise {
    /// Elements of a row, and of its answer.
    widths: (usize, usize),
    /// `[noises, width of a row]`; empty until the first rows.
    noise: Vec<f32>,
    /// `[noises, width of an answer]`: the noise through the site, without bias.
    effect: Vec<f32>,
    next: usize,
    /// Number of rows that the noises may still cover.
    left_rows: u64,
    /// Size of the first rows; only activations use it.
    size: Option<f32>,
}

impl SiteNoise {
    fn none(widths: (usize, usize)) -> Self {
        Self { widths, noise: Vec::new(), effect: Vec::new(), next: 0, left_rows: 0, size: None }
    }

    /// Draws fresh noises, whose effects the executor computes.
    fn refresh(
        &mut self,
        session: &mut Session,
        place: CallSite,
        settings: NoiseSettings,
        random: &mut StdRng,
    ) -> Result<(), CallError> {
        let op = match place.direction {
            Direction::Forward => SiteOp::ForwardNoBias,
            Direction::Backward => SiteOp::Backward,
        };
        self.noise.resize(settings.noises * self.widths.0, 0.0);
        self.effect.resize(settings.noises * self.widths.1, 0.0);
        fill_normal(random, &mut self.noise);
        let ask = LayerCall { op, class: CallClass::Noise, ..place.ask(SitePath::Linear) };
        session.call(ask, &self.noise, &mut self.effect)?;
        // Until here a failed call leaves `left_rows` at 0, so noises without known effects cover no row.
        (self.next, self.left_rows) = (0, settings.rotate_rows);
        Ok(())
    }

    /// Returns the noise of row `row` in this call.
    fn noise_index(&self, row: usize) -> usize {
        (self.next + row) % (self.noise.len() / self.widths.0)
    }

    /// Returns the size of `rows`, the unit of the noise's scale.
    fn size(&mut self, direction: Direction, rows: &[f32]) -> f32 {
        match direction {
            Direction::Forward => *self.size.get_or_insert_with(|| typical_size(rows, self.widths.0)),
            // Gradients get a new size for each call: they lose orders of magnitude during training.
            Direction::Backward => largest(rows),
        }
    }

    /// Writes `rows` plus `scale` times their noises to `covered`.
    fn cover(&self, rows: &[f32], scale: f32, covered: &mut Vec<f32>) {
        covered.clear();
        for (row, x) in rows.chunks(self.widths.0).enumerate() {
            let noise = &self.noise[self.noise_index(row) * self.widths.0..];
            covered.extend(x.iter().zip(noise).map(|(x, n)| x + scale * n));
        }
    }

    /// Subtracts the effects of the noises from the answers.
    fn uncover(&self, answers: &mut [f32], scale: f32) {
        for (row, answer) in answers.chunks_mut(self.widths.1).enumerate() {
            let effect = &self.effect[self.noise_index(row) * self.widths.1..];
            answer.iter_mut().zip(effect).for_each(|(answer, n)| *answer -= scale * n);
        }
    }

    fn pass(&mut self, rows: usize) {
        self.next = self.noise_index(rows);
        self.left_rows = self.left_rows.saturating_sub(rows as u64);
    }
}

#[derive(Debug)]
struct SiteNoises {
    activations: SiteNoise,
    gradients: SiteNoise,
}

impl SiteNoises {
    fn of(&mut self, direction: Direction) -> &mut SiteNoise {
        match direction {
            Direction::Forward => &mut self.activations,
            Direction::Backward => &mut self.gradients,
        }
    }
}

pub(super) struct RotatingNoise {
    settings: NoiseSettings,
    sites: Vec<SiteNoises>,
    random: StdRng,
    covered: Vec<f32>,
}

impl fmt::Debug for RotatingNoise {
    /// Noises are secret and not printed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paper").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl RotatingNoise {
    pub(super) fn new(
        settings: NoiseSettings,
        session: &mut Session,
        on_progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, CallError> {
        let NoiseSettings { noises, scale, rotate_rows } = settings;
        let is_scale = scale.is_finite() && scale > 0.0;
        if !is_scale || !(1..=1024).contains(&noises) || rotate_rows == 0 {
            return Err(CallError::Masking("use 1 to 1024 noises of a positive scale"));
        }
        if session.settings().dtype != Dtype::F32 {
            return Err(CallError::Masking("bf16 would round rows and noises together: use f32"));
        }
        let catalog = &session.catalog().sites;
        if let Some(site) = catalog.iter().position(|site| !site.has_path(SitePath::Linear)) {
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
            let place =
                CallSite { site: SiteId(number), direction: Direction::Forward, class: CallClass::Noise };
            let mut activations = SiteNoise::none((columns, outputs));
            activations.refresh(session, place, settings, &mut random)?;
            // Noises for gradients are drawn with the first gradients, because few clients train.
            sites.push(SiteNoises { activations, gradients: SiteNoise::none((outputs, columns)) });
            on_progress(sites.len(), shapes.len());
        }
        Ok(Self { settings, sites, random, covered: Vec::new() })
    }
}

impl Mask for RotatingNoise {
    fn mode(&self) -> &'static str {
        "paper (obfuscation)"
    }

    fn call(
        &mut self,
        session: &mut Session,
        place: CallSite,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        let unknown = CallError::UnknownSite { site: place.site.0 };
        let site = self.sites.get_mut(place.site.0 as usize).ok_or(unknown)?;
        let noises = site.of(place.direction);
        if noises.left_rows == 0 {
            noises.refresh(session, place, self.settings, &mut self.random)?;
        }
        let scale = self.settings.scale * noises.size(place.direction, rows);
        noises.cover(rows, scale, &mut self.covered);
        session.call(place.ask(SitePath::Linear), &self.covered, out)?;
        noises.uncover(out, scale);
        noises.pass(rows.len() / noises.widths.0);
        Ok(())
    }
}

/// Returns the median of the rows' root mean squares, so that a single outlier does not set the scale.
fn typical_size(x: &[f32], columns: usize) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "rows are short")]
    let size = |row: &[f32]| (row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32).sqrt();
    let mut sizes: Vec<f32> = x.chunks(columns).map(size).collect();
    sizes.sort_by(f32::total_cmp);
    usable(sizes.get(sizes.len() / 2).copied().unwrap_or_default())
}

/// Returns the largest magnitude of the rows. A gradient at the head has one peak, at the target token, which
/// noise scaled by its root mean square would not hide.
fn largest(rows: &[f32]) -> f32 {
    usable(rows.iter().fold(0.0, |most, x| most.max(x.abs())))
}

/// Replaces a size that is 0 or not finite by 1, so that such rows are covered too.
fn usable(size: f32) -> f32 {
    if size.is_finite() && size > 0.0 { size } else { 1.0 }
}

/// Returns a generator with an unpredictable seed.
fn seeded() -> Result<StdRng, CallError> {
    let mut seed = [0; 32];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut seed));
    read.map_err(|_| {
        CallError::Masking("/dev/urandom returned no random bytes: noise would be predictable")
    })?;
    Ok(StdRng::from_seed(seed))
}

/// Fills `values` with normal numbers of variance 1, two from two uniform ones (Box and Muller).
fn fill_normal(random: &mut StdRng, values: &mut [f32]) {
    for pair in values.chunks_mut(2) {
        // The argument is in (0, 1], so its logarithm is finite.
        let radius = (-2.0 * (1.0 - random.random::<f32>()).ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * random.random::<f32>()).sin_cos();
        pair.iter_mut().zip([radius * cos, radius * sin]).for_each(|(value, normal)| *value = normal);
    }
}
