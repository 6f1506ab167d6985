//! The control: a noise of its own for every row, whose effect the executor that sees the row did not compute.

use client::{
    error::CallError,
    masking::{Direction, Mask, Place},
    session::Session,
};
use model::sites::SiteId;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use shmproto::layer::Path as SitePath;

use crate::executor::{Curious, Rows};

/// Size of the noise, beside rows of size 1.
const SIZE: f32 = 100.0;

/// Covers activations at `site`; other rows go as they are.
#[derive(Debug)]
pub(crate) struct Pad {
    site: SiteId,
    /// Computes the effects, and tells nobody.
    elsewhere: Curious,
    random: StdRng,
}

impl Pad {
    pub(crate) fn new(site: SiteId, elsewhere: Curious) -> Self {
        Self { site, elsewhere, random: StdRng::seed_from_u64(5) }
    }
}

impl Mask for Pad {
    fn mode(&self) -> &'static str {
        "pads"
    }

    fn call(
        &mut self,
        session: &mut Session,
        place: Place,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        let (ask, site) = (place.ask(SitePath::Linear), place.site);
        if (site, place.direction) != (self.site, Direction::Forward) {
            return session.call(ask, x, out);
        }
        let width = session.catalog().sites[site.0 as usize].columns as usize;
        let values = x.iter().map(|_| self.random.random_range(-SIZE..SIZE)).collect();
        let pad = Rows { width, values };
        let effect = self.elsewhere.evaluate(site, &pad, out.len() / pad.count());
        let covered: Vec<f32> = x.iter().zip(&pad.values).map(|(x, n)| x + n).collect();
        session.call(ask, &covered, out)?;
        out.iter_mut().zip(&effect.values).for_each(|(out, n)| *out -= n);
        Ok(())
    }
}
