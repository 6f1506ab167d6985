//! Residency of adapters: on the device, on their way there, or computed from the host tier meanwhile.
//!
//! Each adapter has one state. The owner defines and performs the copies; this module asks for their
//! progress, and tells them to hurry or to stop. Blocks come from a [`Cache`], which may evict an adapter
//! when it needs them for others: [`Residency::apply_evictions`] detects this. The copy of a placed adapter
//! starts in [`Residency::start_copies`], after the earlier contents of its blocks were copied away.

use std::collections::{HashMap, VecDeque};

use types::{AdapterId, BlockId};

use crate::{
    copy::CopyPriority,
    manager::{Cache, PlacementOutcome, RemoveOutcome},
};

/// Copy of an adapter to the device, in progress or complete.
pub trait DeviceTransfer {
    /// Returns the number of bytes that have not arrived.
    fn missing_bytes(&self) -> u64;

    /// Whether all bytes have arrived.
    fn is_complete(&self) -> bool;

    /// Whether the copy has ended: it is complete, or failed early.
    fn is_over(&self) -> bool;

    /// Raises the copy's priority to at least `class`.
    fn raise(&self, class: CopyPriority);

    /// Stops the copy and removes the arrived bytes, which no computation uses any more.
    fn discard(self);
}

/// Space of an adapter on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterSize {
    /// Number of blocks in the pool.
    pub blocks: u32,
    /// Number of bytes to copy.
    pub bytes: u64,
}

/// Progress of an adapter's copy to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferStatus {
    /// The complete adapter is on the device.
    There,
    /// A part of the adapter has not arrived.
    Missing {
        /// Number of bytes that have not arrived.
        bytes: u64,
    },
    /// The device lacks capacity now, or the adapter cannot come at all.
    NoRoom,
}

/// State of an adapter.
#[derive(Debug)]
enum ResidencyState<A, C> {
    /// The adapter is only in the host tier.
    Host {
        /// The adapter whose users found no capacity, to be loaded when others leave some.
        left_out: Option<A>,
    },
    /// The adapter has blocks on the device, and its copy has not started.
    Boarding { adapter: A, bytes: u64, class: CopyPriority, is_awaited: bool },
    /// The adapter has blocks on the device, and its copy is in progress or complete.
    Placed {
        copy: C,
        /// Whether a request waits for the arrival, so the adapter keeps its blocks until then. Otherwise two
        /// waiting requests could take the blocks from each other for ever.
        is_awaited: bool,
    },
    /// The copy failed: the host tier serves the adapter until its unload. Arrived bytes may be evicted.
    Failed { copy: Option<C> },
}

#[derive(Debug)]
struct ResidencyEntry<A, C> {
    /// Number of running requests of the adapter, which keeps its blocks while there are any.
    users: u32,
    state: ResidencyState<A, C>,
}

impl<A, C> Default for ResidencyEntry<A, C> {
    fn default() -> Self {
        Self { users: 0, state: ResidencyState::Host { left_out: None } }
    }
}

impl<A, C: DeviceTransfer> ResidencyEntry<A, C> {
    fn copy(&self) -> Option<&C> {
        match &self.state {
            ResidencyState::Placed { copy, .. } | ResidencyState::Failed { copy: Some(copy) } => Some(copy),
            ResidencyState::Host { .. }
            | ResidencyState::Boarding { .. }
            | ResidencyState::Failed { copy: None } => None,
        }
    }

    /// Returns the progress of the adapter, and raises its priority to `wanted`.
    fn way(&mut self, wanted: CopyPriority) -> TransferStatus {
        match &mut self.state {
            ResidencyState::Placed { copy, .. } if copy.is_complete() => TransferStatus::There,
            ResidencyState::Placed { copy, .. } => {
                copy.raise(wanted);
                TransferStatus::Missing { bytes: copy.missing_bytes() }
            }
            ResidencyState::Boarding { bytes, class, .. } => {
                *class = wanted.min(*class);
                TransferStatus::Missing { bytes: *bytes }
            }
            ResidencyState::Host { .. } | ResidencyState::Failed { .. } => TransferStatus::NoRoom,
        }
    }

    /// Whether the entry can be removed.
    fn is_idle(&self) -> bool {
        self.users == 0 && matches!(self.state, ResidencyState::Host { left_out: None })
    }
}

