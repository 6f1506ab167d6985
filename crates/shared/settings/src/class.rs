//! `[[class]]`: service classes with their SLO targets, weights and limits.

use std::{collections::BTreeSet, fmt, num::NonZeroU32, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::values::{MAX_PROCESS_NAME_BYTES, is_process_name};

/// Maximum number of classes of a deployment.
pub const MAX_CLASSES: usize = 64;
/// Largest weight. Beside it, a weight of 1 still gets a thousandth.
pub const MAX_WEIGHT: u32 = 1000;
/// Name of the class for tenants and adapters without a class.
pub const DEFAULT_CLASS: &str = "default";
/// Name of the class for the lines of batches, which has no members.
pub const BACKGROUND_CLASS: &str = "background";

/// Service class: SLO targets, weights and limits for some tenants or adapters.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceClass {
    /// Unique name; `default` is the class for tenants and adapters without a class, and `background` for the
    /// lines of batches.
    pub name: String,
    /// Names of the tenants in the class.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<String>,
    /// Names of the adapters in the class. An adapter's class takes precedence over the tenant's class.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<String>,
    /// Weight of the class's tenants in the fair queue; 1 by default.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: NonZeroU32,
    /// Priority of the class: smaller values are served first; 1 by default.
    #[serde(default = "usual", skip_serializing_if = "is_usual")]
    pub priority: u8,
    /// SLO target of the time to first token, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<NonZeroU32>,
    /// SLO target of the mean time per output token, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<NonZeroU32>,
    /// Maximum number of requests per minute of each tenant; no limit by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_min: Option<NonZeroU32>,
    /// Maximum number of prompt and output tokens per minute of each tenant; no limit by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_min: Option<NonZeroU32>,
    /// Weight of the class's tenants in the executors' memory; 1 by default.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub cache_weight: NonZeroU32,
}

/// Weight of one tenant in the executors' memory, as a flag `TENANT=N`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheWeight {
    /// Name of the tenant.
    pub tenant: String,
    /// Weight relative to other tenants, from 1 to [`MAX_WEIGHT`].
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

/// Reason why service classes are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClassError {
    /// Text that is not a class in TOML.
    #[error("this is not a service class: {0}; write {{name=\"gold\",weight=3,tenants=[\"alice\"]}}")]
    Syntax(String),
    /// Name that is not a process name, see [`is_process_name`].
    #[error(
        "a service class needs a `name` of at most {MAX_PROCESS_NAME_BYTES} lower-case letters, digits \
         and '-', not `{0}`"
    )]
    Name(String),
    /// Weight larger than [`MAX_WEIGHT`].
    #[error("the weight of the class `{0}` exceeds the maximum {MAX_WEIGHT}")]
    Weight(String),
    /// Class other than `default` and `background` without tenants and adapters.
    #[error("the class `{0}` has no members; add `tenants` or `adapters`, or name it `{DEFAULT_CLASS}`")]
    Nobody(String),
    /// Class `default` or `background` with tenants or adapters.
    #[error("the class `{0}` cannot have members of its own; remove its `tenants` and `adapters`")]
    Members(String),
    /// Name that two classes have.
    #[error("two classes are called `{0}`")]
    Same(String),
    /// Tenant or adapter in more than one class.
    #[error("`{0}` is in more than one class; keep it in one")]
    Twice(String),
    /// More classes than [`MAX_CLASSES`].
    #[error("the configuration has more than {MAX_CLASSES} classes")]
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
    /// Returns the class for tenants and adapters without a class: no SLO targets and no limits.
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
    /// Checks each class alone, and that no name, tenant or adapter occurs twice.
    ///
    /// # Errors
    /// Fails if a class is not valid or conflicts with another; the error names it.
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

    /// Returns the cache weight of each tenant, or nothing if the weight is 1.
    pub fn cache_weights(&self) -> impl Iterator<Item = CacheWeight> {
        let tenants = self.tenants.iter().filter(|_| !is_one(&self.cache_weight));
        tenants.map(|tenant| CacheWeight { tenant: tenant.clone(), weight: self.cache_weight })
    }

    fn check_alone(&self) -> Result<(), ClassError> {
        let is_for_nobody = self.tenants.is_empty() && self.adapters.is_empty();
        let name = || self.name.clone();
        match [DEFAULT_CLASS, BACKGROUND_CLASS].contains(&&*self.name) {
            _ if !is_process_name(&self.name) => Err(ClassError::Name(name())),
            _ if self.weight.max(self.cache_weight).get() > MAX_WEIGHT => Err(ClassError::Weight(name())),
            true if !is_for_nobody => Err(ClassError::Members(name())),
            false if is_for_nobody => Err(ClassError::Nobody(name())),
            _ => Ok(()),
        }
    }
}

impl FromStr for ServiceClass {
    type Err = ClassError;

    /// Parses an inline table of TOML, the form of a flag.
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
            (&["gold"][..], "this is not a service class"),
            (&[r#"{name="gold",tenants=["a"],wieght=2}"#], "wieght"),
            (&[r#"{name="gold",tenants=["a"],weight=0}"#], "nonzero"),
            (&[r#"{name="Gold",tenants=["a"]}"#], "needs a `name`"),
            (&[r#"{name="gold",tenants=["a"],weight=1001}"#], "exceeds the maximum"),
            (&[r#"{name="gold"}"#], "has no members"),
            (&[r#"{name="default",tenants=["a"]}"#], "remove its"),
            (&[r#"{name="background",adapters=["a"]}"#], "remove its"),
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
        let without_members = ["default", "background"]
            .map(|name| format!(r#"{{name="{name}",tokens_per_min=1000}}"#).parse().unwrap());
        ServiceClass::check(&without_members).unwrap();
    }
}
