//! Pages of a file in this process's memory.

use std::{ffi::c_void, os::fd::BorrowedFd, ptr::NonNull};

use rustix::{
    io::Errno,
    mm::{self, MapFlags, MprotectFlags, ProtFlags},
};

use super::{Access, RegionError};

/// Pages of a file in this process's memory.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. What is in it is reached through `Region`, as atomics, and
// `SealedBytes`, where nothing changes; both may be used by any number of threads.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a region's pages, so that what is written is seen by everybody.
    pub(super) fn of_region(fd: BorrowedFd<'_>, bytes: usize, access: Access) -> Result<Self, RegionError> {
        let allowed = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        Self::new(fd, bytes, allowed, MapFlags::SHARED)
    }

    /// Maps pages that nobody can change. They are the same pages for everybody who maps them, although the mapping is
    /// called private: before Linux 6.7 the kernel shares no mapping of what is sealed against writing.
    pub(super) fn of_sealed(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, RegionError> {
        Self::new(fd, bytes, ProtFlags::READ, MapFlags::PRIVATE)
    }

    /// Maps the first `bytes` bytes of a file that has them and will have them, all pages at once.
    fn new(
        fd: BorrowedFd<'_>,
        bytes: usize,
        allowed: ProtFlags,
        sharing: MapFlags,
    ) -> Result<Self, RegionError> {
        let flags = sharing | MapFlags::POPULATE;
        // SAFETY: the kernel chooses the place, so nothing that is mapped already is replaced.
        let start = unsafe { mm::mmap(std::ptr::null_mut(), bytes, allowed, flags, fd, 0) };
        let start = start.map_err(|errno| RegionError::Map(errno.into()))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| RegionError::Map(Errno::NOMEM.into()))?;
        Ok(Self { start, bytes })
    }

    pub(super) fn forbid_writing(&mut self) -> Result<(), RegionError> {
        // SAFETY: these pages are this mapping's alone, and `&mut` says that nobody has a view of them.
        let done = unsafe { mm::mprotect(self.pages(), self.bytes, MprotectFlags::READ) };
        done.map_err(|errno| RegionError::Map(errno.into()))
    }

    fn pages(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: these pages are this mapping's alone, and every view of them borrows from it.
        // It cannot fail for a range that is mapped, and there is nothing to do if it did.
        let _ = unsafe { mm::munmap(self.pages(), self.bytes) };
    }
}
