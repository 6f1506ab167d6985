//! Tracks the possible contents of the registry after requests and a crash.
//!
//! A change with an answer is certain. A change whose answer was lost may have happened or not; the
//! registry's content then decides. Any other content means a lost or an invented adapter.

use std::collections::BTreeMap;

use crate::client::RequestFault;

type NamedGeneration = Option<String>;

/// Expected content of the registry.
#[derive(Debug, Default)]
pub struct PossibleNames {
    /// Possible adapter versions of each name; one if it is certain.
    possible: BTreeMap<String, Vec<NamedGeneration>>,
}

impl PossibleNames {
    /// Records the request to set `name` to `wanted`, and its outcome.
    pub fn change<T>(&mut self, name: &str, wanted: NamedGeneration, outcome: &Result<T, RequestFault>) {
        let possible = self.possible.entry(name.to_owned()).or_insert_with(|| vec![None]);
        match outcome {
            Ok(_) => *possible = vec![wanted],
            // A typed refusal changes nothing; only a lost answer is uncertain.
            Err(RequestFault::Refused { .. }) => {}
            Err(RequestFault::Silence(_)) => possible.push(wanted),
        }
    }

    /// Returns the certain adapter version of `name`; panics while it is uncertain.
    #[must_use]
    pub fn certain(&self, name: &str) -> NamedGeneration {
        match self.possible.get(name).map(Vec::as_slice) {
            None => None,
            Some([adapter]) => adapter.clone(),
            Some(several) => {
                panic!("{name} may stand for any of {several:?}: compare with the registry first")
            }
        }
    }

    /// True if `name` was ever changed.
    #[must_use]
    pub fn knows(&self, name: &str) -> bool {
        self.possible.contains_key(name)
    }

    /// Compares with the registry's content, which resolves uncertain changes.
    pub fn reconcile(&mut self, registry: &[(String, String)]) {
        let held: BTreeMap<&str, &str> =
            registry.iter().map(|(name, generation)| (name.as_str(), generation.as_str())).collect();
        for (name, possible) in &mut self.possible {
            let found = held.get(name.as_str()).map(|generation| (*generation).to_owned());
            assert!(possible.contains(&found), "{name} is {found:?}, but only {possible:?} was acknowledged");
            *possible = vec![found];
        }
        for name in held.keys() {
            assert!(self.possible.contains_key(*name), "nobody has loaded an adapter named {name}");
        }
    }
}
