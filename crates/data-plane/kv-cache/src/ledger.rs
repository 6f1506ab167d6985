//! Ledger of memory: limits in bytes per account, and the bytes that each account holds.
//!
//! Accounts form a tree. A charge to an account also charges all its ancestors, and fails if any of them
//! would exceed its limit. So the root bounds all accounts together. Dropping a charge returns its bytes; the
//! owner of memory keeps the charge beside it.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Error of a charge that exceeds a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{asked_bytes} bytes do not fit: {held_bytes} of the {limit_bytes} bytes of {account} are in use")]
pub struct OutOfBudget {
    /// Name of the full account: the charged one, or an ancestor.
    pub account: String,
    /// Number of bytes that were requested.
    pub asked_bytes: u64,
    /// Number of bytes that the account holds.
    pub held_bytes: u64,
    /// Limit of the account in bytes.
    pub limit_bytes: u64,
}

/// Account with a limit in bytes. Clones are the same account.
#[derive(Clone)]
pub struct MemoryAccount(Arc<AccountState>);

struct AccountState {
    name: String,
    limit_bytes: u64,
    held_bytes: AtomicU64,
    part_of: Option<MemoryAccount>,
}

impl Default for MemoryAccount {
    /// Creates an account without a limit.
    fn default() -> Self {
        Self::new("memory", u64::MAX)
    }
}

impl MemoryAccount {
    /// Creates a root account; `name` is for people.
    #[must_use]
    pub fn new(name: &str, limit_bytes: u64) -> Self {
        Self(Arc::new(AccountState {
            name: name.to_owned(),
            limit_bytes,
            held_bytes: AtomicU64::new(0),
            part_of: None,
        }))
    }

    /// Creates a child account. The limits of all children may sum to more than this account's limit: the
    /// first to charge gets the bytes.
    #[must_use]
    pub fn part(&self, name: &str, limit_bytes: u64) -> Self {
        let (name, part_of) = (name.to_owned(), Some(self.clone()));
        Self(Arc::new(AccountState { name, limit_bytes, held_bytes: AtomicU64::new(0), part_of }))
    }

    /// Returns the account's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the limit in bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    /// Returns the bytes that the account and its descendants hold.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.0.held_bytes.load(Relaxed)
    }

    /// Whether a charge, a clone or a child of the account exists.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Reserves `bytes` until the returned charge is dropped.
    ///
    /// # Errors
    /// Returns an error if the account, or an ancestor, has too few bytes left.
    pub fn charge(&self, bytes: u64) -> Result<MemoryReservation, OutOfBudget> {
        let mut charge = MemoryReservation { account: self.clone(), bytes: 0 };
        charge.resize(bytes).map(|()| charge)
    }

    /// Checks that `bytes` could be reserved if no other charge existed.
    ///
    /// # Errors
    /// Returns an error if `bytes` exceed the limit of the account or of an ancestor.
    pub fn could_hold(&self, bytes: u64) -> Result<(), OutOfBudget> {
        self.line().try_for_each(|account| {
            if bytes <= account.limit_bytes() { Ok(()) } else { Err(account.full(0, bytes)) }
        })
    }

    /// Returns the account and all its ancestors.
    fn line(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |account| account.0.part_of.as_ref())
    }

    fn try_reserve(&self, bytes: u64) -> Result<(), OutOfBudget> {
        let limit = self.limit_bytes();
        let more = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        let taken = self.0.held_bytes.fetch_update(Relaxed, Relaxed, more);
        taken.map_err(|held| self.full(held, bytes))?;
        // A full ancestor prevents its descendants from holding more.
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

/// Reserved bytes of an account, returned when dropped.
#[derive(Debug)]
pub struct MemoryReservation {
    account: MemoryAccount,
    bytes: u64,
}

impl MemoryReservation {
    /// Returns the number of reserved bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Keeps the bytes reserved for the lifetime of the account.
    pub fn for_good(mut self) {
        self.bytes = 0;
    }

    /// Reserves `bytes` more of the same account, as a separate charge.
    ///
    /// # Errors
    /// Returns an error if the account has too few bytes left.
    pub fn another(&self, bytes: u64) -> Result<Self, OutOfBudget> {
        self.account.charge(bytes)
    }

    /// Changes the reservation to `bytes`. A smaller size always succeeds.
    ///
    /// # Errors
    /// Returns an error if the account has too few bytes left; the reservation is unchanged then.
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