/// Residency of adapters `A` on one device, with their copies `C`.
#[derive(Debug)]
pub struct Residency<A, C> {
    adapters: HashMap<AdapterId, ResidencyEntry<A, C>>,
    /// Adapters whose copies have not started, in order; some may have lost their blocks.
    boarding: VecDeque<AdapterId>,
}

impl<A, C> Default for Residency<A, C> {
    fn default() -> Self {
        Self { adapters: HashMap::new(), boarding: VecDeque::new() }
    }
}

impl<A: Clone, C: DeviceTransfer> Residency<A, C> {
    /// Handles evictions since the last call. No bytes may be written to an adapter's former blocks any more.
    pub fn apply_evictions(&mut self, pool: &mut Cache) {
        pool.take_evicted_adapters().into_iter().for_each(|key| self.evict(key));
    }

    /// Places an adapter if there is capacity; its copy starts with [`start_copies`](Self::start_copies).
    pub fn load(
        &mut self,
        pool: &mut Cache,
        key: AdapterId,
        adapter: &A,
        size: AdapterSize,
        class: CopyPriority,
    ) -> TransferStatus {
        self.apply_evictions(pool);
        if self.has_failed(key) {
            return TransferStatus::NoRoom;
        }
        match pool.place_adapter(key, size.blocks) {
            PlacementOutcome::AlreadyThere => {}
            PlacementOutcome::NoRoom | PlacementOutcome::TooLarge => return TransferStatus::NoRoom,
            PlacementOutcome::Placed => {
                self.apply_evictions(pool);
                let adapter = adapter.clone();
                let entry = self.adapters.entry(key).or_default();
                entry.state =
                    ResidencyState::Boarding { adapter, bytes: size.bytes, class, is_awaited: false };
                self.boarding.push_back(key);
                if entry.users > 0 {
                    let _ = pool.pin_adapter(key);
                }
            }
        }
        self.adapters.get_mut(&key).map_or(TransferStatus::NoRoom, |entry| entry.way(class))
    }

    /// Starts the copies of placed adapters, whose blocks hold no needed contents any more. `send` starts a
    /// copy, or returns `None` if too many are in progress; the rest then starts at a later call.
    pub fn start_copies(
        &mut self,
        pool: &Cache,
        mut send: impl FnMut(AdapterId, &A, &[BlockId], CopyPriority) -> Option<C>,
    ) {
        while let Some(&key) = self.boarding.front() {
            if let Some(entry) = self.adapters.get_mut(&key)
                && let ResidencyState::Boarding { adapter, class, is_awaited, .. } = &entry.state
            {
                let Some(copy) = send(key, adapter, pool.adapter_blocks(key), *class) else { return };
                entry.state = ResidencyState::Placed { copy, is_awaited: *is_awaited };
            }
            self.boarding.pop_front();
        }
    }

    /// Handles the eviction of an adapter. Evictions happen between passes, and the adapter has no users.
    fn evict(&mut self, key: AdapterId) {
        let Some(entry) = self.adapters.get_mut(&key) else { return };
        match std::mem::replace(&mut entry.state, ResidencyState::Host { left_out: None }) {
            ResidencyState::Placed { copy, .. } => copy.discard(),
            ResidencyState::Failed { copy } => {
                copy.into_iter().for_each(C::discard);
                entry.state = ResidencyState::Failed { copy: None };
            }
            ResidencyState::Boarding { .. } => {}
            stays @ ResidencyState::Host { .. } => entry.state = stays,
        }
        self.sweep(key);
    }

    /// Adds a running request of an adapter, which keeps its blocks until all its requests have ended.
    pub fn add_user(&mut self, pool: &mut Cache, key: AdapterId) {
        let entry = self.adapters.entry(key).or_default();
        entry.users += 1;
        if entry.users == 1 {
            // An adapter without blocks runs from the host tier; it is pinned when it gets blocks.
            let _ = pool.pin_adapter(key);
        }
    }

    /// Removes a request of an adapter. Returns whether others may have new capacity now.
    pub fn release(&mut self, pool: &mut Cache, key: AdapterId) -> bool {
        let Some(entry) = self.adapters.get_mut(&key).filter(|entry| entry.users > 0) else { return false };
        entry.users -= 1;
        if entry.users > 0 {
            return false;
        }
        if let ResidencyState::Host { left_out } = &mut entry.state {
            *left_out = None;
        }
        self.sweep(key);
        let has_place = pool.has_adapter_place(key);
        if has_place {
            pool.unpin_adapter(key);
        }
        has_place
    }

