//! Which adapters are on the device, which are on their way there, and which are computed from the host tier meanwhile.
//!
//! One state for each adapter. What a copy is, and how it travels, is its owner's: here it is asked how far it is, and
//! told to hurry or to go. Places are those of a [`Cache`], which may take them back whenever it needs the room for others: who
//! has lost its place is found out by [`Residency::apply_evictions`]. Who has got one sets out by [`Residency::start_copies`], when what was in
//! its blocks before has been copied away.

use std::collections::{HashMap, VecDeque};

use types::{AdapterId, BlockId};

use crate::{
    copy::CopyPriority,
    manager::{Cache, PlacementOutcome, RemoveOutcome},
};

/// A copy on its way to the device, or there.
pub trait DeviceTransfer {
    /// Bytes that have not arrived.
    fn missing_bytes(&self) -> u64;

    /// All of it is there.
    fn is_complete(&self) -> bool;

    /// Nothing more comes: it is complete, or its way has ended early.
    fn is_over(&self) -> bool;

    /// Makes its way at least as urgent as `class`.
    fn raise(&self, class: CopyPriority);

    /// Ends its way and takes away what has arrived. Nothing computes with it any more.
    fn discard(self);
}

/// What an adapter takes on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterSize {
    /// Blocks of the pool.
    pub blocks: u32,
    /// Bytes that travel.
    pub bytes: u64,
}

/// How far an adapter is on its way to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferStatus {
    /// All of it is there.
    There,
    /// So much of it is not there yet.
    Missing {
        /// Bytes that have not arrived.
        bytes: u64,
    },
    /// There is no room for it now, or it cannot come at all.
    NoRoom,
}

/// Where an adapter is.
#[derive(Debug)]
enum ResidencyState<A, C> {
    /// In the host tier alone.
    Host {
        /// Its users found no room: it gets what others leave.
        left_out: Option<A>,
    },
    /// It has a place on the device, and has not set out.
    Boarding {
        adapter: A,
        bytes: u64,
        class: CopyPriority,
        /// As below.
        is_awaited: bool,
    },
    /// It has a place on the device, and its copy is on its way or there.
    Placed {
        copy: C,
        /// A request waits for it: it keeps its place until it has arrived, or two requests that each wait for an adapter
        /// would take the room from each other for ever.
        is_awaited: bool,
    },
    /// Its way ended by a fault: it is computed from the host tier until it is unloaded. What has arrived keeps its place
    /// until others need that.
    Failed { copy: Option<C> },
}

#[derive(Debug)]
struct ResidencyEntry<A, C> {
    /// Requests under way. An adapter with users keeps its place.
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

    /// How far it is, now asked for with this urgency.
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

    /// There is nothing to remember of it.
    fn is_idle(&self) -> bool {
        self.users == 0 && matches!(self.state, ResidencyState::Host { left_out: None })
    }
}

/// The adapters `A` of a device, and their copies `C`.
#[derive(Debug)]
pub struct Residency<A, C> {
    adapters: HashMap<AdapterId, ResidencyEntry<A, C>>,
    /// Those that are to set out, in this order; some may have lost their place.
    boarding: VecDeque<AdapterId>,
}

impl<A, C> Default for Residency<A, C> {
    fn default() -> Self {
        Self { adapters: HashMap::new(), boarding: VecDeque::new() }
    }
}

impl<A: Clone, C: DeviceTransfer> Residency<A, C> {
    /// Takes in who has given up its place to others since this was last called. Nothing may be written where an adapter was
    /// before.
    pub fn apply_evictions(&mut self, pool: &mut Cache) {
        pool.take_evicted_adapters().into_iter().for_each(|key| self.evict(key));
    }

    /// Sees to it that an adapter is there or comes, if there is room. It sets out with the next [`start_copies`](Self::start_copies).
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

    /// Starts the ways of those that have a place. Nobody needs what was in their blocks any more. `send` starts one, or says that
    /// too much is on its way: then it sets out another time.
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

    /// It gives up its place. Evictions happen between two passes, and nobody uses it.
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

    /// Another request computes with it, wherever it is. It keeps its place until all have left.
    pub fn add_user(&mut self, pool: &mut Cache, key: AdapterId) {
        let entry = self.adapters.entry(key).or_default();
        entry.users += 1;
        if entry.users == 1 {
            // One that is not there runs from the host tier; it is pinned if it comes.
            let _ = pool.pin_adapter(key);
        }
    }

    /// A request that held it has ended. Says whether others may now have room that they had not.
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

    /// A request waits until it has arrived; until then it keeps its place.
    pub fn await_arrival(&mut self, pool: &mut Cache, key: AdapterId) {
        let Some(entry) = self.adapters.get_mut(&key) else { return };
        if let ResidencyState::Placed { is_awaited, .. } | ResidencyState::Boarding { is_awaited, .. } =
            &mut entry.state
            && !*is_awaited
        {
            *is_awaited = pool.pin_adapter(key);
        }
    }

    /// Its users found no room: it gets what others leave.
    pub fn leave_out(&mut self, key: AdapterId, adapter: &A) {
        if let ResidencyState::Host { left_out } = &mut self.adapters.entry(key).or_default().state {
            *left_out = Some(adapter.clone());
        }
    }

    /// Those that get what others leave.
    #[must_use]
    pub fn left_out(&self) -> Vec<(AdapterId, A)> {
        let wanting = |(key, entry): (&AdapterId, &ResidencyEntry<A, C>)| match &entry.state {
            ResidencyState::Host { left_out: Some(adapter) } => Some((*key, adapter.clone())),
            _ => None,
        };
        self.adapters.iter().filter_map(wanting).collect()
    }

    /// The way of its copy may be over: news that may be of a copy that was given up before it set out again.
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

    /// It has left the host tier; nobody uses it.
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

    /// Forgets an adapter of which there is nothing to remember.
    fn sweep(&mut self, key: AdapterId) {
        if self.adapters.get(&key).is_some_and(ResidencyEntry::is_idle) {
            self.adapters.remove(&key);
        }
    }

    /// Its way ended by a fault.
    #[must_use]
    pub fn has_failed(&self, key: AdapterId) -> bool {
        self.adapters.get(&key).is_some_and(|entry| matches!(entry.state, ResidencyState::Failed { .. }))
    }

    /// Its copy, on its way or there.
    #[must_use]
    pub fn copy(&self, key: AdapterId) -> Option<&C> {
        self.adapters.get(&key)?.copy()
    }

    /// Bytes that have not arrived of all that is on its way.
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
