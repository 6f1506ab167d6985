//! Pages of a file that are mapped into this process.

use std::{ffi::c_void, os::fd::BorrowedFd, ptr::NonNull};

use rustix::{
    io::Errno,
    mm::{self, MapFlags, MprotectFlags, ProtFlags},
};

use super::{Access, RegionError};

#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. Its contents are accessed through `Region`, as
// atomics, or through `SealedBytes`, which never changes; any number of threads may use both.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a region's pages, so that all processes see each write.
    pub(super) fn of_region(fd: BorrowedFd<'_>, bytes: usize, access: Access) -> Result<Self, RegionError> {
        let allowed = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        Self::new(fd, bytes, allowed, MapFlags::SHARED)
    }

    /// Maps sealed pages. All processes share the same pages although the mapping is private: before Linux
    /// 6.7 the kernel refuses shared mappings of memory that is sealed against writing.
    pub(super) fn of_sealed(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, RegionError> {
        Self::new(fd, bytes, ProtFlags::READ, MapFlags::PRIVATE)
    }

    /// Maps the first `bytes` bytes of a file, which must exist now and later, with all pages at once.
    fn new(
        fd: BorrowedFd<'_>,
        bytes: usize,
        allowed: ProtFlags,
        sharing: MapFlags,
    ) -> Result<Self, RegionError> {
        let flags = sharing | MapFlags::POPULATE;
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let start = unsafe { mm::mmap(std::ptr::null_mut(), bytes, allowed, flags, fd, 0) };
        let start = start.map_err(|errno| RegionError::Map(errno.into()))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| RegionError::Map(Errno::NOMEM.into()))?;
        Ok(Self { start, bytes })
    }

    pub(super) fn forbid_writing(&mut self) -> Result<(), RegionError> {
        // SAFETY: these pages belong to this mapping alone, and `&mut` proves that no view of them exists.
        let done = unsafe { mm::mprotect(self.pages(), self.bytes, MprotectFlags::READ) };
        done.map_err(|errno| RegionError::Map(errno.into()))
    }

    fn pages(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: these pages belong to this mapping alone, and every view of them borrows from it. The call
        // cannot fail for a mapped range, and an error could not be handled.
        let _ = unsafe { mm::munmap(self.pages(), self.bytes) };
    }
}