    /// Keeps an adapter's blocks until its arrival, because a request waits for it.
    pub fn await_arrival(&mut self, pool: &mut Cache, key: AdapterId) {
        let Some(entry) = self.adapters.get_mut(&key) else { return };
        if let ResidencyState::Placed { is_awaited, .. } | ResidencyState::Boarding { is_awaited, .. } =
            &mut entry.state
            && !*is_awaited
        {
            *is_awaited = pool.pin_adapter(key);
        }
    }

    /// Marks an adapter whose users found no capacity, to be loaded when others leave some.
    pub fn leave_out(&mut self, key: AdapterId, adapter: &A) {
        if let ResidencyState::Host { left_out } = &mut self.adapters.entry(key).or_default().state {
            *left_out = Some(adapter.clone());
        }
    }

    /// Returns the adapters marked by [`leave_out`](Self::leave_out).
    #[must_use]
    pub fn left_out(&self) -> Vec<(AdapterId, A)> {
        let wanting = |(key, entry): (&AdapterId, &ResidencyEntry<A, C>)| match &entry.state {
            ResidencyState::Host { left_out: Some(adapter) } => Some((*key, adapter.clone())),
            _ => None,
        };
        self.adapters.iter().filter_map(wanting).collect()
    }

    /// Checks whether an adapter's copy has ended; the notification may concern an earlier copy.
    pub fn arrived(&mut self, pool: &mut Cache, key: AdapterId) {
        let Some(entry) = self.adapters.get_mut(&key) else { return };
        let ResidencyState::Placed { copy, is_awaited } = &mut entry.state else { return };
        if !copy.is_over() {
            return;
        }
        if std::mem::take(is_awaited) {
            pool.unpin_adapter(key);
        }
        if !copy.is_complete() {
            let state = std::mem::replace(&mut entry.state, ResidencyState::Host { left_out: None });
            if let ResidencyState::Placed { copy, .. } = state {
                entry.state = ResidencyState::Failed { copy: Some(copy) };
            }
        }
    }

    /// Removes an adapter that was unloaded from the host tier and has no users.
    pub fn remove(&mut self, pool: &mut Cache, key: AdapterId) {
        let Some(entry) = self.adapters.remove(&key) else { return };
        if let ResidencyState::Placed { is_awaited: true, .. }
        | ResidencyState::Boarding { is_awaited: true, .. } = entry.state
        {
            pool.unpin_adapter(key);
        }
        match entry.state {
            ResidencyState::Placed { copy, .. } => copy.discard(),
            ResidencyState::Failed { copy } => copy.into_iter().for_each(C::discard),
            ResidencyState::Host { .. } | ResidencyState::Boarding { .. } => {}
        }
        let removal = pool.remove_adapter_place(key);
        debug_assert_ne!(removal, RemoveOutcome::Pinned, "an adapter that is used was unloaded");
    }

    /// Removes the entry of an adapter in its default state.
    fn sweep(&mut self, key: AdapterId) {
        if self.adapters.get(&key).is_some_and(ResidencyEntry::is_idle) {
            self.adapters.remove(&key);
        }
    }

    /// Whether the adapter's copy has failed.
    #[must_use]
    pub fn has_failed(&self, key: AdapterId) -> bool {
        self.adapters.get(&key).is_some_and(|entry| matches!(entry.state, ResidencyState::Failed { .. }))
    }

    /// Returns the adapter's copy, in progress or complete.
    #[must_use]
    pub fn copy(&self, key: AdapterId) -> Option<&C> {
        self.adapters.get(&key)?.copy()
    }

    /// Returns the number of bytes that have not arrived, over all adapters.
    #[must_use]
    pub fn on_the_way_bytes(&self) -> u64 {
        let missing = |entry: &ResidencyEntry<A, C>| match &entry.state {
            ResidencyState::Placed { copy, .. } if !copy.is_over() => copy.missing_bytes(),
            ResidencyState::Boarding { bytes, .. } => *bytes,
            _ => 0,
        };
        self.adapters.values().map(missing).sum()
    }
}

#[cfg(test)]
mod tests;
