//! Sealed shared memory, named by nothing but its descriptor.
//!
//! A [`Region`] is memory that two processes share; its maker decides whether the other may write. The region
//! is accessed as atomics only, because the other side may change it at any moment. [`SealedBytes`] can no
//! longer be changed by any process, its maker included, so they are accessed as a plain slice.
//!
//! Both kinds of memory are memfds. Every page is allocated before its first use, so lack of memory is an
//! error of the maker and never a fault of a reader. Sizes are sealed, so no process can shrink the memory
//! under a reader. A process that receives a descriptor checks all of this before it maps it, because the
//! sender may be malicious.

mod mapping;

use std::{
    io,
    ops::RangeInclusive,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    slice,
};

use rustix::{
    fs::{self, FallocateFlags, MemfdFlags, SealFlags},
    io::Errno,
};

use self::mapping::Mapping;
use crate::atomic::plain::{AtomicU32, Ordering};

/// Maximum size of a region in bytes: 64 GiB.
pub const MAX_BYTES: usize = 64 << 30;

/// Unit of a region's size in bytes: a cache line.
pub const LINE_BYTES: usize = 64;

/// Maximum length of a region's name in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// Seals of all shared memory: the size is fixed, and so are the seals.
const FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Unit of a file's block count in bytes, independent of the file system's block size.
const COUNTED_BLOCK_BYTES: u64 = 512;

/// Maximum number of attempts to seal pages that the kernel finds in use.
const MAX_SEAL_TRIES: usize = 32;

/// Error of memory that could not be shared.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The name would not be readable in the system's lists.
    #[error("{0:?} cannot name a region: give 1 to 64 letters, digits, dots or hyphens, and nothing secret")]
    Name(String),
    /// The size is zero or above the limit.
    #[error("a region of {bytes} bytes cannot be made: ask for 1 to {} bytes", MAX_BYTES)]
    Size {
        /// Size in bytes that was requested.
        bytes: usize,
    },
    /// The system created no memfd.
    #[error("shared memory cannot be made ({0}): raise the limit of open files, or free some memory")]
    Create(#[source] io::Error),
    /// The system lacks memory for the region.
    #[error(
        "there is no room for {bytes} bytes of shared memory ({source}): free memory, or lower the budget"
    )]
    NoRoom {
        /// Size in bytes that was requested.
        bytes: usize,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The contents could not be written.
    #[error("shared memory cannot be filled ({0}): see the system's log, and start again")]
    Fill(#[source] io::Error),
    /// The system refused to seal the memory.
    #[error("shared memory cannot be sealed ({0}): Linux 5.1 or later is needed")]
    Seal(#[source] io::Error),
    /// The received descriptor is no memfd.
    #[error("what was handed over is no sealable memory ({0}): refuse it, and close the connection")]
    NotMemory(#[source] io::Error),
    /// The sender could still change size, contents or seals; names the missing seals.
    #[error("the memory handed over lacks the seals {0}: refuse it, and close the connection")]
    Unsealed(String),
    /// The maker has sealed the region against writing.
    #[error("the memory handed over may only be read: map it with `Access::ReadOnly`")]
    WriteSealed,
    /// The size is not in the agreed range.
    #[error(
        "the memory handed over has {bytes} bytes, and {least} to {most} in whole lines were agreed: refuse it"
    )]
    PeerSize {
        /// Size of the memory in bytes.
        bytes: u64,
        /// Smallest agreed size in bytes.
        least: usize,
        /// Largest agreed size in bytes.
        most: usize,
    },
    /// Some pages are not allocated, so an access could find no memory.
    #[error("the memory handed over has holes: refuse it, and close the connection")]
    Holes,
    /// The system refused to map the memory.
    #[error("shared memory cannot be mapped ({0}): free memory, or raise vm.max_map_count")]
    Map(#[source] io::Error),
}

/// Access of this process to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The process only reads.
    ReadOnly,
    /// The process reads and writes.
    ReadWrite,
}

/// Access of other processes to a region that they receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAccess {
    /// Peers only read; the kernel refuses any other access.
    ReadOnly,
    /// Peers read and write.
    ReadWrite,
}

/// Content of a dropped region while other processes still have its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterDrop {
    /// The contents remain as long as a process has the descriptor.
    Memory,
    /// Only the size remains; a read finds zeros.
    Nothing,
}

/// Memory shared with other processes; unmapped when dropped.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    fd: OwnedFd,
    access: Access,
    remains: AfterDrop,
}

