//! The executor's end of a channel: takes calls and gives replies.

use std::sync::Arc;

use super::client::ClientChannel;
use super::layout::{LAYOUT_HASH, MAGIC, Nameplate};
use super::memory::ChannelMemory;
use super::ring::{RingReader, RingWriter};
use super::{Geometry, GeometryError, PLACE_ALIGN, SlabRangeError, Violation, rows};
use crate::atomic::Ordering::{Relaxed, SeqCst};
use crate::atomic::{AtomicU32, fence};
use crate::futex;
use crate::layer::{CallHeader, Dtype, ReplyHeader};

/// The end that takes calls and gives replies. No client can make its methods allocate, wait, or panic.
#[derive(Debug)]
pub struct ExecutorChannel {
    shared: Arc<ChannelMemory>,
    calls: RingReader,
    replies: RingWriter,
}

/// Writes the identity of a region before another process has it.
fn write_nameplate(nameplate: &Nameplate, geometry: &Geometry) {
    nameplate.magic.store(MAGIC, Relaxed);
    nameplate.layout_hash.store(LAYOUT_HASH, Relaxed);
    nameplate.slab_bytes.store(geometry.slab_bytes, Relaxed);
    nameplate.depth.store(geometry.depth, Relaxed);
}

impl ExecutorChannel {
    /// Creates a channel in memory that a client can map. Dropping this end frees the memory for both.
    ///
    /// # Errors
    /// Returns [`ChannelError::Geometry`](super::ChannelError), or `Region` if the system gives no memory.
    #[cfg(not(loom))]
    pub fn create(geometry: Geometry) -> Result<Self, super::ChannelError> {
        use crate::region::{PeerAccess, Region, RegionError};
        geometry.check()?;
        let bytes = usize::try_from(geometry.region_bytes());
        let bytes = bytes.map_err(|_| RegionError::Size { bytes: usize::MAX })?;
        let region = Region::create("holobiont-channel", bytes, PeerAccess::ReadWrite)?;
        let shared = ChannelMemory::mapped(region.emptied_when_dropped(), geometry)
            .expect("a region is as large as was asked for");
        Ok(Self::over(Arc::new(shared)))
    }

    /// Creates both ends of a channel between threads of this process, without a descriptor.
    ///
    /// # Errors
    /// Returns an error if no channel can have this geometry.
    pub fn in_process(geometry: Geometry) -> Result<(Self, ClientChannel), GeometryError> {
        geometry.check()?;
        let shared = Arc::new(ChannelMemory::on_heap(geometry));
        Ok((Self::over(Arc::clone(&shared)), ClientChannel::over(shared)))
    }

    fn over(shared: Arc<ChannelMemory>) -> Self {
        write_nameplate(&shared.head().nameplate, &shared.geometry());
        Self { shared, calls: RingReader::default(), replies: RingWriter::default() }
    }

    /// Returns the sizes of the channel.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    /// Returns the descriptor of the region for the client; `None` for an in-process channel.
    #[cfg(not(loom))]
    #[must_use]
    pub fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.shared.region().map(crate::region::Region::fd)
    }

    /// Returns the size of the region in bytes.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        self.geometry().region_bytes()
    }

    /// Whether the client's count shows new calls; costs one load.
    #[must_use]
    pub fn has_calls(&self) -> bool {
        self.calls.has_news(&self.shared.head().submitted.calls)
    }

    /// Takes the next call, if there is one. The call's rows begin within the slab; the site decides whether
    /// the rows also end within the slab.
    ///
    /// # Errors
    /// Returns the client's violation of the protocol.
    pub fn take(&mut self) -> Result<Option<CallHeader>, Violation> {
        let head = self.shared.head();
        let header = self.calls.take(self.shared.calls(), &head.submitted.calls, &head.taken.calls)?;
        let Some(header) = header else { return Ok(None) };
        let call = CallHeader::from_bytes(&header)?;
        let slab_bytes = self.geometry().slab_bytes;
        for offset in [call.input, call.output] {
            if offset >= slab_bytes || !offset.is_multiple_of(PLACE_ALIGN) {
                return Err(SlabRangeError { offset, bytes: 1, slab_bytes }.into());
            }
        }
        Ok(Some(call))
    }

    /// Copies rows out of the slab, widened to f32; arbitrary values while the client writes there.
    ///
    /// # Errors
    /// Returns a violation if the rows do not lie within the slab.
    pub fn read_rows(&self, input: u64, dtype: Dtype, out: &mut [f32]) -> Result<(), Violation> {
        let start = rows::place(&self.geometry(), input, dtype, out.len())?;
        rows::read(self.shared.slab(), start, dtype, out);
        Ok(())
    }

    /// Copies rows into the slab, rounded for bf16. Up to seven bytes after them become zero.
    ///
    /// # Errors
    /// Returns a violation if the rows do not lie within the slab; nothing was written then.
    pub fn write_rows(&self, output: u64, dtype: Dtype, rows: &[f32]) -> Result<(), Violation> {
        let start = rows::place(&self.geometry(), output, dtype, rows.len())?;
        rows::write(self.shared.slab(), start, dtype, rows);
        Ok(())
    }

    /// Gives a reply whose rows are written, and wakes the client if it sleeps.
    ///
    /// # Errors
    /// Returns [`Violation::Full`] if the client does not collect its replies.
    pub fn reply(&mut self, reply: &ReplyHeader) -> Result<(), Violation> {
        let head = self.shared.head();
        let (replied, collected) = (&head.replied.replies, &head.collected.replies);
        self.replies.publish(self.shared.replies(), replied, collected, &reply.to_bytes())?;
        // Pairs with the fence in `ClientChannel::park`. One of two fences comes first. If that one does,
        // this thread sees the flag. If this one does, the client sees the count and does not sleep.
        fence(SeqCst);
        if head.client_parked.client.load(Relaxed) != 0 {
            futex::wake(replied, 1);
        }
        Ok(())
    }

    /// Sets whether the executor sleeps on this channel, or is about to.
    pub(super) fn set_parked(&self, parked: u32) {
        self.shared.head().executor_parked.executor.store(parked, Relaxed);
    }

    /// Returns the word to sleep on, and its value while there are no calls.
    pub(super) fn futex_word(&self) -> (&AtomicU32, u32) {
        (&self.shared.head().submitted.calls, self.calls.count())
    }
}
