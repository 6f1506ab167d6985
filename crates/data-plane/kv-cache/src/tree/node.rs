//! Node of the dependency tree.

use std::time::Duration;

use types::AdapterId;

use crate::{
    namespace::Chain,
    tier::{Tier, TierSlot},
};

/// Index that stands for no node.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
pub(super) struct Links {
    pub(super) parent: u32,
    pub(super) first_child: u32,
    pub(super) previous: u32,
    pub(super) next: u32,
}

#[derive(Debug)]
pub(crate) enum NodeKind {
    /// An adapter; `None` is the base model.
    Adapter(Option<Box<AdapterId>>),
    /// A full block of these tokens.
    Block(Box<[u32]>),
}

/// [`TierSlot`] in four bytes: two bits of kind, and an index of thirty bits.
#[derive(Debug, Clone, Copy, Default)]
struct Packed(u32);

const PLACE_BITS: u32 = 30;

impl Packed {
    fn of(place: TierSlot) -> Self {
        let (kind, index) = match place {
            TierSlot::None => (0, 0),
            TierSlot::Coming(index) => (1, index),
            TierSlot::Here(index) => (2, index),
        };
        assert!(index < 1 << PLACE_BITS, "a tier has fewer than 2^{PLACE_BITS} blocks");
        Self(kind << PLACE_BITS | index)
    }

    fn place(self) -> TierSlot {
        let index = self.0 & ((1 << PLACE_BITS) - 1);
        match self.0 >> PLACE_BITS {
            0 => TierSlot::None,
            1 => TierSlot::Coming(index),
            _ => TierSlot::Here(index),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct PackedKey(i64);

impl PackedKey {
    const NONE: Self = Self(i64::MIN);

    fn get(self) -> Option<i64> {
        (self.0 != i64::MIN).then_some(self.0)
    }
}

/// Node of the tree with its state (E-03).
#[derive(Debug)]
pub(crate) struct Node {
    pub(super) stamp: u32,
    pub(super) links: Links,
    pub(super) namespace: u32,
    pub(crate) kind: NodeKind,
    places: [Packed; Tier::ALL.len()],
    /// Number of children with a place, by tier.
    pub(crate) children_in: [u32; Tier::ALL.len()],
    /// Sort keys among the eviction candidates, by tier; then among the blocks that may return to the device.
    keys: [PackedKey; Tier::ALL.len() + 1],
    /// Chain of the node's prefix on disk; stored for some nodes only.
    pub(crate) chain: Option<Box<Chain>>,
    /// Time of the last request or release.
    last_use_us: u64,
    /// Decayed number of requests.
    pub(crate) visits: f32,
    /// Whether a sequence holds the block or adapter.
    pub(crate) is_held: bool,
}

/// Index of the key among the blocks that may return.
pub(crate) const RETURNING: usize = Tier::ALL.len();

impl Default for Node {
    fn default() -> Self {
        Self::new(NodeKind::Adapter(None), NONE, NONE)
    }
}

impl Node {
    pub(super) fn new(kind: NodeKind, parent: u32, namespace: u32) -> Self {
        Self {
            stamp: 0,
            links: Links { parent, first_child: NONE, previous: NONE, next: NONE },
            namespace,
            kind,
            places: Default::default(),
            children_in: Default::default(),
            keys: [PackedKey::NONE; Tier::ALL.len() + 1],
            chain: None,
            last_use_us: 0,
            visits: 0.0,
            is_held: false,
        }
    }

    /// Returns the adapter of an adapter node; `None` for a block.
    pub(crate) fn adapter(&self) -> Option<Option<AdapterId>> {
        match &self.kind {
            NodeKind::Adapter(adapter) => Some(adapter.as_deref().copied()),
            NodeKind::Block(_) => None,
        }
    }

    /// Returns the tokens of a block; empty for an adapter.
    pub(crate) fn tokens(&self) -> &[u32] {
        match &self.kind {
            NodeKind::Block(tokens) => tokens,
            NodeKind::Adapter(_) => &[],
        }
    }

    pub(crate) fn place(&self, tier: Tier) -> TierSlot {
        self.places[tier as usize].place()
    }

    pub(super) fn set_place(&mut self, tier: Tier, place: TierSlot) {
        self.places[tier as usize] = Packed::of(place);
    }

    /// Returns the sort key among a tier's eviction candidates, or in [`RETURNING`].
    pub(crate) fn key(&self, list: usize) -> Option<i64> {
        self.keys[list].get()
    }

    pub(crate) fn set_key(&mut self, list: usize, key: i64) {
        // The minimum stands for no key, so that key is stored as its neighbour.
        self.keys[list] = PackedKey(key.max(i64::MIN + 1));
    }

    pub(crate) fn take_key(&mut self, list: usize) -> Option<i64> {
        std::mem::replace(&mut self.keys[list], PackedKey::NONE).get()
    }

    pub(crate) fn last_use(&self) -> Duration {
        Duration::from_micros(self.last_use_us)
    }

    pub(crate) fn set_last_use(&mut self, at: Duration) {
        self.last_use_us = u64::try_from(at.as_micros()).unwrap_or(u64::MAX);
    }

    /// Whether the node has a place in any tier.
    pub(crate) fn is_somewhere(&self) -> bool {
        Tier::ALL.into_iter().any(|tier| self.place(tier) != TierSlot::None)
    }

    /// Returns the fastest tier below the device that holds the node, with its slot.
    pub(crate) fn lower(&self) -> Option<(Tier, u32)> {
        Tier::LOWER.into_iter().find_map(|tier| self.place(tier).index().map(|slot| (tier, slot)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_its_tokens_and_its_entries_take_a_quarter_of_a_kilobyte_at_most() {
        let tokens = 16 * size_of::<u32>();
        // A node is in the index of children and in two lists: a key, an index and overhead each.
        let (index, lists, chain) = (8, 2 * 24, size_of::<Chain>() / 8);
        let bytes = size_of::<Node>() + tokens + index + lists + chain;
        assert!(bytes <= 256, "{bytes}, of which {} are the node", size_of::<Node>());
    }

    #[test]
    fn a_place_is_the_same_when_it_was_packed() {
        for place in [
            TierSlot::None,
            TierSlot::Coming(0),
            TierSlot::Here(0),
            TierSlot::Coming(7),
            TierSlot::Here((1 << 30) - 1),
        ] {
            assert_eq!(Packed::of(place).place(), place);
        }
    }
}
