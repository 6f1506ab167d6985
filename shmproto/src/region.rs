//! Sealed shared memory, named by nothing but its descriptor.
//!
//! A [`Region`] is memory that two processes share; whoever made it says whether the other may write. It is seen as
//! atomics only, because the other side may change it at any moment. [`SealedBytes`] are bytes that nobody can change
//! any more, its maker included, so they are seen as a plain slice.
//!
//! Both are memfds. Every page is there before anybody touches it, so memory that runs out is an error of the maker
//! and never a fault of a reader. Their sizes are sealed, so nobody can shrink one under a reader. A process that is
//! given a descriptor checks all of this before it maps it, because whoever gave it may mean harm.

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

/// Most bytes a region may have: 64 GiB.
pub const MAX_BYTES: usize = 64 << 30;

/// A region's size is a multiple of this: a cache line.
pub const LINE_BYTES: usize = 64;

/// Most bytes a region's name may have.
pub const MAX_NAME_BYTES: usize = 64;

/// What everything has that is handed over: its size stands, and so do its seals.
const FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Bytes of a block in which a file's allocation is counted, whatever the file system's own block is.
const COUNTED_BLOCK_BYTES: u64 = 512;

/// How often the kernel is asked to seal pages that it finds in use.
const MAX_SEAL_TRIES: usize = 32;

/// Why memory could not be shared.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The name would not be readable where the system lists it.
    #[error("{0:?} cannot name a region: give 1 to 64 letters, digits, dots or hyphens, and nothing secret")]
    Name(String),
    /// The size is none, or above the limit.
    #[error("a region of {bytes} bytes cannot be made: ask for 1 to {} bytes", MAX_BYTES)]
    Size {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The system makes no memfd.
    #[error("shared memory cannot be made ({0}): raise the limit of open files, or free some memory")]
    Create(#[source] io::Error),
    /// There is no memory for it.
    #[error(
        "there is no room for {bytes} bytes of shared memory ({source}): free memory, or lower the budget"
    )]
    NoRoom {
        /// Bytes asked for.
        bytes: usize,
        /// What the system says.
        source: io::Error,
    },
    /// The contents could not be written.
    #[error("shared memory cannot be filled ({0}): see the system's log, and start again")]
    Fill(#[source] io::Error),
    /// The system does not seal.
    #[error("shared memory cannot be sealed ({0}): Linux 5.1 or later is needed")]
    Seal(#[source] io::Error),
    /// What was handed over is no memfd.
    #[error("what was handed over is no sealable memory ({0}): refuse it, and close the connection")]
    NotMemory(#[source] io::Error),
    /// Whoever has the descriptor could still change what must stand.
    #[error("the memory handed over lacks the seals {0}: refuse it, and close the connection")]
    Unsealed(String),
    /// Whoever made it keeps others from writing.
    #[error("the memory handed over may only be read: map it with `Access::ReadOnly`")]
    WriteSealed,
    /// It has another size than was agreed.
    #[error(
        "the memory handed over has {bytes} bytes, and {least} to {most} in whole lines were agreed: refuse it"
    )]
    PeerSize {
        /// Bytes it has.
        bytes: u64,
        /// Fewest bytes agreed.
        least: usize,
        /// Most bytes agreed.
        most: usize,
    },
    /// Not all of its pages are there, so that touching it could find no memory.
    #[error("the memory handed over has holes: refuse it, and close the connection")]
    Holes,
    /// The system does not map it.
    #[error("shared memory cannot be mapped ({0}): free memory, or raise vm.max_map_count")]
    Map(#[source] io::Error),
}

/// What this process does with a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It reads.
    ReadOnly,
    /// It reads and writes.
    ReadWrite,
}

/// What other processes may do with a region that is handed to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAccess {
    /// They read; the kernel refuses them anything else.
    ReadOnly,
    /// They read and write.
    ReadWrite,
}

