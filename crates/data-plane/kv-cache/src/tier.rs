//! Memory tiers in which a block can be.

/// Kind of memory; the first is the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Memory of the device, where the forward pass computes.
    Device,
    /// Memory of the host.
    Host,
    /// File on a disk.
    Disk,
}

impl Tier {
    /// All tiers, the fastest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// The tiers below the device.
    pub const LOWER: [Self; 2] = [Self::Host, Self::Disk];
}

/// Place of a node in a tier: the index of its block or slot, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TierSlot {
    /// The node has no place in the tier.
    #[default]
    None,
    /// The node has a place, and its bytes are on their way.
    Coming(u32),
    /// The node's bytes are at this place.
    Here(u32),
}

impl TierSlot {
    /// Returns the index of the place, if there is one.
    #[must_use]
    pub fn index(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Coming(index) | Self::Here(index) => Some(index),
        }
    }

    /// Whether the bytes are at the place.
    #[must_use]
    pub fn is_here(self) -> bool {
        matches!(self, Self::Here(_))
    }

    /// Whether the bytes are on their way.
    #[must_use]
    pub fn is_coming(self) -> bool {
        matches!(self, Self::Coming(_))
    }
}

#[derive(Debug)]
pub(crate) struct FreeSlots {
    free: Vec<u32>,
    total: u32,
}

impl FreeSlots {
    pub(crate) fn new(total: u32) -> Self {
        Self { free: (0..total).rev().collect(), total }
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn used(&self) -> usize {
        self.total as usize - self.free.len()
    }

    pub(crate) fn allocate(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub(crate) fn give_back(&mut self, slot: u32) {
        debug_assert!(slot < self.total && !self.free.contains(&slot), "slot {slot} is free already");
        self.free.push(slot);
    }

    /// Takes the slots that an earlier process used.
    pub(crate) fn claim(&mut self, taken: &std::collections::HashSet<u32>) {
        self.free.retain(|slot| !taken.contains(slot));
    }
}
