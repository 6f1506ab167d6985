//! Service classes: whose request is of which, what it was promised, and how many promises were kept.
//!
//! An adapter's class stands before its tenant's; who has neither is of the class `default`. Callers cannot choose: tenants come
//! from keys, and adapters have the names that the operator gave them.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use scheduling::routing::Slo;
use settings::{DEFAULT_CLASS, ServiceClass};

/// The number of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(usize);

/// What is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// The time to the first token.
    FirstToken,
    /// The mean time for each after it.
    PerToken,
}

impl Objective {
    /// Both.
    pub const ALL: [Self; 2] = [Self::FirstToken, Self::PerToken];

    /// What settings and figures call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstToken => "ttft",
            Self::PerToken => "tpot",
        }
    }
}

/// What became of a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SloOutcome {
    /// It was kept.
    Met,
    /// It was not.
    Missed,
    /// The request was refused early, for it would not have been kept.
    Refused,
}

impl SloOutcome {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Met, Self::Missed, Self::Refused];

    /// What figures call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::Refused => "refused",
        }
    }
}

/// What a class has come to so far.
#[derive(Debug, Default)]
pub struct SloCounters {
    /// By objective, then by outcome.
    promises: [[AtomicU64; 3]; 2],
    requests: AtomicU64,
    /// Requests that were refused for they were more than the class may have in a minute.
    throttled: AtomicU64,
    tokens: AtomicU64,
    /// Sums in microseconds, and of how many, by objective.
    times: [(AtomicU64, AtomicU64); 2],
}

impl SloCounters {
    /// A request is taken.
    pub fn request(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    /// One was more than may be had in a minute.
    pub fn throttle(&self) {
        self.throttled.fetch_add(1, Relaxed);
    }

    /// Tokens were served, of a prompt or an answer.
    pub fn serve(&self, tokens: u64) {
        self.tokens.fetch_add(tokens, Relaxed);
    }

    /// A promise has this outcome.
    pub fn promise(&self, objective: Objective, outcome: SloOutcome) {
        self.promises[objective as usize][outcome as usize].fetch_add(1, Relaxed);
    }

    /// Requests taken, requests throttled, tokens served.
    #[must_use]
    pub fn counts(&self) -> [u64; 3] {
        [&self.requests, &self.throttled, &self.tokens].map(|count| count.load(Relaxed))
    }

    /// How many promises had this outcome.
    #[must_use]
    pub fn promises(&self, objective: Objective, outcome: SloOutcome) -> u64 {
        self.promises[objective as usize][outcome as usize].load(Relaxed)
    }

    /// The mean of what was seen, promised or not.
    #[must_use]
    pub fn mean(&self, objective: Objective) -> Option<Duration> {
        let (sum_us, count) = &self.times[objective as usize];
        let mean_us = sum_us.load(Relaxed).checked_div(count.load(Relaxed))?;
        Some(Duration::from_micros(mean_us))
    }
}

/// A class.
#[derive(Debug)]
pub struct ClassState {
    /// As it is set.
    pub settings: ServiceClass,
    /// What is promised.
    pub slo: Slo,
    /// What it has come to.
    pub tally: SloCounters,
}

impl ClassState {
    fn new(settings: ServiceClass) -> Self {
        let us = |ms: Option<std::num::NonZeroU32>| ms.map(|ms| u64::from(ms.get()) * 1000);
        let slo = Slo { ttft_us: us(settings.ttft_ms), tpot_us: us(settings.tpot_ms) };
        Self { settings, slo, tally: SloCounters::default() }
    }

    /// A request of it failed before it had a token.
    pub fn failed(&self) {
        if self.slo.ttft_us.is_some() {
            self.tally.promise(Objective::FirstToken, SloOutcome::Missed);
        }
    }

