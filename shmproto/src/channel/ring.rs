//! A ring with one writer and one reader. Each end keeps its own count and believes the other's only within bounds.

use super::Violation;
use super::layout::RingSlot;
use crate::atomic::AtomicU32;
use crate::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::layer::HEADER_BYTES;

/// The writing end.
#[derive(Debug, Default)]
pub(super) struct RingWriter {
    /// Headers written so far. What stands in shared memory is a copy.
    written: u32,
}

/// The reading end.
#[derive(Debug, Default)]
pub(super) struct RingReader {
    /// Headers read so far.
    read: u32,
}

/// How far `ahead` is before `ours`, in a ring of `depth` places.
fn distance(ahead: u32, ours: u32, depth: u32, count: u32) -> Result<u32, Violation> {
    match ahead.wrapping_sub(ours) {
        distance if distance <= depth => Ok(distance),
        _ => Err(Violation::Jump { count, ours, depth }),
    }
}

impl RingWriter {
    /// Writes a header into the next place, if there is one.
    ///
    /// # Errors
    ///
    /// [`Violation::Full`], or [`Violation::Jump`] if the reader counts what was never written.
    pub(super) fn publish(
        &mut self,
        places: &[RingSlot],
        written: &AtomicU32,
        read: &AtomicU32,
        header: &[u8; HEADER_BYTES],
    ) -> Result<(), Violation> {
        let depth = u32::try_from(places.len()).unwrap_or(u32::MAX);
        // SYNC POINT place: acquires the places whose content the reader has copied.
        let count = read.load(Acquire);
        if distance(self.written, count, depth, count)? == depth {
            return Err(Violation::Full);
        }
        places[self.written as usize & (places.len() - 1)].write(header);
        self.written = self.written.wrapping_add(1);
        // SYNC POINT header: releases the header, and the rows that were written before it.
        written.store(self.written, Release);
        Ok(())
    }
}

impl RingReader {
    /// How many headers were read: what a sleeper expects of the other count.
    pub(super) fn count(&self) -> u32 {
        self.read
    }

    /// Whether the other count says that there is something.
    pub(super) fn has_news(&self, written: &AtomicU32) -> bool {
        written.load(Relaxed) != self.read
    }

    /// Copies the next header out, if there is one.
    ///
    /// # Errors
    ///
    /// [`Violation::Jump`] if the writer counts more than there is room for.
    pub(super) fn take(
        &mut self,
        places: &[RingSlot],
        written: &AtomicU32,
        read: &AtomicU32,
    ) -> Result<Option<[u8; HEADER_BYTES]>, Violation> {
        let depth = u32::try_from(places.len()).unwrap_or(u32::MAX);
        // SYNC POINT header: acquires what the writer wrote before this count.
        let count = written.load(Acquire);
        if distance(count, self.read, depth, count)? == 0 {
            return Ok(None);
        }
        let header = places[self.read as usize & (places.len() - 1)].copy();
        self.read = self.read.wrapping_add(1);
        // SYNC POINT place: releases the place, after the copy, to the writer.
        read.store(self.read, Release);
        Ok(Some(header))
    }
}

impl RingSlot {
    fn write(&self, header: &[u8; HEADER_BYTES]) {
        for (word, bytes) in self.0.iter().zip(header.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Relaxed);
        }
    }

    fn copy(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        for (word, bytes) in self.0.iter().zip(header.as_chunks_mut::<8>().0) {
            *bytes = word.load(Relaxed).to_le_bytes();
        }
        header
    }
}
