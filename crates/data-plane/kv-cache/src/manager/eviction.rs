//! Who leaves a tier when others need the room.

use std::time::Duration;

use types::BlockId;

use super::{AdapterUnit, Cache};
use crate::{
    eviction_candidates::{key_of, worth_of},
    replacement::{Candidate, REVIEWED_AT_ONCE, visited_again},
    tier::{Tier, TierSlot},
    tree::{NodeKind, RETURNING},
};

/// How often every node is looked at again, if there are not too many: much more often than worth moves, at every step is waste.
const REVIEW_PERIOD: Duration = Duration::from_secs(1);

/// A copy for which nobody waits, in copies for which somebody does.
const UNAWAITED_COPY: f32 = 0.1;

/// Candidates whose worth has moved by less stay where they are sorted.
const WORTH_RESOLUTION: f64 = 1e-3;

impl Cache {
    /// Frees one block of the device, of the kind that is worth less.
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

    /// Frees one block or slot of a tier.
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

    /// A block gives up its place in a tier.
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

    /// The whole branch that a leaf is of gives up its places on the device, as far as nobody holds it.
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

    /// A node has no place on the device any more; says whether it had one. Whoever holds its block keeps that.
    pub(super) fn leave_device(&mut self, index: u32) -> bool {
        let Some(block) = self.tree.node(index).place(Tier::Device).index() else { return false };
        self.node_of.remove(&BlockId(block));
        self.pool.uncache(BlockId(block));
        self.tree.node_mut(index).is_held = false;
        self.set_place(index, Tier::Device, TierSlot::None);
        self.drop_if_nowhere(index);
        true
    }

    /// A node has no slot in a lower tier any more.
    pub(super) fn leave_lower(&mut self, index: u32, tier: Tier) {
        if let Some(slot) = self.tree.node(index).place(tier).index() {
            self.slots[tier as usize - 1].give_back(slot);
            self.set_place(index, tier, TierSlot::None);
        }
    }

    /// Forgets a node that no tier has, and what hangs on it: a prefix without its beginning is worth nothing. A policy that keeps
    /// no dependencies does not know that, and what hangs on it stays where it is, of no use.
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

    /// Removes a node and all below it, in all tiers. Blocks that sequences hold stay theirs.
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

    /// Says where a node is in a tier, and keeps candidates and shares up to date.
    pub(super) fn set_place(&mut self, index: u32, tier: Tier, place: TierSlot) {
        let had = self.tree.node(index).place(tier).index().is_some();
        self.tree.set_place(index, tier, place);
        let (has, is_block) = (place.index().is_some(), self.tree.node(index).adapter().is_none());
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
            // What hangs on it may come now, or may not any more.
            let children: Vec<u32> = self.tree.children(index).collect();
            children.into_iter().for_each(|child| self.relist_returning(child));
        }
    }

    /// A node is asked for: it is worth more.
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

    /// Lists a node among those that may leave, tier by tier, or takes it off.
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

    /// Lists a block among those that may come back to the device, or takes it off.
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

    /// A lower tier has it, and the device has all that it depends on (E-05).
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
        // What hangs on it in the host has its beginning on the device.
        let is_doubled = tier == Tier::Host && node.place(Tier::Device).is_here();
        let is_alone = node.children_in[tier as usize] == 0
            || is_doubled
            || !self.policy.rules().keeps_dependencies
            || (tier == Tier::Device && self.can_shrink(index));
        let is_idle = match tier {
            // What nobody waits for gives way even before it is there.
            Tier::Device => node.place(tier) != TierSlot::None && !node.is_held,
            // A slot that is being written or read stays.
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

    /// A node that is listed moves to where it belongs, if its worth has moved.
    fn sort_again(&mut self, index: u32, tier: Tier) {
        let Some(key) = self.tree.node(index).key(tier as usize) else { return };
        if (worth_of(key) - self.worth(index, tier)).abs() > WORTH_RESOLUTION {
            self.unlist(index, tier);
            self.list(index, tier);
        }
    }

    /// What a node's place in a tier is worth now.
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

    /// What it takes to have a block back that leaves a tier, in copies of a block.
    fn block_cost(&self, index: u32, tier: Tier) -> f32 {
        let node = self.tree.node(index);
        if node.adapter().is_some() {
            // The store of the host keeps every adapter.
            return match self.settings.adapter_unit {
                AdapterUnit::Whole => 1.0,
                AdapterUnit::Block { cost } => cost,
            };
        }
        let is_copied = match tier {
            Tier::Device => node.lower().is_some(),
            // Nobody fetches it from here; it is copied here again when it leaves the device.
            Tier::Host if node.place(Tier::Device).index().is_some() => return UNAWAITED_COPY,
            // A read from the disk takes about as long as computing, and after a restart there is nothing but the disk.
            Tier::Host | Tier::Disk => false,
        };
        if is_copied { 1.0 } else { self.settings.recompute_cost }
    }

    /// Sorts some nodes again: what they are worth moves while they are young.
    /// After `passed`, as many as that each has its turn once in a while.
    pub(super) fn review(&mut self, passed: Duration) {
        let capacity = self.tree.capacity();
        let due = (f64::from(capacity) * passed.as_secs_f64() / REVIEW_PERIOD.as_secs_f64()).ceil() as u32;
        for _ in 0..due.min(capacity).min(REVIEWED_AT_ONCE) {
            self.reviewed = (self.reviewed + 1) % capacity;
            Tier::ALL.into_iter().for_each(|tier| self.sort_again(self.reviewed, tier));
        }
    }
}
