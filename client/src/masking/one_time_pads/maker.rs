//! Making of pads: rows from unpredictable keys, and their effects, computed with the client's own weights.

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

/// Number of rows that one pass through a site's weights computes.
const CHUNK_ROWS: u64 = 64;

/// Maximum number of sites whose finished pads wait to be written.
const MADE_AHEAD: usize = 32;

/// Maker of pads, with the client's own weights.
pub struct PadGenerator {
    base: Box<dyn EvaluateSites + Send>,
    /// Maximum bytes of pads that a pool holds.
    most_bytes: u64,
}

impl fmt::Debug for PadGenerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maker").field("most_bytes", &self.most_bytes).finish_non_exhaustive()
    }
}

impl PadGenerator {
    /// Makes a maker with this process's own weights; [`prepare`](Self::prepare) lets pools grow to
    /// `most_bytes` at most.
    #[must_use]
    pub fn new(base: Box<dyn EvaluateSites + Send>, most_bytes: u64) -> Self {
        Self { base, most_bytes }
    }

    /// Returns the hash of all sites' weights, as an executor commits to them.
    ///
    /// # Errors
    /// Fails if a site has no modular path.
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

    /// Returns the shapes of all sites.
    #[must_use]
    pub fn shapes(&self) -> Vec<PadShape> {
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let modulus = |site: &Site, op| site.modular_range(op).map_or(Modulus::Bits64, |range| range.modulus);
        let shape = |site: &Site| PadShape {
            columns: number(site.columns),
            outputs: number(site.parts.iter().map(|part| part.rows).sum()),
            moduli: [modulus(site, SiteOp::ForwardNoBias), modulus(site, SiteOp::Backward)],
        };
        self.base.sites().iter().map(shape).collect()
    }

    /// Makes pads for `tokens` tokens in some directions; calls `on_progress` with finished and requested
    /// tokens.
    ///
    /// # Errors
    /// Fails if the pads would not fit, the disk fails, or the weights cannot be evaluated.
    pub fn prepare(
        &mut self,
        pool: &mut PadPool,
        tokens: u64,
        directions: &[Direction],
        on_progress: &mut dyn FnMut(u64, u64),
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
            let computed = self.make_all(&shapes, tokens, directions, &made, on_progress);
            drop(made);
            let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // The writer's error comes first, because the computing side only sees a closed channel.
            written?;
            computed
        })
    }

    /// Makes pads of all sites chunk by chunk, so that an interrupted pool serves the number of tokens it
    /// reports. Stops when the receiver of `made` is closed.
    fn make_all(
        &mut self,
        shapes: &[PadShape],
        tokens: u64,
        directions: &[Direction],
        made: &SyncSender<PoolStep>,
        on_progress: &mut dyn FnMut(u64, u64),
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
            on_progress(done, tokens);
        }
        Ok(())
    }

    /// Makes pads of one site, beyond the size limit if necessary, because a call waits for them.
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

/// Finished pads of one site that are not written yet.
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

enum PoolStep {
    Add(NewPads),
    /// Makes the added pads available.
    Publish,
}

/// Executes all steps while later pads are computed and earlier ones are synced to disk.
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
