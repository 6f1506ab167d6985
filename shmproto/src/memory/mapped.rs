//! Bytes of a mapped region, or of the heap, as atomics.

use std::ptr::NonNull;
use std::slice;

use crate::atomic::AtomicU64;
use crate::cache_line::LINE_BYTES;
use crate::region::Region;

#[repr(C, align(64))]
#[derive(Debug, Default)]
struct CacheLine([AtomicU64; LINE_BYTES / 8]);

/// Owner of the bytes, which neither move nor shrink while it lives.
#[derive(Debug)]
enum Owner {
    Region(Region),
    Heap(Box<[CacheLine]>),
}

/// Bytes that another process may write at any moment, aligned to a cache line.
#[derive(Debug)]
pub(crate) struct AtomicMemory {
    owner: Owner,
}

impl AtomicMemory {
    pub(crate) fn on_heap(bytes: usize) -> Self {
        Self { owner: Owner::Heap((0..bytes.div_ceil(LINE_BYTES)).map(|_| CacheLine::default()).collect()) }
    }

    pub(crate) fn mapped(region: Region) -> Self {
        Self { owner: Owner::Region(region) }
    }

    pub(crate) fn bytes(&self) -> usize {
        match &self.owner {
            Owner::Region(region) => region.bytes(),
            Owner::Heap(lines) => size_of_val(&**lines),
        }
    }

    /// Returns the first byte; must be called again after a move, which invalidates earlier pointers.
    fn base(&self) -> NonNull<u8> {
        match &self.owner {
            // The words are atomics, so a write through the pointer is allowed where the mapping allows it.
            Owner::Region(region) => NonNull::from(region.read_words()).cast(),
            Owner::Heap(lines) => NonNull::from(&**lines).cast(),
        }
    }

    /// Returns `count` values of `T` from byte `offset` on.
    ///
    /// # Safety
    /// `T` must consist of atomics and padding only: any bytes are a `T`, and others may change them.
    pub(crate) unsafe fn at<T>(&self, offset: usize, count: usize) -> &[T] {
        let end = count.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= self.bytes()), "past the end of shared memory");
        let base = self.base();
        assert!((base.addr().get() + offset).is_multiple_of(align_of::<T>()), "shared memory is not aligned");
        // SAFETY: 1. In bounds and aligned: asserted above. 2. The bytes live as long as `self`, which owns
        // them. 3. Any bytes are a T, and changes by others are allowed: the caller's promise.
        unsafe { slice::from_raw_parts(base.as_ptr().add(offset).cast(), count) }
    }

    pub(crate) fn region(&self) -> Option<&Region> {
        match &self.owner {
            Owner::Region(region) => Some(region),
            Owner::Heap(_) => None,
        }
    }
}
