//! One ledger of memory: what may be held in bytes, by whom, and who holds it now (D4.10, X6).
//!
//! Accounts form a tree: what is charged to one is charged to all that it is a part of, and nothing is charged that is more
//! than any of them may hold. So the root bounds everything, whoever asks for it. A charge gives its bytes back when it is
//! dropped, wherever that happens: whoever keeps memory keeps the charge beside it.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Why bytes were not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{asked_bytes} bytes are more than is left of the {limit_bytes} bytes of {account}, of which {held_bytes} are held"
)]
pub struct OutOfBudget {
    /// The account that is full: the one that was asked, or one that it is a part of.
    pub account: String,
    /// Bytes that were asked for.
    pub asked_bytes: u64,
    /// Bytes it holds.
    pub held_bytes: u64,
    /// Bytes it may hold.
    pub limit_bytes: u64,
}

/// Bytes that somebody may hold. Clones are the same account.
#[derive(Clone)]
pub struct MemoryAccount(Arc<AccountState>);

struct AccountState {
    name: String,
    limit_bytes: u64,
    held_bytes: AtomicU64,
    part_of: Option<MemoryAccount>,
}

impl Default for MemoryAccount {
    /// One without a bound.
    fn default() -> Self {
        Self::new("memory", u64::MAX)
    }
}

impl MemoryAccount {
    /// One that is part of no other; `name` is for people.
    #[must_use]
    pub fn new(name: &str, limit_bytes: u64) -> Self {
        Self(Arc::new(AccountState {
            name: name.to_owned(),
            limit_bytes,
            held_bytes: AtomicU64::new(0),
            part_of: None,
        }))
    }

    /// A part of this one. The parts of an account may be promised more than it has: who comes first has it.
    #[must_use]
    pub fn part(&self, name: &str, limit_bytes: u64) -> Self {
        let (name, part_of) = (name.to_owned(), Some(self.clone()));
        Self(Arc::new(AccountState { name, limit_bytes, held_bytes: AtomicU64::new(0), part_of }))
    }

    /// What people call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Bytes it may hold.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    /// Bytes it holds, with those of its parts.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.0.held_bytes.load(Relaxed)
    }

    /// Whether anybody has a charge to it, or a clone or part of it.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Takes `bytes` until the charge is dropped.
    ///
    /// # Errors
    /// If it, or one that it is a part of, has too few left.
    pub fn charge(&self, bytes: u64) -> Result<MemoryReservation, OutOfBudget> {
        let mut charge = MemoryReservation { account: self.clone(), bytes: 0 };
        charge.resize(bytes).map(|()| charge)
    }

    /// Whether `bytes` could be taken if nothing else were.
    ///
    /// # Errors
    /// If they are more than it, or one that it is a part of, may hold at all.
    pub fn could_hold(&self, bytes: u64) -> Result<(), OutOfBudget> {
        self.line().try_for_each(|account| {
            if bytes <= account.limit_bytes() { Ok(()) } else { Err(account.full(0, bytes)) }
        })
    }

    /// It, and all that it is a part of.
    fn line(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |account| account.0.part_of.as_ref())
    }

    fn try_reserve(&self, bytes: u64) -> Result<(), OutOfBudget> {
        let limit = self.limit_bytes();
        let more = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        let taken = self.0.held_bytes.fetch_update(Relaxed, Relaxed, more);
        taken.map_err(|held| self.full(held, bytes))?;
        // One that is full keeps its parts from holding more.
        self.0
            .part_of
            .as_ref()
            .map_or(Ok(()), |whole| whole.try_reserve(bytes))
            .inspect_err(|_| self.0.give_back(bytes))
    }

    fn give_back(&self, bytes: u64) {
        self.line().for_each(|account| account.0.give_back(bytes));
    }

    fn full(&self, held_bytes: u64, asked_bytes: u64) -> OutOfBudget {
        OutOfBudget {
            account: self.name().to_owned(),
            asked_bytes,
            held_bytes,
            limit_bytes: self.limit_bytes(),
        }
    }
}