    /// A request of it saw this.
    pub fn saw(&self, objective: Objective, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (sum_us, count) = &self.tally.times[objective as usize];
        sum_us.fetch_add(us, Relaxed);
        count.fetch_add(1, Relaxed);
        let promised_us = match objective {
            Objective::FirstToken => self.slo.ttft_us,
            Objective::PerToken => self.slo.tpot_us,
        };
        if let Some(promised_us) = promised_us {
            self.tally
                .promise(objective, if us <= promised_us { SloOutcome::Met } else { SloOutcome::Missed });
        }
    }
}

/// All classes; the first is that of everybody who has no other.
#[derive(Debug)]
pub struct ServiceClasses {
    classes: Vec<ClassState>,
    of_tenant: HashMap<String, ClassId>,
    of_adapter: HashMap<String, ClassId>,
}

impl ServiceClasses {
    /// Those that were set, which must have been checked, and the default.
    #[must_use]
    pub fn new(settings: Vec<ServiceClass>) -> Self {
        let (mut default, others): (Vec<_>, Vec<_>) =
            settings.into_iter().partition(|class| class.name == DEFAULT_CLASS);
        let first = default.pop().unwrap_or_default();
        let classes: Vec<ClassState> = std::iter::once(first).chain(others).map(ClassState::new).collect();
        let members = |of: fn(&ServiceClass) -> &Vec<String>| {
            let numbered = classes.iter().enumerate();
            numbered
                .flat_map(|(id, class)| {
                    of(&class.settings).iter().map(move |name| (name.clone(), ClassId(id)))
                })
                .collect()
        };
        let (of_tenant, of_adapter) = (members(|class| &class.tenants), members(|class| &class.adapters));
        Self { classes, of_tenant, of_adapter }
    }

    /// Of which class a request is.
    #[must_use]
    pub fn of(&self, adapter: Option<&str>, tenant: &str) -> ClassId {
        let of_adapter = adapter.and_then(|adapter| self.of_adapter.get(adapter));
        of_adapter.or_else(|| self.of_tenant.get(tenant)).copied().unwrap_or(ClassId(0))
    }

    /// Whether a request's adapter may change its class.
    #[must_use]
    pub fn look_at_adapters(&self) -> bool {
        !self.of_adapter.is_empty()
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, id: ClassId) -> &ClassState {
        &self.classes[id.0]
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (ClassId, &ClassState)> {
        self.classes.iter().enumerate().map(|(id, class)| (ClassId(id), class))
    }
}

impl Default for ServiceClasses {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapters_class_stands_before_its_tenants() {
        let classes = [
            r#"{name="gold",tenants=["alice"]}"#,
            r#"{name="batch",adapters=["nightly"],priority=9}"#,
            r#"{name="default",weight=2}"#,
        ];
        let classes = ServiceClasses::new(classes.map(|text| text.parse().unwrap()).to_vec());
        let name = |adapter, tenant| classes.get(classes.of(adapter, tenant)).settings.name.as_str();
        assert_eq!(name(None, "alice"), "gold");
        assert_eq!(name(Some("nightly"), "alice"), "batch");
        assert_eq!(name(Some("other"), "alice"), "gold");
        assert_eq!(name(Some("other"), "bob"), "default");
        assert_eq!(classes.get(classes.of(None, "bob")).settings.weight.get(), 2);
    }

    #[test]
    fn what_is_seen_is_held_against_what_was_promised() {
        let class = ClassState::new(r#"{name="gold",tenants=["a"],ttft_ms=500}"#.parse().unwrap());
        for ms in [400, 500, 501] {
            class.saw(Objective::FirstToken, Duration::from_millis(ms));
            class.saw(Objective::PerToken, Duration::from_millis(ms));
        }
        let counted = |objective| SloOutcome::ALL.map(|outcome| class.tally.promises(objective, outcome));
        assert_eq!(counted(Objective::FirstToken), [2, 1, 0]);
        assert_eq!(counted(Objective::PerToken), [0, 0, 0], "nothing was promised");
        assert_eq!(class.tally.mean(Objective::PerToken), Some(Duration::from_millis(467)));
    }
}
