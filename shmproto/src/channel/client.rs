//! The client's end of a channel: submits calls and collects replies.

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

/// Polls of the ring between two reads of the clock.
const LOOKS_PER_TICK: u32 = 64;

/// Error of a client that cannot use the region that it received.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The region does not have the agreed size or seals.
    #[error("the channel's region cannot be mapped ({0}): open a session again")]
    Region(#[from] RegionError),
    /// The executor stated a geometry that is out of range.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The region's size does not match the geometry.
    #[error("a region of {found} bytes is no channel, which has {wanted}: open a session again")]
    Size {
        /// Size in bytes that the executor stated.
        found: u64,
        /// Size in bytes of such a channel.
        wanted: u64,
    },
    /// The region is not a channel.
    #[error("the region begins with {found:#018x} and is no channel: open a session again")]
    Magic {
        /// First eight bytes of the region.
        found: u64,
    },
    /// Executor and client were built with different layouts.
    #[error(
        "the executor's layout is {found:#018x} and this client's {:#018x}: use both of one release",
        layout::LAYOUT_HASH
    )]
    Layout {
        /// Layout hash of the executor.
        found: u64,
    },
}

/// The end that submits calls and collects replies, for one thread. The methods do not allocate, and make
/// system calls only to sleep and to wake the executor.
#[derive(Debug)]
pub struct ClientChannel {
    shared: Arc<ChannelMemory>,
    calls: RingWriter,
    replies: RingReader,
}

impl ClientChannel {
    /// Maps and checks the region that the executor handed over.
    ///
    /// # Errors
    /// Returns a [`JoinError`] if the region is no channel of this geometry.
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

    /// Returns the sizes of the channel.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    /// Copies rows into the slab, rounded for bf16. Up to seven bytes after them become zero.
    ///
    /// # Errors
    /// Returns an error if the rows do not lie within the slab; nothing was written then.
    pub fn write_rows(&self, input: u64, dtype: Dtype, rows: &[f32]) -> Result<(), SlabRangeError> {
        let start = rows::place(&self.geometry(), input, dtype, rows.len())?;
        rows::write(self.shared.slab(), start, dtype, rows);
        Ok(())
    }

    /// Copies rows out of the slab, widened to f32.
    ///
    /// # Errors
    /// Returns an error if the rows do not lie within the slab.
    pub fn read_rows(&self, output: u64, dtype: Dtype, out: &mut [f32]) -> Result<(), SlabRangeError> {
        let start = rows::place(&self.geometry(), output, dtype, out.len())?;
        rows::read(self.shared.slab(), start, dtype, out);
        Ok(())
    }

    /// Submits a call whose rows are written, and wakes the executor if it sleeps.
    ///
    /// # Errors
    /// Returns [`RingFull`] if the executor has taken none of the calls that fill the ring.
    pub fn submit(&mut self, call: &CallHeader) -> Result<(), RingFull> {
        let head = self.shared.head();
        let (submitted, taken) = (&head.submitted.calls, &head.taken.calls);
        // An executor that counts calls that it never got makes the ring full too.
        self.calls.publish(self.shared.calls(), submitted, taken, &call.to_bytes()).map_err(|_| RingFull)?;
        // Pairs with the fence in `doorbell::park`, as in `ExecutorChannel::reply`.
        fence(SeqCst);
        if head.executor_parked.executor.load(Relaxed) != 0 {
            futex::wake(submitted, 1);
        }
        Ok(())
    }

    /// Takes the next reply, if there is one.
    ///
    /// # Errors
    /// Returns the executor's violation of the protocol.
    pub fn try_take(&mut self) -> Result<Option<ReplyHeader>, Violation> {
        let head = self.shared.head();
        let (replied, collected) = (&head.replied.replies, &head.collected.replies);
        let header = self.replies.take(self.shared.replies(), replied, collected)?;
        Ok(header.map(|header| ReplyHeader::from_bytes(&header)).transpose()?)
    }

    /// Waits for the next reply: spins for at most `spin`, then sleeps; `None` if no reply came within
    /// `limit` of the beginning of the sleep. Only the control socket shows whether the executor still runs.
    ///
    /// # Errors
    /// Returns the executor's violation of the protocol.
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

    /// Sleeps until a reply comes, until the limit, or spuriously shorter.
    fn park(&self, limit: Duration) {
        let head = self.shared.head();
        head.client_parked.client.store(1, Relaxed);
        // Pairs with the fence in `ExecutorChannel::reply`.
        fence(SeqCst);
        let (replied, seen) = (&head.replied.replies, self.replies.count());
        if replied.load(Relaxed) == seen {
            // A change of the word before the sleep makes this call return at once.
            futex::wait(replied, seen, limit);
        }
        head.client_parked.client.store(0, Relaxed);
    }
}
