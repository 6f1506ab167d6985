//! Evicts blocks and adapters when a tier lacks capacity.

use std::time::Duration;

use types::BlockId;

use super::{AdapterUnit, Cache};
use crate::{
    eviction_candidates::{key_of, worth_of},
    replacement::{Candidate, REVIEWED_AT_ONCE, visited_again},
    tier::{Tier, TierSlot},
    tree::{NodeKind, RETURNING},
};

/// Period in which every node is updated, if there are not too many; worth changes more slowly.
const REVIEW_PERIOD: Duration = Duration::from_secs(1);

/// Cost of a copy for which no request waits, relative to an awaited copy.
const UNAWAITED_COPY: f32 = 0.1;

/// Smallest change of worth that moves a candidate in its order.
const WORTH_RESOLUTION: f64 = 1e-3;

impl Cache {
    /// Frees one block of the device, from KV blocks or adapters, whichever is worth less.
    pub(super) fn evict_any(&mut self) -> Option<()> {
        let block = self.frontiers[Tier::Device as usize].first_block(self.settings.device, self.now);
        let adapter = self.frontiers[Tier::Device as usize].first_adapter();
        let bonus = self.policy.adapter_bonus(self.adapter_demand());
        match (block, adapter) {
            (Some((block, _)), Some((key, index))) if worth_of(key) + bonus < worth_of(block) => {
                self.evict_adapter(index)
            }
            (None, Some((_, index))) => self.evict_adapter(index),
            (Some(_), _) => self.evict_block(Tier::Device)?,
            (None, None) => return None,
        }
        Some(())
    }

    pub(super) fn evict_block(&mut self, tier: Tier) -> Option<()> {
        let total = self.settings.blocks(tier);
        let (key, index) = self.frontiers[tier as usize].first_block(total, self.now)?;
        self.policy.note_eviction(worth_of(key), self.now);
        if self.policy.rules().by_branch && tier == Tier::Device {
            self.evict_branch(index);
        } else {
            self.evict(index, tier);
        }
        Some(())
    }

    pub(super) fn evict(&mut self, index: u32, tier: Tier) {
        if tier != Tier::Device {
            self.leave_lower(index, tier);
            self.drop_if_nowhere(index);
            return;
        }
        self.statistics.evicted_blocks += 1;
        if self.tree.node(index).lower().is_none() && self.has_lower_tier() && !self.begin_spill(index) {
            self.statistics.lost_blocks += 1;
        }
        self.leave_device(index);
        failpoint::pass("executor.prefix_evicted");
    }

    /// Evicts a leaf's whole branch from the device, as far as no sequence holds it.
    fn evict_branch(&mut self, leaf: u32) {
        let above = std::iter::successors(Some(leaf), |&index| self.tree.parent(index));
        let blocks: Vec<u32> = above.filter(|&index| self.tree.node(index).adapter().is_none()).collect();
        let top = blocks.into_iter().take_while(|&index| !self.tree.node(index).is_held).last();
        for index in self.tree.subtree(top.unwrap_or(leaf)).into_iter().rev() {
            if self.may_leave(index, Tier::Device) {
                self.evict(index, Tier::Device);
            }
        }
    }

    /// Removes a node from the device; returns whether it was there. A holder keeps the block itself.
    pub(super) fn leave_device(&mut self, index: u32) -> bool {
        let Some(block) = self.tree.node(index).place(Tier::Device).index() else { return false };
        self.node_of.remove(&BlockId(block));
        self.pool.uncache(BlockId(block));
        self.tree.node_mut(index).is_held = false;
        self.set_place(index, Tier::Device, TierSlot::None);
        self.drop_if_nowhere(index);
        true
    }

    pub(super) fn leave_lower(&mut self, index: u32, tier: Tier) {
        if let Some(slot) = self.tree.node(index).place(tier).index() {
            self.slots[tier as usize - 1].give_back(slot);
            self.set_place(index, tier, TierSlot::None);
        }
    }

