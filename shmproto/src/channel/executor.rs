//! The executor's end of a channel.

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

/// The end that takes calls and gives replies. Nothing here allocates, waits, or panics whatever the client does.
#[derive(Debug)]
pub struct ExecutorChannel {
    shared: Arc<ChannelMemory>,
    calls: RingReader,
    replies: RingWriter,
}

/// Says what a region is, before anybody else has it.
fn write_nameplate(nameplate: &Nameplate, geometry: &Geometry) {
    nameplate.magic.store(MAGIC, Relaxed);
    nameplate.layout_hash.store(LAYOUT_HASH, Relaxed);
    nameplate.slab_bytes.store(geometry.slab_bytes, Relaxed);
    nameplate.depth.store(geometry.depth, Relaxed);
}

impl ExecutorChannel {
    /// A channel in memory that a client's process can be given. When this end is dropped the memory is given back, whatever
    /// descriptor the client keeps.
    ///
    /// # Errors
    ///
    /// [`ChannelError::Geometry`](super::ChannelError), or `Region` if there is no memory.
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

    /// Both ends of a channel of threads of this process: the same protocol without a descriptor.
    ///
    /// # Errors
    ///
    /// If no channel can have this geometry.
    pub fn in_process(geometry: Geometry) -> Result<(Self, ClientChannel), GeometryError> {
        geometry.check()?;
        let shared = Arc::new(ChannelMemory::on_heap(geometry));
        Ok((Self::over(Arc::clone(&shared)), ClientChannel::over(shared)))
    }

    fn over(shared: Arc<ChannelMemory>) -> Self {
        write_nameplate(&shared.head().nameplate, &shared.geometry());
        Self { shared, calls: RingReader::default(), replies: RingWriter::default() }
    }

    /// How large the channel is.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    /// The descriptor of the region, to be handed over; none for a channel of one process.
    #[cfg(not(loom))]
    #[must_use]
    pub fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.shared.region().map(crate::region::Region::fd)
    }

    /// Bytes of the region.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        self.geometry().region_bytes()
    }

    /// Whether the client says that there are calls: one load.
    #[must_use]
    pub fn has_calls(&self) -> bool {
        self.calls.has_news(&self.shared.head().submitted.calls)
    }

    /// The next call, if there is one. Its places begin in the slab; whether they end there depends on the site.
    ///
    /// # Errors
    ///
    /// What the client did wrong.
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

    /// Copies rows out of the slab, widened to f32. What they hold while the client writes there is anything.
    ///
    /// # Errors
    ///
    /// If they do not lie in the slab.
    pub fn read_rows(&self, input: u64, dtype: Dtype, out: &mut [f32]) -> Result<(), Violation> {
        let start = rows::place(&self.geometry(), input, dtype, out.len())?;
        rows::read(self.shared.slab(), start, dtype, out);
        Ok(())
    }

    /// Copies rows into the slab, rounded if they travel as bf16. Up to seven bytes behind them become zero.
    ///
    /// # Errors
    ///
    /// If they do not lie in the slab; nothing was written then.
    pub fn write_rows(&self, output: u64, dtype: Dtype, rows: &[f32]) -> Result<(), Violation> {
        let start = rows::place(&self.geometry(), output, dtype, rows.len())?;
        rows::write(self.shared.slab(), start, dtype, rows);
        Ok(())
    }

    /// Gives a reply, after its rows were written, and wakes the client if it sleeps.
    ///
    /// # Errors
    ///
    /// [`Violation::Full`] if the client does not take its replies.
    pub fn reply(&mut self, reply: &ReplyHeader) -> Result<(), Violation> {
        let head = self.shared.head();
        let (replied, collected) = (&head.replied.replies, &head.collected.replies);
        self.replies.publish(self.shared.replies(), replied, collected, &reply.to_bytes())?;
        // Pairs with the fence in `ClientChannel::park`. Of two fences one is first. If it is that one, the flag is seen
        // here. If it is this one, the client sees the count and does not sleep.
        fence(SeqCst);
        if head.client_parked.client.load(Relaxed) != 0 {
            futex::wake(replied, 1);
        }
        Ok(())
    }

    /// Says whether the executor sleeps on this channel, or is about to.
    pub(super) fn set_parked(&self, parked: u32) {
        self.shared.head().executor_parked.executor.store(parked, Relaxed);
    }

    /// The word to sleep on, and what stands there while there are no calls.
    pub(super) fn futex_word(&self) -> (&AtomicU32, u32) {
        (&self.shared.head().submitted.calls, self.calls.count())
    }
}