/// What is left of a region when this process lets go of it and others still have its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Remains {
    /// Everything, for as long as somebody has it.
    Memory,
    /// Its size; reading it finds zeros.
    Nothing,
}

/// Memory shared with other processes; unmapped when dropped.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    fd: OwnedFd,
    access: Access,
    remains: Remains,
}

impl Region {
    /// Makes a region of zeros, `bytes` rounded up to whole lines, every page of it there, and maps it to be written.
    ///
    /// `name` shows in this process's and its peers' lists of mappings.
    pub fn create(name: &str, bytes: usize, peers: PeerAccess) -> Result<Self, RegionError> {
        let bytes = bytes.checked_next_multiple_of(LINE_BYTES).unwrap_or(bytes);
        let fd = allocate(name, bytes)?;
        // A seal on future writing leaves the mappings alone that there are.
        let mapping = Mapping::of_region(fd.as_fd(), bytes, Access::ReadWrite)?;
        let seals = match peers {
            PeerAccess::ReadOnly => FIXED_SIZE | SealFlags::FUTURE_WRITE,
            PeerAccess::ReadWrite => FIXED_SIZE,
        };
        fs::fcntl_add_seals(&fd, seals).map_err(|errno| RegionError::Seal(errno.into()))?;
        Ok(Self { mapping, fd, access: Access::ReadWrite, remains: Remains::Memory })
    }

    /// When this is dropped the memory is given back to the system, although others keep the descriptor: whoever touches
    /// it then finds zeros, and pays for them. For a region that was made for a peer to write, since the seal that keeps
    /// peers from writing also keeps its maker from this.
    #[must_use]
    pub fn emptied_when_dropped(mut self) -> Self {
        self.remains = Remains::Nothing;
        self
    }

    /// Maps a region that was handed over, if it is sealed, whole, and has `bytes` bytes.
    pub fn map(fd: OwnedFd, bytes: RangeInclusive<usize>, access: Access) -> Result<Self, RegionError> {
        let seals = seals_with(fd.as_fd(), FIXED_SIZE)?;
        if access == Access::ReadWrite && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(RegionError::WriteSealed);
        }
        let bytes = checked_bytes(fd.as_fd(), bytes, LINE_BYTES)?;
        let mapping = Mapping::of_region(fd.as_fd(), bytes, access)?;
        Ok(Self { mapping, fd, access, remains: Remains::Memory })
    }

    /// Gives up writing, for a region that was made for a peer to write.
    pub fn into_read_only(mut self) -> Result<Self, RegionError> {
        self.mapping.forbid_writing()?;
        self.access = Access::ReadOnly;
        Ok(self)
    }

    /// The descriptor, to be handed over.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes it has: a multiple of [`LINE_BYTES`].
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// The whole region as words to read and write.
    ///
    /// # Panics
    /// If it was mapped with [`Access::ReadOnly`]: then [`Region::read_words`] is what there is.
    #[must_use]
    pub fn words(&self) -> &[AtomicU32] {
        assert_eq!(self.access, Access::ReadWrite, "a region mapped to be read is written");
        // SAFETY:
        // 1. The mapping holds `bytes` bytes for as long as `self` lives, and begins at a page, so it is aligned.
        // 2. It may be written, as was just asserted, and it is never seen but through atomics.
        // 3. Every bit pattern is a word.
        unsafe { slice::from_raw_parts(self.mapping.start.as_ptr().cast(), self.bytes() / 4) }
    }

    /// The whole region as words to read, whatever it was mapped for.
    #[must_use]
    pub fn read_words(&self) -> &[ReadWord] {
        // SAFETY:
        // 1. and 3. as in `words`; a `ReadWord` is an `AtomicU32` by its representation.
        // 2. Loads of four bytes, relaxed or acquiring, are what atomics do on memory that may only be read.
        unsafe { slice::from_raw_parts(self.mapping.start.as_ptr().cast(), self.bytes() / 4) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.remains == Remains::Nothing {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // A page that lies in the hole only in part would stay.
            let bytes = self.bytes().next_multiple_of(rustix::param::page_size()) as u64;
            // It fails for memory that peers may only read, and then stays theirs.
            let _ = rustix::io::retry_on_intr(|| fs::fallocate(&self.fd, hole, 0, bytes));
        }
    }
}