    /// Removes a node that is in no tier, with all its descendants: without its beginning a prefix is
    /// useless. A policy that ignores dependencies keeps the descendants, although they are of no use.
    pub(super) fn drop_if_nowhere(&mut self, index: u32) {
        if self.tree.node(index).adapter().is_none() {
            let is_kept = self.tree.node(index).is_somewhere()
                || (!self.policy.rules().keeps_dependencies && self.tree.children(index).next().is_some());
            if !is_kept {
                self.forget_branch(index);
            }
        } else if !self.adapters.knows(self.tree.adapter_of(index))
            && self.tree.children(index).next().is_none()
        {
            self.tree.remove(index);
        }
    }

    /// Removes a node and its descendants from all tiers. Sequences keep the blocks that they hold.
    pub(super) fn forget_branch(&mut self, index: u32) {
        let parent = self.tree.parent(index);
        for index in self.tree.subtree(index).into_iter().rev() {
            Tier::LOWER.into_iter().for_each(|tier| self.leave_lower(index, tier));
            if let Some(block) = self.tree.node(index).place(Tier::Device).index() {
                self.node_of.remove(&BlockId(block));
                self.pool.uncache(BlockId(block));
                self.set_place(index, Tier::Device, TierSlot::None);
            }
            self.unlist_returning(index);
            self.tree.remove(index);
        }
        if let Some(parent) = parent {
            self.relist(parent);
            self.drop_if_nowhere(parent);
        }
    }

    /// Sets a node's place in a tier, and updates candidates and shares.
    pub(super) fn set_place(&mut self, index: u32, tier: Tier, place: TierSlot) {
        let before = self.tree.node(index).place(tier);
        let had = before.index().is_some();
        self.tree.set_place(index, tier, place);
        let (has, is_block) = (place.index().is_some(), self.tree.node(index).adapter().is_none());
        if before.is_here() != place.is_here() && is_block {
            self.record_event(index, tier, place.is_here());
        }
        if had != has && is_block {
            let (owner, frontier) = (self.tree.owner(index), &mut self.frontiers[tier as usize]);
            if has { frontier.add_block(owner, self.now) } else { frontier.remove_block(owner) }
        }
        self.relist(index);
        if had != has
            && let Some(parent) = self.tree.parent(index)
        {
            self.relist(parent);
        }
        if tier == Tier::Device {
            // Children of the node may become able to return, or unable.
            let children: Vec<u32> = self.tree.children(index).collect();
            children.into_iter().for_each(|child| self.relist_returning(child));
        }
    }

    /// Records a request for a node, which raises its worth.
    pub(super) fn visit(&mut self, index: u32) {
        let (now, owner) = (self.now, self.tree.owner(index));
        let node = self.tree.node_mut(index);
        node.visits = visited_again(node.visits, node.last_use(), now);
        node.set_last_use(now);
        for tier in Tier::ALL {
            self.frontiers[tier as usize].visit(owner, now);
            self.unlist(index, tier);
        }
        self.unlist_returning(index);
        self.relist(index);
    }

    /// Adds a node to the candidates of each tier, or removes it.
    pub(super) fn relist(&mut self, index: u32) {
        for tier in Tier::ALL {
            let is_listed = self.tree.node(index).key(tier as usize).is_some();
            match self.may_leave(index, tier) {
                true if !is_listed => self.list(index, tier),
                true => self.sort_again(index, tier),
                false => self.unlist(index, tier),
            }
        }
        self.relist_returning(index);
    }

    /// Adds a block to those that may return to the device, or removes it.
    fn relist_returning(&mut self, index: u32) {
        match self.may_return(index) {
            true if self.tree.node(index).key(RETURNING).is_none() => {
                let key = key_of(self.worth(index, Tier::Device));
                self.returning.insert((key, index));
                self.tree.node_mut(index).set_key(RETURNING, key);
            }
            false => self.unlist_returning(index),
            true => {}
        }
    }

    fn unlist_returning(&mut self, index: u32) {
        if let Some(key) = self.tree.node_mut(index).take_key(RETURNING) {
            self.returning.remove(&(key, index));
        }
    }

    /// Whether a lower tier has a slot for the block, and the device has all its dependencies (E-05).
    pub(super) fn may_return(&self, index: u32) -> bool {
        let node = self.tree.node(index);
        let is_away = node.place(Tier::Device) == TierSlot::None && node.lower().is_some();
        let has_base = |parent: u32| match self.tree.node(parent).adapter() {
            Some(None) => true,
            _ => self.tree.node(parent).place(Tier::Device).is_here(),
        };
        is_away && self.tree.parent(index).is_some_and(has_base)
    }