impl Region {
    /// Creates a zeroed region of `bytes`, rounded up to cache lines, with every page allocated, and maps it
    /// for writing. `name` appears in the lists of mappings of this process and its peers.
    pub fn create(name: &str, bytes: usize, peers: PeerAccess) -> Result<Self, RegionError> {
        let bytes = bytes.checked_next_multiple_of(LINE_BYTES).unwrap_or(bytes);
        let fd = allocate(name, bytes)?;
        // A seal on future writing does not affect existing mappings.
        let mapping = Mapping::of_region(fd.as_fd(), bytes, Access::ReadWrite)?;
        let seals = match peers {
            PeerAccess::ReadOnly => FIXED_SIZE | SealFlags::FUTURE_WRITE,
            PeerAccess::ReadWrite => FIXED_SIZE,
        };
        fs::fcntl_add_seals(&fd, seals).map_err(|errno| RegionError::Seal(errno.into()))?;
        Ok(Self { mapping, fd, access: Access::ReadWrite, remains: AfterDrop::Memory })
    }

    /// Returns the memory to the system at drop, even if other processes keep the descriptor: their later
    /// accesses find zeros and allocate new pages. Only for a region that peers may write, because the seal
    /// that keeps peers from writing also prevents this release.
    #[must_use]
    pub fn emptied_when_dropped(mut self) -> Self {
        self.remains = AfterDrop::Nothing;
        self
    }

    /// Maps a received region if it is sealed, fully allocated, and its size is in `bytes`.
    pub fn map(fd: OwnedFd, bytes: RangeInclusive<usize>, access: Access) -> Result<Self, RegionError> {
        let seals = seals_with(fd.as_fd(), FIXED_SIZE)?;
        if access == Access::ReadWrite && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(RegionError::WriteSealed);
        }
        let bytes = checked_bytes(fd.as_fd(), bytes, LINE_BYTES)?;
        let mapping = Mapping::of_region(fd.as_fd(), bytes, access)?;
        Ok(Self { mapping, fd, access, remains: AfterDrop::Memory })
    }

    /// Gives up write access, for a region that was made for a peer to write.
    pub fn into_read_only(mut self) -> Result<Self, RegionError> {
        self.mapping.forbid_writing()?;
        self.access = Access::ReadOnly;
        Ok(self)
    }

    /// Returns the descriptor, to be sent to a peer.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the size in bytes: a multiple of [`LINE_BYTES`].
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// Returns the whole region as words to read and write.
    ///
    /// # Panics
    /// Panics if the region is mapped with [`Access::ReadOnly`]; use [`Region::read_words`] then.
    #[must_use]
    pub fn words(&self) -> &[AtomicU32] {
        assert_eq!(self.access, Access::ReadWrite, "a region mapped to be read is written");
        // SAFETY:
        // 1. The mapping holds `bytes` bytes while `self` lives, and begins at a page, so it is aligned.
        // 2. Writing is allowed, as asserted above, and all access is through atomics.
        // 3. Every bit pattern is a word.
        unsafe { slice::from_raw_parts(self.mapping.start.as_ptr().cast(), self.bytes() / 4) }
    }

    /// Returns the whole region as words to read, for every kind of access.
    #[must_use]
    pub fn read_words(&self) -> &[ReadWord] {
        // SAFETY:
        // 1. and 3. as in `words`; a `ReadWord` is an `AtomicU32` by its representation.
        // 2. Relaxed or acquiring loads of four bytes are allowed for atomics in read-only memory.
        unsafe { slice::from_raw_parts(self.mapping.start.as_ptr().cast(), self.bytes() / 4) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.remains == AfterDrop::Nothing {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // A page that lies only partly in the hole would stay allocated.
            let bytes = self.bytes().next_multiple_of(rustix::param::page_size()) as u64;
            // The call fails for memory that peers may only read, which then remains with them.
            let _ = rustix::io::retry_on_intr(|| fs::fallocate(&self.fd, hole, 0, bytes));
        }
    }
}

/// Word that another process may write and this one only reads.
#[derive(Debug)]
#[repr(transparent)]
pub struct ReadWord(AtomicU32);