/// A word that another process may be writing and this one only reads.
#[derive(Debug)]
#[repr(transparent)]
pub struct ReadWord(AtomicU32);

impl ReadWord {
    /// The word as it is now, with no order to anything else.
    #[must_use]
    pub fn relaxed(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// The word as it is now; what its writer released before is seen too.
    #[must_use]
    pub fn acquire(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

/// Bytes shared with other processes that nobody can change any more; unmapped when dropped.
#[derive(Debug)]
pub struct SealedBytes {
    mapping: Mapping,
    fd: OwnedFd,
}

/// What keeps bytes as they are.
const UNCHANGING: SealFlags = FIXED_SIZE.union(SealFlags::WRITE);

/// Seals what nobody maps. The kernel looks whether anybody else holds one of the pages, and gives up after a sixth of a second;
/// where it is moving or joining pages of its own accord (large folios, compaction), that may be too short.
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
    /// Puts `parts` one behind the other and seals them. At least one byte, no rounding.
    pub fn build(name: &str, parts: &[&[u8]]) -> Result<Self, RegionError> {
        let bytes = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.len()));
        let bytes = bytes.ok_or(RegionError::Size { bytes: usize::MAX })?;
        let fd = allocate(name, bytes)?;
        fill(fd.as_fd(), parts).map_err(|errno| RegionError::Fill(errno.into()))?;
        seal_when_still(fd.as_fd())?;
        Ok(Self { mapping: Mapping::of_sealed(fd.as_fd(), bytes)?, fd })
    }

    /// Maps bytes that were handed over, if nobody can change them any more and they are 1 to `max_bytes`.
    pub fn map(fd: OwnedFd, max_bytes: usize) -> Result<Self, RegionError> {
        seals_with(fd.as_fd(), UNCHANGING)?;
        let bytes = checked_bytes(fd.as_fd(), 1..=max_bytes, 1)?;
        Ok(Self { mapping: Mapping::of_sealed(fd.as_fd(), bytes)?, fd })
    }

    /// The descriptor, to be handed over.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRef<[u8]> for SealedBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY:
        // 1. The mapping holds `bytes` bytes for as long as `self` lives.
        // 2. The file has the seals WRITE, SHRINK, GROW and SEAL, made or checked before it was mapped: the kernel lets
        //    nobody write, cut or unseal it, through whatever descriptor or mapping.
        unsafe { slice::from_raw_parts(self.mapping.start.as_ptr(), self.mapping.bytes) }
    }
}

/// A memfd of `bytes` zeros, all of them there, not sealed yet.
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
        // Before Linux 6.3 a memfd could not be kept from being executed.
        Err(Errno::INVAL) => fs::memfd_create(name, flags),
        made => made,
    };
    let fd = fd.map_err(|errno| RegionError::Create(errno.into()))?;
    let room = rustix::io::retry_on_intr(|| fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64));
    room.map_err(|errno| RegionError::NoRoom { bytes, source: errno.into() })?;
    Ok(fd)
}

/// Writes `parts` one behind the other.
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

/// The seals of what was handed over, if `wanted` are among them.
fn seals_with(fd: BorrowedFd<'_>, wanted: SealFlags) -> Result<SealFlags, RegionError> {
    let seals = fs::fcntl_get_seals(fd).map_err(|errno| RegionError::NotMemory(errno.into()))?;
    let names = |(name, _)| -> &str { name };
    match wanted.difference(seals) {
        missing if missing.is_empty() => Ok(seals),
        missing => Err(RegionError::Unsealed(missing.iter_names().map(names).collect::<Vec<_>>().join(", "))),
    }
}

/// The size of what was handed over, if it was agreed, is a multiple of `unit`, and every page is there.
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
