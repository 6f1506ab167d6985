//! `[[class]]`: what is promised to tenants and adapters, and what they may have.

use std::{collections::BTreeSet, fmt, num::NonZeroU32, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::values::{MAX_PROCESS_NAME_BYTES, is_process_name};

/// Most classes of a deployment.
pub const MAX_CLASSES: usize = 64;
/// Largest weight: beside it the least still gets a thousandth.
pub const MAX_WEIGHT: u32 = 1000;
/// The class of everybody who has no other.
pub const DEFAULT_CLASS: &str = "default";

/// A service class.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceClass {
    /// What people call it; `default` is that of everybody who has no other.
    pub name: String,
    /// Tenants it is for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<String>,
    /// Adapters it is for, whoever asks: they stand before tenants.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<String>,
    /// Its tenants' part of what is served, beside others; 1 if it is not said.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: NonZeroU32,
    /// Who goes first: the least. 1 if it is not said.
    #[serde(default = "usual", skip_serializing_if = "is_usual")]
    pub priority: u8,
    /// Milliseconds to the first token that are promised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<NonZeroU32>,
    /// Milliseconds for each token after it that are promised, in the mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<NonZeroU32>,
    /// Requests a minute of each tenant; no limit if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_min: Option<NonZeroU32>,
    /// Tokens a minute of each tenant, of prompts and answers; no limit if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_min: Option<NonZeroU32>,
    /// Its tenants' part of the executors' memory beside others; 1 if it is not said.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub cache_weight: NonZeroU32,
}

/// A tenant's part of the executors' memory, as a flag writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheWeight {
    /// Whose.
    pub tenant: String,
    /// Its part beside others.
    pub weight: NonZeroU32,
}

impl FromStr for CacheWeight {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once('=').filter(|(tenant, _)| !tenant.is_empty());
        let weight = |(tenant, weight): (&str, &str)| {
            let weight = weight.parse().ok().filter(|weight: &NonZeroU32| weight.get() <= MAX_WEIGHT)?;
            Some(Self { tenant: tenant.to_owned(), weight })
        };
        parts.and_then(weight).ok_or_else(|| format!("expected TENANT=N, N from 1 to {MAX_WEIGHT}"))
    }
}

impl fmt::Display for CacheWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.tenant, self.weight)
    }
}

/// Why classes cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClassError {
    /// Not a class as TOML writes it.
    #[error("this is no class: {0}; write {{name=\"gold\",weight=3,tenants=[\"alice\"]}}")]
    Syntax(String),
    /// A name that cannot be one.
    #[error(
        "each class needs a `name` of lower-case letters, digits and '-', {MAX_PROCESS_NAME_BYTES} at most, not `{0}`"
    )]
    Name(String),
    /// A weight beyond the largest.
    #[error("the class `{0}` has a weight beyond {MAX_WEIGHT}, the largest there is")]
    Weight(String),
    /// A class with members which has none.
    #[error("the class `{0}` is for nobody; name `tenants` or `adapters`, or call it `{DEFAULT_CLASS}`")]
    Nobody(String),
    /// The default class names members.
    #[error(
        "the class `{DEFAULT_CLASS}` is for everybody who has no other; leave out its `tenants` and `adapters`"
    )]
    Members,
    /// Two of one name.
    #[error("two classes are called `{0}`")]
    Same(String),
    /// Somebody is in two.
    #[error("`{0}` is in more than one class; leave it in one")]
    Twice(String),
    /// More than there may be.
    #[error("there are more than {MAX_CLASSES} classes")]
    TooMany,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

fn is_one(number: &NonZeroU32) -> bool {
    *number == one()
}

fn usual() -> u8 {
    1
}

fn is_usual(priority: &u8) -> bool {
    *priority == usual()
}

impl Default for ServiceClass {
    /// That of everybody who has no other: nothing is promised, nothing is limited.
    fn default() -> Self {
        Self {
            name: DEFAULT_CLASS.to_owned(),
            tenants: Vec::new(),
            adapters: Vec::new(),
            weight: one(),
            priority: usual(),
            ttft_ms: None,
            tpot_ms: None,
            requests_per_min: None,
            tokens_per_min: None,
            cache_weight: one(),
        }
    }
}

