//! The memory of the host for several bases: which of them are awake at the start.
//!
//! Each base gets a part of the host's memory, which its executors never exceed: the part that is set, or
//! what its executors need at most. Bases that never sleep must fit together, and each base that may sleep
//! must fit beside them. The gateway keeps the parts of all bases that are awake within the host's memory.

use settings::{ByteCount, MemoryFraction};

use super::capacity::{CapacityError, host_memory};
use crate::{
    deployment::config::{DeployedExecutor, DeploymentConfig},
    exit::{Exit, Explain},
    home::HomeDirectory,
    terminal::{findings::Finding, table::size},
};

/// Divisor of the spare part of a base's memory, for what its executors take beside the counted memory.
const SPARE: u64 = 8;

/// Memory of the host and of its bases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostLedger {
    /// Memory for all bases that are awake.
    pub(crate) limit_bytes: u64,
    /// Bases in the order of the settings.
    pub(crate) bases: Vec<LedgerBase>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LedgerBase {
    pub(crate) name: String,
    /// Memory for the executors of the base.
    pub(crate) bytes: u64,
    /// Number of the base's executors.
    pub(crate) executors: u64,
    /// Whether the base has a time without requests after which the base sleeps.
    pub(crate) sleeps: bool,
    /// Whether the executors run at the start.
    pub(crate) is_awake: bool,
}

/// Reason why the bases of a deployment cannot be served by one host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    #[error("the base `{base}` cannot be sized")]
    Unknown { base: String, source: Box<CapacityError> },
    #[error(
        "the base `{base}` needs {} of memory beside the bases that never sleep, and {} of {} are left",
        size(*bytes), size(limit.saturating_sub(*held)), size(*limit)
    )]
    NoRoom {
        base: String,
        /// Memory that the base needs.
        bytes: u64,
        /// Memory of bases that never sleep.
        held: u64,
        /// Memory of the host.
        limit: u64,
    },
}

impl Explain for LedgerError {
    fn exit(&self) -> Exit {
        match self {
            Self::Unknown { source, .. } => source.exit(),
            Self::NoRoom { .. } => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Unknown { source, .. } => source.next(),
            Self::NoRoom { base, .. } => Some(format!(
                "set sleep_after_s for other bases, or lower memory.device and adapter_bytes of `{base}`"
            )),
        }
    }
}

impl HostLedger {
    /// Sizes the bases of a deployment; `None` if it has one base.
    pub(crate) fn of(config: &DeploymentConfig, home: &HomeDirectory) -> Result<Option<Self>, LedgerError> {
        if config.base.is_empty() {
            return Ok(None);
        }
        let (mut bases, mut limit_bytes): (Vec<LedgerBase>, u64) = (Vec::new(), 0);
        for member in config.members() {
            let name = member.base.clone().unwrap_or_default();
            let unknown = |source| LedgerError::Unknown { base: name.clone(), source: Box::new(source) };
            let unlimited = DeployedExecutor { config: without_part(&member.config), ..member.clone() };
            let (needed, host_bytes) = host_memory(&unlimited, home).map_err(unknown)?;
            let part = member.config.memory.process.map(|part| part.bytes_of(host_bytes));
            let bytes = part.unwrap_or(needed + needed / SPARE);
            limit_bytes = limit_bytes.max(host_bytes);
            match bases.last_mut().filter(|base| base.name == name) {
                Some(base) => {
                    base.bytes = base.bytes.saturating_add(bytes);
                    base.executors += 1;
                }
                None => {
                    let sleeps = member.config.model.sleep_after_s.unwrap_or(0) > 0;
                    bases.push(LedgerBase { name, bytes, executors: 1, sleeps, is_awake: false });
                }
            }
        }
        Self { limit_bytes, bases }.placed().map(Some)
    }

    /// Decides which bases are awake at the start: those that never sleep, and the others in their order as
    /// far as the memory suffices.
    fn placed(mut self) -> Result<Self, LedgerError> {
        let mut held = 0_u64;
        let limit = self.limit_bytes;
        for base in self.bases.iter_mut().filter(|base| !base.sleeps) {
            check(base, held, limit)?;
            held += base.bytes;
            base.is_awake = true;
        }
        let of_sleepless = held;
        for base in self.bases.iter_mut().filter(|base| base.sleeps) {
            check(base, of_sleepless, limit)?;
            base.is_awake = held.saturating_add(base.bytes) <= limit;
            held += if base.is_awake { base.bytes } else { 0 };
        }
        Ok(self)
    }

    /// Returns the memory of one executor of a base.
    pub(crate) fn part_of(&self, base: &str) -> Option<MemoryFraction> {
        let base = self.bases.iter().find(|one| one.name == base)?;
        Some(MemoryFraction::Bytes(ByteCount(base.bytes / base.executors)))
    }

    /// Returns the names of the bases whose executors do not run at the start.
    pub(crate) fn asleep(&self) -> Vec<String> {
        let asleep = self.bases.iter().filter(|base| !base.is_awake);
        asleep.map(|base| base.name.clone()).collect()
    }

    /// Describes the parts of the bases for `holobiont doctor`.
    pub(super) fn finding(&self) -> Finding {
        let parts = self.bases.iter().map(|base| {
            let start = if base.is_awake { "" } else { ", asleep at the start" };
            format!("{} {}{start}", base.name, size(base.bytes))
        });
        let parts: Vec<String> = parts.collect();
        Finding::ok(
            "bases",
            format!("{} of {} for all that are awake", parts.join("; "), size(self.limit_bytes)),
        )
    }
}

fn check(base: &LedgerBase, held: u64, limit: u64) -> Result<(), LedgerError> {
    match held.saturating_add(base.bytes) <= limit {
        true => Ok(()),
        false => Err(LedgerError::NoRoom { base: base.name.clone(), bytes: base.bytes, held, limit }),
    }
}

/// Returns the settings of an executor that may use all memory of the host.
fn without_part(config: &DeploymentConfig) -> DeploymentConfig {
    let mut config = config.clone();
    config.memory.process = None;
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(bases: &[(&str, u64, bool)]) -> Result<HostLedger, LedgerError> {
        let base = |(name, bytes, sleeps): &(&str, u64, bool)| LedgerBase {
            name: (*name).to_owned(),
            bytes: *bytes,
            executors: 1,
            sleeps: *sleeps,
            is_awake: false,
        };
        HostLedger { limit_bytes: 10, bases: bases.iter().map(base).collect() }.placed()
    }

    #[test]
    fn bases_that_may_sleep_are_awake_at_the_start_as_far_as_the_memory_suffices() {
        let all = ledger(&[("a", 4, true), ("b", 5, true), ("c", 1, false)]).unwrap();
        assert!(all.asleep().is_empty());
        let more = ledger(&[("a", 4, true), ("b", 6, true), ("c", 2, false), ("d", 3, true)]).unwrap();
        assert_eq!(more.asleep(), ["b"]);
    }

    #[test]
    fn a_base_without_room_beside_those_that_never_sleep_is_refused_by_name() {
        for (bases, name) in [
            (vec![("a", 6, false), ("b", 5, false)], "`b`"),
            (vec![("a", 6, true), ("b", 5, false)], "`a`"),
            (vec![("a", 11, true)], "`a`"),
        ] {
            let error = ledger(&bases).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
            assert_eq!(error.exit(), Exit::Usage);
        }
    }
}
