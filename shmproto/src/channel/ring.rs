//! Ring with one writer and one reader. Each end keeps its own count and checks the bounds of the other's.

use super::Violation;
use super::layout::RingSlot;
use crate::atomic::AtomicU32;
use crate::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::layer::HEADER_BYTES;

#[derive(Debug, Default)]
pub(super) struct RingWriter {
    /// Number of headers written so far; shared memory holds a copy.
    written: u32,
}

#[derive(Debug, Default)]
pub(super) struct RingReader {
    read: u32,
}

/// Returns how far `ahead` is before `ours`; an error if that is more than the ring's `depth`.
fn distance(ahead: u32, ours: u32, depth: u32, count: u32) -> Result<u32, Violation> {
    match ahead.wrapping_sub(ours) {
        distance if distance <= depth => Ok(distance),
        _ => Err(Violation::Jump { count, ours, depth }),
    }
}

impl RingWriter {
    /// Writes a header into the next ring entry.
    ///
    /// # Errors
    /// Returns [`Violation::Full`], or [`Violation::Jump`] if the reader counts unwritten headers.
    pub(super) fn publish(
        &mut self,
        places: &[RingSlot],
        written: &AtomicU32,
        read: &AtomicU32,
        header: &[u8; HEADER_BYTES],
    ) -> Result<(), Violation> {
        let depth = u32::try_from(places.len()).unwrap_or(u32::MAX);
        // SYNC POINT place: acquires the entries whose content the reader has copied.
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
    /// Returns the number of headers read: the value on which a sleeper waits.
    pub(super) fn count(&self) -> u32 {
        self.read
    }

    /// Whether the writer's count shows new headers.
    pub(super) fn has_news(&self, written: &AtomicU32) -> bool {
        written.load(Relaxed) != self.read
    }

    /// Copies the next header, if there is one.
    ///
    /// # Errors
    /// Returns [`Violation::Jump`] if the writer counts more headers than fit the ring.
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
        // SYNC POINT place: releases the entry, after the copy, to the writer.
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
