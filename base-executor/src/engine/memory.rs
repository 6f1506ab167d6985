//! Executes the cache's decisions: offloads blocks to lower tiers and brings them back.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use kv_cache::{
    NodeId, Tier,
    manager::{CopyOutcome, TierCopy},
};
use model::forward::{BLOCK_TOKENS, ForwardPass};
use shmproto::message::{MemoryStats, ShareStats};
use types::BlockId;

use super::{
    Engine, count,
    sequence::{OffloadFetch, Sequence},
};
use crate::kv_offload::{FileCopy, ReadRequest};

/// Maximum number of blocks offloaded ahead of need per idle step.
const IDLE_SPILLS_PER_STEP: usize = 8;
/// Maximum number of blocks brought back ahead of need per idle step.
const PREFETCHES_PER_STEP: usize = 8;
/// Maximum number of tenants in the stats of shares.
const MAX_SHARES: usize = 16;

impl<P: ForwardPass> Engine<P> {
    /// Passes the time to the cache.
    pub(super) fn advance_cache_clock(&mut self) {
        let now = self.clock.now().saturating_duration_since(self.began_at);
        self.kv.advance(now, self.queues.running().len());
    }

    /// Executes pending copies; runs before a step of `tokens` tokens computes into newly allocated blocks.
    /// Offloads one block more than the step fills, so that offloading never falls behind.
    pub(super) fn run_transfers(&mut self, tokens: usize) {
        self.tiers.device.apply_evictions(&mut self.kv);
        self.kv.set_spill_capacity(self.offload.free_blocks(self.clock.now()));
        if tokens > 0 {
            self.kv.spill(tokens / BLOCK_TOKENS + 1);
        } else {
            self.kv.spill(IDLE_SPILLS_PER_STEP);
            self.tiers.prefetch(&mut self.kv);
            self.kv.prefetch(PREFETCHES_PER_STEP);
        }
        for copy in self.kv.take_copies() {
            match copy {
                TierCopy::Out { node, block, slots } => self.carry_out(node, block, slots),
                TierCopy::Hasten { node } => self.offload.raise_priority(node),
                TierCopy::In { node, block, tier, slot, class } => {
                    let at_hand = self.offload.at_hand(node, tier, slot);
                    match self.kv.record(node, now_s()) {
                        Some(record) if at_hand.is_none() && tier == Tier::Disk => {
                            self.offload.read(ReadRequest { node, block, slot, record, class });
                        }
                        _ => self.carry_in(node, block, at_hand.as_ref().map(|bytes| &***bytes)),
                    }
                }
            }
        }
        // The former contents of the adapters' blocks are copied out by now.
        self.tiers.device.start_copies(&self.kv);
    }

    fn carry_out(&mut self, node: NodeId, block: BlockId, slots: [Option<u32>; Tier::LOWER.len()]) {
        let Some(mut bytes) = self.offload.block() else {
            // The next block would not get memory either.
            self.offload.pause(self.clock.now());
            return self.not_carried_out(node);
        };
        let read = self.computing.pass.read_block(block, &mut bytes);
        let (Some(record), Ok(())) = (self.kv.record(node, now_s()), read) else {
            return self.not_carried_out(node);
        };
        let bytes = Arc::new(bytes);
        failpoint::pass("executor.block_taken");
        let [host, disk] = slots;
        if let Some(slot) = host {
            self.offload.keep(node, slot, Arc::clone(&bytes));
            self.kv.copied_out(node, Tier::Host, CopyOutcome::Done);
        }
        if let Some(slot) = disk {
            self.offload.write(node, slot, record, bytes);
        }
    }

    fn not_carried_out(&mut self, node: NodeId) {
        Tier::LOWER.into_iter().for_each(|tier| self.kv.copied_out(node, tier, CopyOutcome::Failed));
    }

    /// Writes a block's bytes to the device, or records the failure.
    fn carry_in(&mut self, node: NodeId, block: BlockId, bytes: Option<&[u8]>) {
        // The block may belong to another sequence by now.
        if !self.kv.awaits(node, block) {
            return;
        }
        let is_there = bytes.is_some_and(|bytes| self.computing.pass.write_block(block, bytes).is_ok());
        self.kv.copied_in(node, block, if is_there { CopyOutcome::Done } else { CopyOutcome::Failed });
        failpoint::pass("executor.block_back");
    }

    /// Handles the end of a copy from or to the file.
    pub(super) fn file_copied(&mut self, copy: &FileCopy) {
        self.offload.ended(copy, self.clock.now());
        match copy {
            FileCopy::Written { node, outcome, .. } => self.kv.copied_out(*node, Tier::Disk, *outcome),
            FileCopy::Read { node, block, bytes } => self.carry_in(*node, *block, bytes.as_deref()),
        }
    }

    /// Whether the blocks that a sequence waits for have arrived. If some are lost, it starts over.
    pub(super) fn has_fetched(&mut self, sequence: &mut Sequence<P::Adapter>, now: Instant) -> bool {
        let OffloadFetch::Waits { nodes, .. } = sequence.fetched() else { return true };
        let Some(arrived) = self.kv.arrived(nodes) else { return false };
        let is_whole = arrived == nodes.len();
        self.stats.memory.kv_wait_us += sequence.end_fetch(now);
        if !is_whole {
            sequence.release_blocks(&mut self.kv);
        }
        true
    }

    /// Whether all blocks that a restart may need are on the disk, as far as the disk takes them.
    pub(super) fn is_kept(&self) -> bool {
        self.offload.is_kept(self.kv.unspilled(), self.clock.now())
    }

    pub(super) fn memory_stats(&self) -> MemoryStats {
        let (counts, statistics) = (self.kv.counts(), self.kv.statistics());
        let [(host_used, host_total), (disk_used, disk_total)] = Tier::LOWER.map(|tier| self.kv.slots(tier));
        let mut shares: Vec<ShareStats> =
            self.kv.shares().map(|(owner, blocks)| ShareStats { owner: owner.0, blocks }).collect();
        shares.sort_unstable_by_key(|share| (std::cmp::Reverse(share.blocks), share.owner));
        shares.truncate(MAX_SHARES);
        MemoryStats {
            block_bytes: self.offload.block_bytes() as u64,
            adapter_blocks: count(counts.adapters),
            host_blocks_total: count(host_total),
            host_blocks_used: count(host_used),
            disk_blocks_total: count(disk_total),
            disk_blocks_used: count(disk_used),
            fetched_host_blocks: statistics.fetched_blocks[Tier::Host as usize],
            fetched_disk_blocks: statistics.fetched_blocks[Tier::Disk as usize],
            prefetched_blocks: statistics.prefetched_blocks,
            spilled_blocks: statistics.spilled_blocks,
            evicted_blocks: statistics.evicted_blocks,
            lost_blocks: statistics.lost_blocks,
            failed_copies: statistics.failed_copies,
            held: self.budget.stats(),
            adapters_required: self.kv.adapter_demand().required as f32,
            shares,
            weights: self.computing.weight_stats(),
            ..self.stats.memory.clone()
        }
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
