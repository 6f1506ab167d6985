//! The tiers: where a block can be.

/// A kind of memory; the first is the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Where the forward pass computes.
    Device,
    /// Memory of the host.
    Host,
    /// A file.
    Disk,
}

impl Tier {
    /// All tiers, the fastest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// Those below the device.
    pub const LOWER: [Self; 2] = [Self::Host, Self::Disk];
}

/// Whether a node has a place in a tier: the index of its block or slot there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TierSlot {
    /// It has none.
    #[default]
    None,
    /// It has one, and its bytes are on their way.
    Coming(u32),
    /// Its bytes are there.
    Here(u32),
}

impl TierSlot {
    /// The index of the place, if there is one.
    #[must_use]
    pub fn index(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Coming(index) | Self::Here(index) => Some(index),
        }
    }

    /// The bytes are there.
    #[must_use]
    pub fn is_here(self) -> bool {
        matches!(self, Self::Here(_))
    }

    /// The bytes are on their way.
    #[must_use]
    pub fn is_coming(self) -> bool {
        matches!(self, Self::Coming(_))
    }
}

/// The slots of a lower tier that nobody has.
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

    /// Takes what was in use before this process.
    pub(crate) fn claim(&mut self, taken: &std::collections::HashSet<u32>) {
        self.free.retain(|slot| !taken.contains(slot));
    }
}
