//! How pads are made: numbers from keys that nobody can foresee, taken through weights of one's own.

use std::{
    fmt,
    sync::mpsc::{self, Receiver, SyncSender},
    thread,
};

use kernels::Modulus;
use model::linear_sites::{EvaluateSites, ModularSite, Site, SiteId, SiteOp};
use shmproto::layer::seeded_rows::{self, Key};
use zeroize::Zeroizing;

use super::{
    file::UnsyncedFile,
    pool::{PadPool, PadShape, PoolError},
};
use crate::{
    error::CallError,
    masking::{self, Direction, verify::evaluate},
    secrets,
};
use shmproto::layer::control::ModularWeights;

/// Rows that are made together: a pass through a site's weights each.
const CHUNK_ROWS: u64 = 64;

/// Sites whose pads may be made and not yet written.
const MADE_AHEAD: usize = 32;

/// Makes pads.
pub struct PadMaker {
    base: Box<dyn EvaluateSites + Send>,
    /// Most bytes of pads that are left.
    most_bytes: u64,
}

impl fmt::Debug for PadMaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maker").field("most_bytes", &self.most_bytes).finish_non_exhaustive()
    }
}

impl PadMaker {
    /// With weights of this process's own; pools get no larger than `most_bytes`.
    #[must_use]
    pub fn new(base: Box<dyn EvaluateSites + Send>, most_bytes: u64) -> Self {
        Self { base, most_bytes }
    }

    /// The hash of all sites' weights, as an executor commits to them.
    ///
    /// # Errors
    /// A site has no ring path.
    pub fn commitment(&self) -> Result<[u8; 32], CallError> {
        let ring = |(site, number): (&Site, u32)| {
            let ring = site.ring.filter(ModularSite::is_usable);
            let ModularSite { weight_exponent, l1, commitment } =
                ring.ok_or(CallError::NoRing { site: number })?;
            Ok(ModularWeights { weight_exponent, l1, commitment })
        };
        let rings: Result<Vec<_>, CallError> = self.base.sites().iter().zip(0..).map(ring).collect();
        Ok(masking::commitment(&rings?))
    }

    /// The shapes of all sites.
    #[must_use]
    pub fn shapes(&self) -> Vec<PadShape> {
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let modulus = |site: &Site, op| site.ring_room(op).map_or(Modulus::Bits64, |room| room.modulus);
        let shape = |site: &Site| PadShape {
            columns: number(site.columns),
            outputs: number(site.parts.iter().map(|part| part.rows).sum()),
            moduli: [modulus(site, SiteOp::ForwardNoBias), modulus(site, SiteOp::Backward)],
        };
        self.base.sites().iter().map(shape).collect()
    }

    /// Makes pads for `tokens` tokens in some directions; tells `told` how many of how many it has made.
    ///
    /// # Errors
    /// They would not fit, the disk fails, or the weights cannot be computed with.
    pub fn prepare(
        &mut self,
        pool: &mut PadPool,
        tokens: u64,
        directions: &[Direction],
        told: &mut dyn FnMut(u64, u64),
    ) -> Result<(), CallError> {
        let token_bytes: u64 = directions.iter().map(|&direction| pool.token_bytes(direction)).sum();
        let left = self.most_bytes.saturating_sub(pool.bytes());
        let wanted = tokens.saturating_mul(token_bytes);
        if wanted > left {
            let fit = left.checked_div(token_bytes).unwrap_or(0);
            return Err(PoolError::Budget { tokens, wanted, left, fit }.into());
        }
        let shapes = pool.shapes().to_vec();
        thread::scope(|scope| {
            let (made, written) = mpsc::sync_channel(MADE_AHEAD);
            let writer = scope.spawn(move || write(pool, &written));
            let computed = self.make_all(&shapes, tokens, directions, &made, told);
            drop(made);
            let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // Whoever cannot go on for want of a writer says nothing of why.
            written?;
            computed
        })
    }

    /// Makes pads of all sites in step, so that a pool whose making is interrupted serves as many tokens as it says; gives them to
    /// `made` until nobody takes them.
    fn make_all(
        &mut self,
        shapes: &[PadShape],
        tokens: u64,
        directions: &[Direction],
        made: &SyncSender<PoolStep>,
        told: &mut dyn FnMut(u64, u64),
    ) -> Result<(), CallError> {
        let mut done = 0;
        while done < tokens {
            let rows = CHUNK_ROWS.min(tokens - done);
            for (&shape, site) in shapes.iter().zip(0..) {
                for &direction in directions {
                    let pads = self.pads(SiteId(site), shape, direction, rows)?;
                    if made.send(PoolStep::Add(pads)).is_err() {
                        return Ok(());
                    }
                }
            }
            if made.send(PoolStep::Publish).is_err() {
                return Ok(());
            }
            done += rows;
            told(done, tokens);
        }
        Ok(())
    }

    /// Makes pads of one site; whatever they take, since somebody waits for them.
    pub(super) fn make(
        &mut self,
        pool: &mut PadPool,
        site: SiteId,
        direction: Direction,
        rows: u64,
    ) -> Result<(), CallError> {
        let shape = pool.shapes().get(site.0 as usize).copied();
        let shape = shape.ok_or(CallError::UnknownSite { site: site.0 })?;
        let written = self.pads(site, shape, direction, rows)?.add_to(pool)?;
        written.map_or(Ok(()), UnsyncedFile::sync)?;
        Ok(pool.publish()?)
    }

    /// Pads of one site.
    fn pads(
        &mut self,
        site: SiteId,
        shape: PadShape,
        direction: Direction,
        rows: u64,
    ) -> Result<NewPads, CallError> {
        let (input, output) = shape.words(direction);
        let rows = usize::try_from(rows).unwrap_or(usize::MAX);
        let keys = secrets::keys(rows)?;
        let mut numbers = Zeroizing::new(vec![0.0; rows * input]);
        seeded_rows::fill_first(&keys, &mut numbers);
        let mut effects = Zeroizing::new(vec![0.0; rows * output]);
        evaluate(&mut *self.base, (site, None), direction, &numbers, &mut effects)?;
        Ok(NewPads { site, direction, keys, effects })
    }
}

/// Pads of one site, made and not yet written.
struct NewPads {
    site: SiteId,
    direction: Direction,
    keys: Vec<Key>,
    effects: Zeroizing<Vec<f32>>,
}

impl NewPads {
    fn add_to(&self, pool: &mut PadPool) -> Result<Option<UnsyncedFile>, PoolError> {
        pool.add(self.site, self.direction, &self.keys, &self.effects)
    }
}

/// What is to be done with a pool.
enum PoolStep {
    /// Add these.
    Add(NewPads),
    /// Let all that was added count.
    Publish,
}

/// Does all steps, while the next ones are made, and while what was added before goes to the disk.
fn write(pool: &mut PadPool, steps: &Receiver<PoolStep>) -> Result<(), PoolError> {
    thread::scope(|scope| {
        let (written, to_sync) = mpsc::channel::<UnsyncedFile>();
        let (synced, outcomes) = mpsc::channel();
        scope.spawn(move || to_sync.into_iter().try_for_each(|file| synced.send(file.sync())));
        let mut on_the_way = 0;
        for step in steps {
            match step {
                PoolStep::Add(made) => {
                    let added = made.add_to(pool)?.map(|file| written.send(file));
                    on_the_way += usize::from(matches!(added, Some(Ok(()))));
                }
                PoolStep::Publish => {
                    outcomes.iter().take(on_the_way).collect::<Result<(), _>>()?;
                    on_the_way = 0;
                    pool.publish()?;
                }
            }
        }
        Ok(())
    })
}