impl ServiceClass {
    /// Fails unless they can be meant, each and together.
    ///
    /// # Errors
    /// What cannot be, by name.
    pub fn check(classes: &[Self]) -> Result<(), ClassError> {
        if classes.len() > MAX_CLASSES {
            return Err(ClassError::TooMany);
        }
        let (mut names, mut tenants, mut adapters) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for class in classes {
            class.check_alone()?;
            if !names.insert(&class.name) {
                return Err(ClassError::Same(class.name.clone()));
            }
            let twice = class.tenants.iter().find(|tenant| !tenants.insert(*tenant));
            let twice = twice.or_else(|| class.adapters.iter().find(|adapter| !adapters.insert(*adapter)));
            if let Some(member) = twice {
                return Err(ClassError::Twice(member.clone()));
            }
        }
        Ok(())
    }

    /// Its tenants' parts of the executors' memory, if they are not the usual one.
    pub fn cache_weights(&self) -> impl Iterator<Item = CacheWeight> {
        let tenants = self.tenants.iter().filter(|_| !is_one(&self.cache_weight));
        tenants.map(|tenant| CacheWeight { tenant: tenant.clone(), weight: self.cache_weight })
    }

    fn check_alone(&self) -> Result<(), ClassError> {
        let is_for_nobody = self.tenants.is_empty() && self.adapters.is_empty();
        let name = || self.name.clone();
        match self.name == DEFAULT_CLASS {
            _ if !is_process_name(&self.name) => Err(ClassError::Name(name())),
            _ if self.weight.max(self.cache_weight).get() > MAX_WEIGHT => Err(ClassError::Weight(name())),
            true if !is_for_nobody => Err(ClassError::Members),
            false if is_for_nobody => Err(ClassError::Nobody(name())),
            _ => Ok(()),
        }
    }
}

impl FromStr for ServiceClass {
    type Err = ClassError;

    /// Reads it as a flag writes it: an inline table of TOML.
    fn from_str(text: &str) -> Result<Self, ClassError> {
        #[derive(Deserialize)]
        struct ClassLine {
            class: ServiceClass,
        }
        let read = toml::from_str::<ClassLine>(&format!("class = {text}"));
        let class = read.map_err(|error| ClassError::Syntax(error.message().to_owned()))?.class;
        class.check_alone()?;
        Ok(class)
    }
}

impl fmt::Display for ServiceClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = toml::Value::try_from(self).map_err(|_| fmt::Error)?;
        write!(f, "{value}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLD: &str = r#"{name="gold",tenants=["a b","c\"d"],weight=3,priority=0,ttft_ms=500}"#;

    #[test]
    fn a_class_is_written_as_it_is_read() {
        let class: ServiceClass = GOLD.parse().unwrap();
        assert_eq!((class.weight.get(), class.priority, class.cache_weight.get()), (3, 0, 1));
        let written = class.to_string();
        assert!(!written.contains('\n'), "{written}");
        assert_eq!(written.parse(), Ok(class), "{written}");
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        let refused = |classes: &[&str]| {
            let classes: Result<Vec<ServiceClass>, _> = classes.iter().map(|text| text.parse()).collect();
            classes.and_then(|classes| ServiceClass::check(&classes)).unwrap_err().to_string()
        };
        for (classes, why) in [
            (&["gold"][..], "this is no class"),
            (&[r#"{name="gold",tenants=["a"],wieght=2}"#], "wieght"),
            (&[r#"{name="gold",tenants=["a"],weight=0}"#], "nonzero"),
            (&[r#"{name="Gold",tenants=["a"]}"#], "needs a `name`"),
            (&[r#"{name="gold",tenants=["a"],weight=1001}"#], "the largest there is"),
            (&[r#"{name="gold"}"#], "for nobody"),
            (&[r#"{name="default",tenants=["a"]}"#], "leave out"),
            (&[r#"{name="gold",tenants=["a"]}"#, r#"{name="gold",tenants=["b"]}"#], "two classes"),
            (&[r#"{name="gold",tenants=["a"]}"#, r#"{name="tin",tenants=["a"]}"#], "`a` is in more"),
        ] {
            let message = refused(classes);
            assert!(message.contains(why), "{classes:?}: {message}");
        }
        for wrong in ["a", "=2", "a=0", "a=1001", "a=x"] {
            wrong.parse::<CacheWeight>().unwrap_err();
        }
        let weights: Vec<CacheWeight> = vec!["a=b=2".parse().unwrap()];
        let class: ServiceClass = r#"{name="x",tenants=["a=b"],cache_weight=2}"#.parse().unwrap();
        assert_eq!(
            (class.cache_weights().collect::<Vec<_>>(), weights[0].to_string()),
            (weights, "a=b=2".into())
        );
        let default = r#"{name="default",tokens_per_min=1000}"#.parse().unwrap();
        ServiceClass::check(&[default]).unwrap();
    }
}