impl ReadWord {
    /// Returns the current value without ordering.
    #[must_use]
    pub fn relaxed(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the current value with acquire ordering: the writer's earlier releases are visible.
    #[must_use]
    pub fn acquire(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

/// Bytes shared with other processes that no process can change any more; unmapped when dropped.
#[derive(Debug)]
pub struct SealedBytes {
    mapping: Mapping,
    fd: OwnedFd,
}

/// Seals that fix size and contents.
const UNCHANGING: SealFlags = FIXED_SIZE.union(SealFlags::WRITE);

/// Seals memory that no process maps. The kernel checks whether another user holds one of the pages, and
/// gives up after a sixth of a second. While it moves or joins pages itself (large folios, compaction), that
/// may be too short, so the call is repeated.
fn seal_when_still(fd: BorrowedFd<'_>) -> Result<(), RegionError> {
    let mut tries = 0;
    loop {
        tries += 1;
        match fs::fcntl_add_seals(fd, UNCHANGING) {
            Err(Errno::BUSY) if tries < MAX_SEAL_TRIES => {}
            sealed => return sealed.map_err(|errno| RegionError::Seal(errno.into())),
        }
    }
}

impl SealedBytes {
    /// Concatenates `parts` and seals them; at least one byte, without rounding.
    pub fn build(name: &str, parts: &[&[u8]]) -> Result<Self, RegionError> {
        let bytes = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.len()));
        let bytes = bytes.ok_or(RegionError::Size { bytes: usize::MAX })?;
        let fd = allocate(name, bytes)?;
        fill(fd.as_fd(), parts).map_err(|errno| RegionError::Fill(errno.into()))?;
        seal_when_still(fd.as_fd())?;
        Ok(Self { mapping: Mapping::of_sealed(fd.as_fd(), bytes)?, fd })
    }

    /// Maps received bytes if no process can change them any more and their size is 1 to `max_bytes`.
    pub fn map(fd: OwnedFd, max_bytes: usize) -> Result<Self, RegionError> {
        seals_with(fd.as_fd(), UNCHANGING)?;
        let bytes = checked_bytes(fd.as_fd(), 1..=max_bytes, 1)?;
        Ok(Self { mapping: Mapping::of_sealed(fd.as_fd(), bytes)?, fd })
    }

    /// Returns the descriptor, to be sent to a peer.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRef<[u8]> for SealedBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY:
        // 1. The mapping holds `bytes` bytes for as long as `self` lives.
        // 2. The file has the seals WRITE, SHRINK, GROW and SEAL, made or checked before it was mapped. So
        //    the kernel lets no process write, cut or unseal it, through any descriptor or mapping.
        unsafe { slice::from_raw_parts(self.mapping.start.as_ptr(), self.mapping.bytes) }
    }
}

/// Creates an unsealed memfd of `bytes` zeros with all pages allocated.
fn allocate(name: &str, bytes: usize) -> Result<OwnedFd, RegionError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
        return Err(RegionError::Name(name.chars().take(MAX_NAME_BYTES).collect()));
    }
    if bytes == 0 || bytes > MAX_BYTES {
        return Err(RegionError::Size { bytes });
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3 cannot forbid the execution of a memfd.
        Err(Errno::INVAL) => fs::memfd_create(name, flags),
        made => made,
    };
    let fd = fd.map_err(|errno| RegionError::Create(errno.into()))?;
    let allocated =
        rustix::io::retry_on_intr(|| fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64));
    allocated.map_err(|errno| RegionError::NoRoom { bytes, source: errno.into() })?;
    Ok(fd)
}

fn fill(fd: BorrowedFd<'_>, parts: &[&[u8]]) -> rustix::io::Result<()> {
    let mut at = 0;
    for part in parts {
        let mut rest = *part;
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, rest, at))?;
            rest = rest.get(written..).filter(|_| written > 0).ok_or(Errno::IO)?;
            at += written as u64;
        }
    }
    Ok(())
}

/// Returns the seals of a received descriptor, if they include `wanted`.
fn seals_with(fd: BorrowedFd<'_>, wanted: SealFlags) -> Result<SealFlags, RegionError> {
    let seals = fs::fcntl_get_seals(fd).map_err(|errno| RegionError::NotMemory(errno.into()))?;
    let names = |(name, _)| -> &str { name };
    match wanted.difference(seals) {
        missing if missing.is_empty() => Ok(seals),
        missing => Err(RegionError::Unsealed(missing.iter_names().map(names).collect::<Vec<_>>().join(", "))),
    }
}

/// Returns a received file's size if it is in `agreed`, a multiple of `unit`, and fully allocated.
fn checked_bytes(
    fd: BorrowedFd<'_>,
    agreed: RangeInclusive<usize>,
    unit: usize,
) -> Result<usize, RegionError> {
    let stat = fs::fstat(fd).map_err(|errno| RegionError::NotMemory(errno.into()))?;
    let (least, most) = (*agreed.start(), (*agreed.end()).min(MAX_BYTES));
    let bytes = u64::try_from(stat.st_size).unwrap_or(0);
    let fitting = usize::try_from(bytes).ok();
    let fitting =
        fitting.filter(|&bytes| bytes > 0 && (least..=most).contains(&bytes) && bytes.is_multiple_of(unit));
    let fitting = fitting.ok_or(RegionError::PeerSize { bytes, least, most })?;
    let there = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(COUNTED_BLOCK_BYTES);
    if there < bytes { Err(RegionError::Holes) } else { Ok(fitting) }
}
