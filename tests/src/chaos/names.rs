//! What the registry was told, what it acknowledged, and what it may hold after a crash.
//!
//! A change that was answered is certain. One whose answer was lost may have happened or not; the registry says which,
//! and from then on that is certain too. Anything else is a lost or an invented adapter.

use std::collections::BTreeMap;

use crate::client::RequestFault;

/// A name's adapter: a generation, or none.
type NamedGeneration = Option<String>;

/// See the module's description.
#[derive(Debug, Default)]
pub struct PossibleNames {
    /// What each name may stand for; one possibility if it is certain.
    possible: BTreeMap<String, Vec<NamedGeneration>>,
}

impl PossibleNames {
    /// Notes that `name` was asked to stand for `wanted`, and what came of it.
    pub fn change<T>(&mut self, name: &str, wanted: NamedGeneration, outcome: &Result<T, RequestFault>) {
        let possible = self.possible.entry(name.to_owned()).or_insert_with(|| vec![None]);
        match outcome {
            Ok(_) => *possible = vec![wanted],
            // A typed refusal changes nothing; only silence is uncertain.
            Err(RequestFault::Refused { .. }) => {}
            Err(RequestFault::Silence(_)) => possible.push(wanted),
        }
    }

    /// What `name` certainly stands for; panics while that is uncertain.
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

    /// Compares with what the registry holds, which settles what was uncertain.
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