impl AccountState {
    fn give_back(&self, bytes: u64) {
        let before = self.held_bytes.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "{} gives back {bytes} bytes of {before}", self.name);
    }
}

impl fmt::Debug for MemoryAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} of {} bytes", self.name(), self.held_bytes(), self.limit_bytes())
    }
}

/// Bytes of an account, given back when dropped.
#[derive(Debug)]
pub struct MemoryReservation {
    account: MemoryAccount,
    bytes: u64,
}

impl MemoryReservation {
    /// How many.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Holds the bytes for as long as there is the account.
    pub fn for_good(mut self) {
        self.bytes = 0;
    }

    /// As many of the same account.
    ///
    /// # Errors
    /// If there are not so many.
    pub fn another(&self, bytes: u64) -> Result<Self, OutOfBudget> {
        self.account.charge(bytes)
    }

    /// Holds `bytes` instead. Fewer are always granted.
    ///
    /// # Errors
    /// If there are not so many; it holds what it held.
    pub fn resize(&mut self, bytes: u64) -> Result<(), OutOfBudget> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.account.try_reserve(more)?,
            None => self.account.give_back(self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.account.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests")]

    use std::thread;

    use scheduling::random::Rng;

    use super::*;

    #[test]
    fn what_a_part_holds_its_whole_holds_and_whoever_is_full_says_so() {
        let machine = MemoryAccount::new("this machine", 100);
        let (adapters, history) = (machine.part("adapters", 80), machine.part("history", 80));
        let held = adapters.charge(60).unwrap();
        assert_eq!((machine.held_bytes(), adapters.held_bytes(), history.held_bytes()), (60, 60, 0));
        let refused = history.charge(41).unwrap_err();
        assert_eq!((refused.account.as_str(), refused.held_bytes), ("this machine", 60));
        assert_eq!(adapters.charge(21).unwrap_err().account, "adapters");
        assert_eq!(history.held_bytes(), 0, "what is refused is held nowhere");
        drop(held);
        assert_eq!(machine.held_bytes(), 0);
        assert_eq!(adapters.could_hold(81).unwrap_err().account, "adapters");
    }

    #[test]
    fn a_charge_grows_while_there_is_room_and_shrinks_always() {
        let account = MemoryAccount::new("adapters", 100);
        let mut held = account.charge(40).unwrap();
        let _other = account.charge(50).unwrap();
        assert!(held.resize(51).is_err());
        assert_eq!(held.bytes(), 40);
        held.resize(50).unwrap();
        held.resize(1).unwrap();
        assert_eq!(account.held_bytes(), 51);
        assert!(account.charge(u64::MAX).is_err());
    }

    #[test]
    fn no_account_is_ever_above_its_bound_whatever_threads_ask_for() {
        let machine = MemoryAccount::new("this machine", 1000);
        let parts = [machine.part("a", 600), machine.part("b", 700)];
        thread::scope(|scope| {
            for number in 0..4_u64 {
                let (machine, parts) = (&machine, &parts);
                scope.spawn(move || {
                    let random = Rng::seeded(number);
                    let mut held: Vec<MemoryReservation> = Vec::new();
                    for step in 0..20_000 {
                        let (draw, bytes) = (random.bits(2 * step) as usize, random.bits(2 * step + 1) % 200);
                        match draw % 3 {
                            0 => held.extend(parts[draw / 3 % 2].charge(bytes)),
                            1 if !held.is_empty() => drop(held.swap_remove(draw / 3 % held.len())),
                            _ => {
                                let _ = held.last_mut().map(|charge| charge.resize(bytes));
                            }
                        }
                        let all = parts.iter().chain([machine]);
                        assert!(all.into_iter().all(|account| account.held_bytes() <= account.limit_bytes()));
                    }
                });
            }
        });
        assert!([&machine, &parts[0], &parts[1]].iter().all(|account| account.held_bytes() == 0));
    }
}
