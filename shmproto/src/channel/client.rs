//! The client's end of a channel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::memory::ChannelMemory;
use super::ring::{RingReader, RingWriter};
use super::{Geometry, GeometryError, RingFull, SlabRangeError, Violation, layout, rows};
use crate::atomic::Ordering::{Relaxed, SeqCst};
use crate::atomic::{fence, spin_loop};
use crate::futex;
use crate::layer::{CallHeader, Dtype, ReplyHeader};
use crate::region::RegionError;

/// Looks at the ring between two looks at the clock.
const LOOKS_PER_TICK: u32 = 64;

/// Why a client cannot use the region it was given.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// It is not what was agreed.
    #[error("the channel's region cannot be mapped ({0}): open a session again")]
    Region(#[from] RegionError),
    /// The executor spoke of an impossible size.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The region's size is not that of such a channel.
    #[error("a region of {found} bytes is no channel, which has {wanted}: open a session again")]
    Size {
        /// Bytes the executor spoke of.
        found: u64,
        /// Bytes of such a channel.
        wanted: u64,
    },
    /// The region is no channel.
    #[error("the region begins with {found:#018x} and is no channel: open a session again")]
    Magic {
        /// What it begins with.
        found: u64,
    },
    /// The executor was built from another layout.
    #[error(
        "the executor's layout is {found:#018x} and this client's {:#018x}: use both of one release",
        layout::LAYOUT_HASH
    )]
    Layout {
        /// The executor's hash.
        found: u64,
    },
}

/// The end that submits calls and takes replies. One thread; nothing here allocates, or calls the system, but for
/// sleeping and waking.
#[derive(Debug)]
pub struct ClientChannel {
    shared: Arc<ChannelMemory>,
    calls: RingWriter,
    replies: RingReader,
}

impl ClientChannel {
    /// Maps the region that the executor handed over, after checking it.
    ///
    /// # Errors
    ///
    /// See [`JoinError`].
    #[cfg(not(loom))]
    pub fn join(fd: std::os::fd::OwnedFd, region_bytes: u64, geometry: Geometry) -> Result<Self, JoinError> {
        use crate::region::{Access, Region};
        geometry.check()?;
        let wanted = geometry.region_bytes();
        let size = || JoinError::Size { found: region_bytes, wanted };
        let bytes = usize::try_from(region_bytes).ok().filter(|_| region_bytes == wanted).ok_or_else(size)?;
        let region = Region::map(fd, bytes..=bytes, Access::ReadWrite)?;
        let shared = ChannelMemory::mapped(region, geometry).ok_or_else(size)?;
        let nameplate = &shared.head().nameplate;
        let found = nameplate.magic.load(Relaxed);
        if found != layout::MAGIC {
            return Err(JoinError::Magic { found });
        }
        let found = nameplate.layout_hash.load(Relaxed);
        if found != layout::LAYOUT_HASH {
            return Err(JoinError::Layout { found });
        }
        Ok(Self::over(Arc::new(shared)))
    }

    pub(super) fn over(shared: Arc<ChannelMemory>) -> Self {
        Self { shared, calls: RingWriter::default(), replies: RingReader::default() }
    }

    /// How large the channel is.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    /// Copies rows into the slab, rounded if they travel as bf16. Up to seven bytes behind them become zero.
    ///
    /// # Errors
    ///
    /// If they do not lie in the slab; nothing was written then.
    pub fn write_rows(&self, input: u64, dtype: Dtype, rows: &[f32]) -> Result<(), SlabRangeError> {
        let start = rows::place(&self.geometry(), input, dtype, rows.len())?;
        rows::write(self.shared.slab(), start, dtype, rows);
        Ok(())
    }

    /// Copies rows out of the slab, widened to f32.
    ///
    /// # Errors
    ///
    /// If they do not lie in the slab.
    pub fn read_rows(&self, output: u64, dtype: Dtype, out: &mut [f32]) -> Result<(), SlabRangeError> {
        let start = rows::place(&self.geometry(), output, dtype, out.len())?;
        rows::read(self.shared.slab(), start, dtype, out);
        Ok(())
    }

    /// Submits a call whose rows are written, and wakes the executor if it sleeps.
    ///
    /// # Errors
    ///
    /// If the executor has taken none of the calls that fill the ring.
    pub fn submit(&mut self, call: &CallHeader) -> Result<(), RingFull> {
        let head = self.shared.head();
        let (submitted, taken) = (&head.submitted.calls, &head.taken.calls);
        // An executor that counts what it never got has no room either.
        self.calls.publish(self.shared.calls(), submitted, taken, &call.to_bytes()).map_err(|_| RingFull)?;
        // Pairs with the fence in `bell::park`, as in `ExecutorChannel::reply`.
        fence(SeqCst);
        if head.executor_parked.executor.load(Relaxed) != 0 {
            futex::wake(submitted, 1);
        }
        Ok(())
    }

    /// The next reply, if there is one.
    ///
    /// # Errors
    ///
    /// What the executor did wrong.
    pub fn try_take(&mut self) -> Result<Option<ReplyHeader>, Violation> {
        let head = self.shared.head();
        let (replied, collected) = (&head.replied.replies, &head.collected.replies);
        let header = self.replies.take(self.shared.replies(), replied, collected)?;
        Ok(header.map(|header| ReplyHeader::from_bytes(&header)).transpose()?)
    }

    /// The next reply: spins for `spin` at most, then sleeps; `None` if none came within `limit` of beginning to sleep.
    /// Whether the executor still lives is seen on the control socket.
    ///
    /// # Errors
    ///
    /// What the executor did wrong.
    pub fn wait(&mut self, spin: Duration, limit: Duration) -> Result<Option<ReplyHeader>, Violation> {
        if let Some(reply) = self.spin(spin)? {
            return Ok(Some(reply));
        }
        let start = (!limit.is_zero()).then(Instant::now);
        loop {
            let slept = start.map_or(Duration::ZERO, |start| start.elapsed());
            self.park(limit.saturating_sub(slept));
            match self.try_take()? {
                None if start.is_some_and(|start| start.elapsed() < limit) => {}
                reply => return Ok(reply),
            }
        }
    }

    fn spin(&mut self, limit: Duration) -> Result<Option<ReplyHeader>, Violation> {
        let first = self.try_take()?;
        if first.is_some() || limit.is_zero() {
            return Ok(first);
        }
        let start = Instant::now();
        while start.elapsed() < limit {
            for _ in 0..LOOKS_PER_TICK {
                spin_loop();
                if self.replies.has_news(&self.shared.head().replied.replies) {
                    return self.try_take();
                }
            }
        }
        Ok(None)
    }

    /// Sleeps until there is a reply, or for no reason, or until the limit.
    fn park(&self, limit: Duration) {
        let head = self.shared.head();
        head.client_parked.client.store(1, Relaxed);
        // Pairs with the fence in `ExecutorChannel::reply`.
        fence(SeqCst);
        let (replied, seen) = (&head.replied.replies, self.replies.count());
        if replied.load(Relaxed) == seen {
            // If it changes before this sleeps, it returns at once.
            futex::wait(replied, seen, limit);
        }
        head.client_parked.client.store(0, Relaxed);
    }
}
