//! Which adapters are on the device, which are on their way there, and which are computed from the host tier meanwhile.
//!
//! One state for each adapter. What a copy is, and how it travels, is its owner's: here it is asked how far it is, and
//! told to hurry or to go.

use std::{collections::HashMap, hash::Hash};

use crate::{
    copy::Class,
    device::{DeviceTier, Placement, Removal},
};

/// A copy on its way to the device, or there.
pub trait Transit {
    /// Bytes that have not arrived.
    fn missing_bytes(&self) -> u64;

    /// All of it is there.
    fn is_complete(&self) -> bool;

    /// Nothing more comes: it is complete, or its way has ended early.
    fn is_over(&self) -> bool;

    /// Makes its way at least as urgent as `class`.
    fn raise(&self, class: Class);

    /// Ends its way and takes away what has arrived. Nothing computes with it any more.
    fn discard(self);
}

/// Why an adapter has not set out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsent {
    /// The tier has room and the device no memory; nobody knows when it will.
    NoMemory,
    /// Too much is on its way, and there will be less.
    QueueFull,
}

/// How far an adapter is on its way to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
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
enum State<A, C> {
    /// In the host tier alone.
    Host {
        /// The tier had room for it and the device had not. Each request tries again, and starts from the host tier.
        is_short: bool,
        /// Its users found no room: it gets what others leave.
        left_out: Option<A>,
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
struct Entry<A, C> {
    /// Requests under way. An adapter with users keeps its place.
    users: u32,
    state: State<A, C>,
}

impl<A, C> Default for Entry<A, C> {
    fn default() -> Self {
        Self { users: 0, state: State::Host { is_short: false, left_out: None } }
    }
}

impl<A, C> Entry<A, C> {
    fn copy(&self) -> Option<&C> {
        match &self.state {
            State::Placed { copy, .. } | State::Failed { copy: Some(copy) } => Some(copy),
            State::Host { .. } | State::Failed { copy: None } => None,
        }
    }

    /// There is nothing to remember of it.
    fn is_idle(&self) -> bool {
        self.users == 0 && matches!(self.state, State::Host { is_short: false, left_out: None })
    }
}

/// The adapters `A` of a device, and their copies `C`.
#[derive(Debug)]
pub struct Residency<K, A, C> {
    tier: DeviceTier<K>,
    adapters: HashMap<K, Entry<A, C>>,
}

impl<K: Copy + Eq + Hash, A: Clone, C: Transit> Residency<K, A, C> {
    /// A device with room for `limit_bytes`, and nothing on it.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self { tier: DeviceTier::new(limit_bytes), adapters: HashMap::new() }
    }

    /// Sees to it that an adapter of `bytes` is there or comes, if there is room; `send` starts its way.
    pub fn bring(
        &mut self,
        key: K,
        bytes: u64,
        class: Class,
        send: impl FnOnce() -> Result<C, Unsent>,
    ) -> Way {
        if self.has_failed(key) {
            return Way::NoRoom;
        }
        match self.tier.place(key, bytes) {
            Placement::AlreadyThere => {}
            Placement::NoRoom | Placement::TooLarge => return Way::NoRoom,
            Placement::Placed { evicted } => {
                evicted.into_iter().for_each(|key| self.evict(key));
                match send() {
                    Ok(copy) => self.set_out(key, copy),
                    Err(unsent) => {
                        self.tier.remove(key);
                        self.stay(key, unsent);
                        return Way::NoRoom;
                    }
                }
            }
        }
        self.tier.touch(key);
        let Some(copy) = self.copy(key) else { return Way::NoRoom };
        if copy.is_complete() {
            return Way::There;
        }
        copy.raise(class);
        Way::Missing { bytes: copy.missing_bytes() }
    }

    /// Its copy has begun its way.
    fn set_out(&mut self, key: K, copy: C) {
        let entry = self.adapters.entry(key).or_default();
        entry.state = State::Placed { copy, is_awaited: false };
        if entry.users > 0 {
            let _ = self.tier.pin(key);
        }
    }

    /// It could not set out.
    fn stay(&mut self, key: K, unsent: Unsent) {
        // Who found the queue full tries again like anybody who found no room.
        if unsent == Unsent::NoMemory
            && let State::Host { is_short, .. } = &mut self.adapters.entry(key).or_default().state
        {
            *is_short = true;
        }
    }

    /// It gives up its place. Evictions happen between two passes, and nobody uses it.
    fn evict(&mut self, key: K) {
        let Some(entry) = self.adapters.get_mut(&key) else { return };
        let host = State::Host { is_short: false, left_out: None };
        match std::mem::replace(&mut entry.state, host) {
            State::Placed { copy, .. } => copy.discard(),
            State::Failed { copy } => {
                copy.into_iter().for_each(C::discard);
                entry.state = State::Failed { copy: None };
            }
            stays @ State::Host { .. } => entry.state = stays,
        }
        self.sweep(key);
    }

    /// Another request computes with it, wherever it is. It keeps its place until all have left.
    pub fn hold(&mut self, key: K) {
        let entry = self.adapters.entry(key).or_default();
        entry.users += 1;
        if entry.users == 1 {
            // One that is not there runs from the host tier; it is pinned if it comes.
            let _ = self.tier.pin(key);
        }
    }

    /// A request that held it has ended. Says whether others may now have room that they had not.
    pub fn release(&mut self, key: K) -> bool {
        let Some(entry) = self.adapters.get_mut(&key).filter(|entry| entry.users > 0) else { return false };
        entry.users -= 1;
        if entry.users > 0 {
            return false;
        }
        if let State::Host { left_out, .. } = &mut entry.state {
            *left_out = None;
        }
        self.sweep(key);
        let has_place = self.tier.contains(key);
        if has_place {
            self.tier.unpin(key);
        }
        has_place
    }

    /// A request waits until it has arrived; until then it keeps its place.
    pub fn await_arrival(&mut self, key: K) {
        let Some(entry) = self.adapters.get_mut(&key) else { return };
        if let State::Placed { is_awaited, .. } = &mut entry.state
            && !*is_awaited
        {
            *is_awaited = self.tier.pin(key);
        }
    }

    /// Its users found no room: it gets what others leave.
    pub fn leave_out(&mut self, key: K, adapter: &A) {
        if let State::Host { left_out, .. } = &mut self.adapters.entry(key).or_default().state {
            *left_out = Some(adapter.clone());
        }
    }

    /// Those that get what others leave.
    #[must_use]
    pub fn left_out(&self) -> Vec<(K, A)> {
        let wanting = |(key, entry): (&K, &Entry<A, C>)| match &entry.state {
            State::Host { left_out: Some(adapter), .. } => Some((*key, adapter.clone())),
            _ => None,
        };
        self.adapters.iter().filter_map(wanting).collect()
    }

    /// The way of its copy may be over: news that may be of a copy that was given up before it set out again.
    pub fn arrived(&mut self, key: K) {
        let Some(entry) = self.adapters.get_mut(&key) else { return };
        let State::Placed { copy, is_awaited } = &mut entry.state else { return };
        if !copy.is_over() {
            return;
        }
        if std::mem::take(is_awaited) {
            self.tier.unpin(key);
        }
        if !copy.is_complete() {
            let host = State::Host { is_short: false, left_out: None };
            if let State::Placed { copy, .. } = std::mem::replace(&mut entry.state, host) {
                entry.state = State::Failed { copy: Some(copy) };
            }
        }
    }

    /// It has left the host tier; nobody uses it.
    pub fn remove(&mut self, key: K) {
        let Some(entry) = self.adapters.remove(&key) else { return };
        match entry.state {
            State::Placed { copy, is_awaited } => {
                if is_awaited {
                    self.tier.unpin(key);
                }
                copy.discard();
            }
            State::Failed { copy } => copy.into_iter().for_each(C::discard),
            State::Host { .. } => {}
        }
        let removal = self.tier.remove(key);
        debug_assert_ne!(removal, Removal::Pinned, "an adapter that is used was unloaded");
    }

    /// Forgets that the device had no memory for it; says whether that was so.
    pub fn forget_shortage(&mut self, key: K) -> bool {
        let was_short = self.is_short(key);
        if was_short && let Some(entry) = self.adapters.get_mut(&key) {
            entry.state = State::Host { is_short: false, left_out: None };
            self.sweep(key);
        }
        was_short
    }

    /// Forgets an adapter of which there is nothing to remember.
    fn sweep(&mut self, key: K) {
        if self.adapters.get(&key).is_some_and(Entry::is_idle) {
            self.adapters.remove(&key);
        }
    }

    /// Its way ended by a fault.
    #[must_use]
    pub fn has_failed(&self, key: K) -> bool {
        self.adapters.get(&key).is_some_and(|entry| matches!(entry.state, State::Failed { .. }))
    }

    /// The tier had room for it and the device had not.
    #[must_use]
    pub fn is_short(&self, key: K) -> bool {
        let state = self.adapters.get(&key).map(|entry| &entry.state);
        matches!(state, Some(State::Host { is_short: true, .. }))
    }

    /// Whether room for it comes when others leave: nobody knows when a device without memory will have some.
    #[must_use]
    pub fn can_wait_for_room(&self, key: K) -> bool {
        !self.has_failed(key) && !self.is_short(key)
    }

    /// Its copy, on its way or there.
    #[must_use]
    pub fn copy(&self, key: K) -> Option<&C> {
        self.adapters.get(&key)?.copy()
    }

    /// Bytes that have not arrived of all that is on its way.
    #[must_use]
    pub fn on_the_way_bytes(&self) -> u64 {
        let copies = self.adapters.values().filter_map(Entry::copy);
        copies.filter(|copy| !copy.is_over()).map(C::missing_bytes).sum()
    }

    /// Whether it has a place, or there is one without anybody giving way.
    #[must_use]
    pub fn has_room(&self, key: K, bytes: u64) -> bool {
        self.tier.contains(key) || self.tier.held_bytes().saturating_add(bytes) <= self.tier.limit_bytes()
    }

    /// The places.
    #[must_use]
    pub fn tier(&self) -> &DeviceTier<K> {
        &self.tier
    }
}

#[cfg(test)]
mod tests;