    pub(super) fn may_leave(&self, index: u32, tier: Tier) -> bool {
        let node = self.tree.node(index);
        // Children in the host tier find their prefix on the device.
        let is_doubled = tier == Tier::Host && node.place(Tier::Device).is_here();
        let is_alone = node.children_in[tier as usize] == 0
            || is_doubled
            || !self.policy.rules().keeps_dependencies
            || (tier == Tier::Device && self.can_shrink(index));
        let is_idle = match tier {
            // A prefetched block that no sequence holds may be evicted even before its bytes have arrived.
            Tier::Device => node.place(tier) != TierSlot::None && !node.is_held,
            // A slot stays while it is written or read.
            Tier::Host | Tier::Disk => node.place(tier).is_here() && !node.place(Tier::Device).is_coming(),
        };
        is_idle && is_alone
    }

    fn list(&mut self, index: u32, tier: Tier) {
        let key = key_of(self.worth(index, tier));
        let (owner, frontier) = (self.tree.owner(index), &mut self.frontiers[tier as usize]);
        match self.tree.node(index).kind {
            NodeKind::Block(_) => frontier.list(owner, key, index),
            NodeKind::Adapter(_) => frontier.list_adapter(key, index),
        }
        self.tree.node_mut(index).set_key(tier as usize, key);
    }

    fn unlist(&mut self, index: u32, tier: Tier) {
        let Some(key) = self.tree.node_mut(index).take_key(tier as usize) else { return };
        let (owner, frontier) = (self.tree.owner(index), &mut self.frontiers[tier as usize]);
        match self.tree.node(index).kind {
            NodeKind::Block(_) => frontier.unlist(owner, key, index),
            NodeKind::Adapter(_) => frontier.unlist_adapter(key, index),
        }
    }

    /// Moves a listed node to its new position if its worth has changed.
    fn sort_again(&mut self, index: u32, tier: Tier) {
        let Some(key) = self.tree.node(index).key(tier as usize) else { return };
        if (worth_of(key) - self.worth(index, tier)).abs() > WORTH_RESOLUTION {
            self.unlist(index, tier);
            self.list(index, tier);
        }
    }

    /// Returns the worth of a node's place in a tier.
    pub(super) fn worth(&self, index: u32, tier: Tier) -> f64 {
        let node = self.tree.node(index);
        let blocks = match node.adapter() {
            Some(adapter) => self.adapters.blocks_of(adapter),
            None => 1,
        };
        let block_cost = self.block_cost(index, tier);
        let candidate = Candidate { blocks, block_cost, visits: node.visits, last_use: node.last_use() };
        self.policy.worth(&candidate, self.now)
    }

    /// Returns the cost of recovering a block that leaves a tier, in block copies.
    fn block_cost(&self, index: u32, tier: Tier) -> f32 {
        let node = self.tree.node(index);
        if node.adapter().is_some() {
            // The host's adapter store keeps every adapter.
            return match self.settings.adapter_unit {
                AdapterUnit::Whole => 1.0,
                AdapterUnit::Block { cost } => cost,
            };
        }
        let is_copied = match tier {
            Tier::Device => node.lower().is_some(),
            // While the device has the block, no request fetches this copy; it is copied again on leaving the
            // device.
            Tier::Host if node.place(Tier::Device).index().is_some() => return UNAWAITED_COPY,
            // A disk read takes about as long as computing, and after a restart only the disk has the block.
            Tier::Host | Tier::Disk => false,
        };
        if is_copied { 1.0 } else { self.settings.recompute_cost }
    }

    /// Updates the position of some nodes, because the worth of young nodes changes. The number is in
    /// proportion to `passed`, so that each node has its turn once per period.
    pub(super) fn review(&mut self, passed: Duration) {
        let capacity = self.tree.capacity();
        let due = (f64::from(capacity) * passed.as_secs_f64() / REVIEW_PERIOD.as_secs_f64()).ceil() as u32;
        for _ in 0..due.min(capacity).min(REVIEWED_AT_ONCE) {
            self.reviewed = (self.reviewed + 1) % capacity;
            Tier::ALL.into_iter().for_each(|tier| self.sort_again(self.reviewed, tier));
        }
    }
}
