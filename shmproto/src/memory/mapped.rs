//! Bytes of a mapped region, or of the heap, handed out as atomics.

use std::ptr::NonNull;
use std::slice;

use crate::atomic::AtomicU64;
use crate::line::LINE_BYTES;
use crate::region::Region;

/// A cache line of the heap.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Line([AtomicU64; LINE_BYTES / 8]);

/// Where the bytes are. Neither moves nor shrinks while this lives.
#[derive(Debug)]
enum Owner {
    Region(Region),
    Heap { _lines: Box<[Line]> },
}

/// Bytes that others may write at any moment, aligned to a cache line.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    owner: Owner,
}

// SAFETY: 1. `base` points into `owner`, which is Send and Sync itself and travels with it. 2. The bytes are reached
// through atomics only.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeros on the heap, whole lines.
    pub(crate) fn on_heap(bytes: usize) -> Self {
        let lines: Box<[Line]> = (0..bytes.div_ceil(LINE_BYTES)).map(|_| Line::default()).collect();
        let base = NonNull::from(&*lines).cast();
        Self { base, bytes: lines.len() * LINE_BYTES, owner: Owner::Heap { _lines: lines } }
    }

    /// A region's bytes.
    pub(crate) fn mapped(region: Region) -> Self {
        // Made of atomics, so writing through it is allowed where the mapping allows it.
        let base = NonNull::from(region.read_words()).cast();
        Self { base, bytes: region.bytes(), owner: Owner::Region(region) }
    }

    /// How many there are.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// `count` values of `T` from byte `offset` on.
    ///
    /// # Safety
    ///
    /// `T` consists of atomics and padding only: any bytes are a `T`, and others may change them.
    pub(crate) unsafe fn at<T>(&self, offset: usize, count: usize) -> &[T] {
        let end = count.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= self.bytes), "past the end of shared memory");
        assert!(
            (self.base.addr().get() + offset).is_multiple_of(align_of::<T>()),
            "shared memory is not aligned"
        );
        // SAFETY: 1. In bounds and aligned: asserted above. 2. The bytes live as long as `self`, which owns them.
        // 3. Any bytes are a T, and changes by others are allowed: the caller's promise.
        unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
    }

    /// The region, if it is one.
    pub(crate) fn region(&self) -> Option<&Region> {
        match &self.owner {
            Owner::Region(region) => Some(region),
            Owner::Heap { .. } => None,
        }
    }
}
