//! Values that one process writes and others read.

use std::os::fd::BorrowedFd;
use std::slice;

use crate::region::{PeerAccess, Region, RegionError};

/// A region that this process alone writes, so that it may use the values as plain memory.
#[derive(Debug)]
pub(crate) struct OwnValues {
    region: Region,
}

impl OwnValues {
    /// Creates zeroed values. The kernel refuses every other process to map them for writing.
    ///
    /// # Errors
    /// Returns an error if there is no memory.
    pub(crate) fn create(name: &str, values: usize) -> Result<Self, RegionError> {
        let bytes = values.checked_mul(size_of::<f32>()).ok_or(RegionError::Size { bytes: usize::MAX })?;
        Region::create(name, bytes, PeerAccess::ReadOnly).map(|region| Self { region })
    }

    /// Returns the descriptor, to be sent to readers.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    /// Returns all values; whole cache lines.
    pub(crate) fn get_mut(&mut self) -> &mut [f32] {
        let words = self.region.words();
        let (first, count) = (words.as_ptr().cast_mut().cast::<f32>(), words.len());
        // SAFETY: 1. These are the words of the mapping, which is writable and lives as long as `self`; any
        // bits are an f32. 2. This is the only writable mapping: the region was sealed against others before
        // its descriptor could leave this process. 3. `&mut self` keeps other views in this process away,
        // because the region is private to this struct.
        unsafe { slice::from_raw_parts_mut(first, count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Access;

    #[test]
    fn others_read_what_is_written_and_cannot_write() {
        let mut values = OwnValues::create("holobiont-own", 20).unwrap();
        let fd = || values.fd().try_clone_to_owned().unwrap();
        assert!(matches!(Region::map(fd(), 1..=4096, Access::ReadWrite), Err(RegionError::WriteSealed)));
        let reader = Region::map(fd(), 1..=4096, Access::ReadOnly).unwrap();
        assert_eq!(values.get_mut().len(), 32, "whole cache lines");
        values.get_mut()[19] = 1.5;
        assert_eq!(reader.read_words()[19].acquire(), 1.5f32.to_bits());
        assert!(OwnValues::create("holobiont-own", usize::MAX).is_err());
    }
}
