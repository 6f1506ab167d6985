//! Checks the invariants of the cache.

use std::collections::HashSet;

use types::BlockId;

use super::Cache;
use crate::{
    eviction_candidates::worth_of,
    replacement::Variant,
    tier::{Tier, TierSlot},
    tree::RETURNING,
};

/// Largest change of a worth without requests (ln 2), with a margin.
const WORTH_MOVES: f64 = 0.7;

/// Description of a violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the cache is not what it must be: {0}")]
pub struct InvariantViolation(String);

macro_rules! hold {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(InvariantViolation(format!($($what)+)));
        }
    };
}

impl Cache {
    /// Checks every node and every block, in proportional time; for tests and simulations.
    ///
    /// # Errors
    /// Returns the first violated invariant.
    pub fn audit(&self) -> Result<(), InvariantViolation> {
        let counts = self.counts();
        let sum = counts.free + counts.used + counts.cached + counts.adapters;
        hold!(sum == counts.total, "{counts:?} do not add up");
        hold!(
            counts.used + counts.cached <= self.settings.max_kv_blocks as usize
                && counts.adapters <= self.settings.max_adapter_blocks as usize,
            "{counts:?} are more than {:?} allow",
            self.settings
        );
        let (mut blocks, mut nodes) = (HashSet::new(), 0);
        let mut slots = Tier::LOWER.map(|_| HashSet::new());
        for index in self.tree.iter() {
            nodes += 1;
            self.audit_node(index)?;
            let node = self.tree.node(index);
            if node.adapter().is_some() {
                continue;
            }
            if let Some(block) = node.place(Tier::Device).index() {
                hold!(blocks.insert(block), "block {block} is of two nodes");
                hold!(
                    self.node_of.get(&BlockId(block)) == Some(&index),
                    "block {block} is said to be another's"
                );
            }
            for (slots, tier) in slots.iter_mut().zip(Tier::LOWER) {
                if let Some(slot) = node.place(tier).index() {
                    hold!(slots.insert(slot), "slot {slot} of {tier:?} is of two nodes");
                }
            }
        }
        hold!(nodes <= self.tree.capacity(), "nodes are in the tree twice");
        hold!(
            blocks.len() == self.node_of.len(),
            "{} blocks of the tree, {} known",
            blocks.len(),
            self.node_of.len()
        );
        for (slots, tier) in slots.iter().zip(Tier::LOWER) {
            let used = self.slots(tier).0;
            hold!(slots.len() == used, "{used} slots of {tier:?} are in use, {} have nodes", slots.len());
        }
        Ok(())
    }

    /// Counts device blocks that are useless because their adapter, or an earlier block, is neither on the
    /// device nor on its way. The result is 0 if the policy keeps dependencies. The call visits all nodes.
    #[must_use]
    pub fn invalid_blocks(&self) -> usize {
        let mut is_valid = vec![false; self.tree.capacity() as usize];
        let mut invalid = 0;
        // Parents come before their children.
        for index in self.tree.iter() {
            let node = self.tree.node(index);
            let place = node.place(Tier::Device);
            // Blocks that are fetched together may arrive in any order.
            let has_place = place != TierSlot::None;
            is_valid[index as usize] = match (node.adapter(), self.tree.parent(index)) {
                (Some(adapter), _) => adapter.is_none() || has_place,
                (None, parent) => has_place && parent.is_some_and(|parent| is_valid[parent as usize]),
            };
            invalid += usize::from(node.adapter().is_none() && place.is_here() && !is_valid[index as usize]);
        }
        invalid
    }

    fn audit_node(&self, index: u32) -> Result<(), InvariantViolation> {
        let (node, rules) = (self.tree.node(index), self.policy.rules());
        let parent = self.tree.parent(index);
        for tier in Tier::ALL {
            let children = self.tree.children(index);
            let count = children.filter(|&child| self.tree.node(child).place(tier).index().is_some()).count();
            hold!(
                node.children_in[tier as usize] as usize == count,
                "node {index} miscounts its children in {tier:?}"
            );
            let key = node.key(tier as usize);
            hold!(key.is_some() == self.may_leave(index, tier), "node {index} is listed wrongly in {tier:?}");
            let moved = key.map_or(0.0, |key| (worth_of(key) - self.worth(index, tier)).abs());
            // An epoch of RRIP may begin in the middle of an instant, when candidates were already evicted.
            let is_sorted = moved <= WORTH_MOVES || self.settings.variant == Variant::Rrip;
            hold!(is_sorted, "node {index} is sorted wrongly in {tier:?}, by {moved}");
        }
        hold!(
            node.key(RETURNING).is_some() == self.may_return(index),
            "node {index} is wrongly said to return"
        );
        if node.adapter().is_some() {
            return Ok(());
        }
        let has_children = self.tree.children(index).next().is_some();
        hold!(node.is_somewhere() || (!rules.keeps_dependencies && has_children), "node {index} is nowhere");
        hold!(
            self.tree.namespace(index).adapter == self.tree.adapter_of(index),
            "node {index} is of two adapters"
        );
        if rules.keeps_dependencies && node.place(Tier::Device) != TierSlot::None {
            let parent = parent.map(|parent| self.tree.node(parent));
            let is_based = parent.is_some_and(|parent| {
                parent.adapter().is_some() || parent.place(Tier::Device) != TierSlot::None
            });
            hold!(is_based, "node {index} is on the device, what it depends on is not");
        }
        Ok(())
    }
}
