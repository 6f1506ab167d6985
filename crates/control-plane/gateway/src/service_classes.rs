//! Service classes: the class of each request, its SLO targets, and how often they were met.
//!
//! The class of an adapter takes precedence over the class of its tenant; a request with neither is of the
//! class `default`. Callers cannot choose a class, since tenants come from keys and the operator names
//! adapters. The lines of batches are of the class `background`, for any adapter and tenant.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use scheduling::routing::Slo;
use settings::{BACKGROUND_CLASS, DEFAULT_CLASS, ServiceClass};

/// Index of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(usize);

/// Latency that an SLO target bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    FirstToken,
    /// Mean time per output token after the first.
    PerToken,
}

impl Objective {
    pub(crate) const ALL: [Self; 2] = [Self::FirstToken, Self::PerToken];

    /// Name in settings and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstToken => "ttft",
            Self::PerToken => "tpot",
        }
    }
}

/// Outcome of an SLO target for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SloOutcome {
    Met,
    Missed,
    /// The request was refused early, because the forecast exceeded the target.
    Refused,
}

impl SloOutcome {
    pub(crate) const ALL: [Self; 3] = [Self::Met, Self::Missed, Self::Refused];

    /// Name of the outcome in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::Refused => "refused",
        }
    }
}

#[derive(Debug, Default)]
pub struct SloCounters {
    /// Outcome counts, by objective, then by outcome.
    promises: [[AtomicU64; 3]; 2],
    requests: AtomicU64,
    /// Requests above the class's limit per minute.
    throttled: AtomicU64,
    tokens: AtomicU64,
    /// Sum in microseconds and number of measurements, by objective.
    times: [(AtomicU64, AtomicU64); 2],
}

impl SloCounters {
    /// Counts an admitted request.
    pub fn request(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    /// Counts a request above the class's limit per minute.
    pub(crate) fn throttle(&self) {
        self.throttled.fetch_add(1, Relaxed);
    }

    /// Counts served tokens of a prompt or an answer.
    pub fn serve(&self, tokens: u64) {
        self.tokens.fetch_add(tokens, Relaxed);
    }

    pub fn promise(&self, objective: Objective, outcome: SloOutcome) {
        self.promises[objective as usize][outcome as usize].fetch_add(1, Relaxed);
    }

    /// Returns the numbers of admitted requests, throttled requests and served tokens.
    #[must_use]
    pub fn counts(&self) -> [u64; 3] {
        [&self.requests, &self.throttled, &self.tokens].map(|count| count.load(Relaxed))
    }

    #[must_use]
    pub(crate) fn promises(&self, objective: Objective, outcome: SloOutcome) -> u64 {
        self.promises[objective as usize][outcome as usize].load(Relaxed)
    }

    /// Returns the mean of all measurements, with or without a target.
    #[must_use]
    pub fn mean(&self, objective: Objective) -> Option<Duration> {
        let (sum_us, count) = &self.times[objective as usize];
        let mean_us = sum_us.load(Relaxed).checked_div(count.load(Relaxed))?;
        Some(Duration::from_micros(mean_us))
    }
}

#[derive(Debug)]
pub struct ClassState {
    pub settings: ServiceClass,
    pub slo: Slo,
    pub tally: SloCounters,
}

impl ClassState {
    fn new(settings: ServiceClass) -> Self {
        let us = |ms: Option<std::num::NonZeroU32>| ms.map(|ms| u64::from(ms.get()) * 1000);
        let slo = Slo { ttft_us: us(settings.ttft_ms), tpot_us: us(settings.tpot_ms) };
        Self { settings, slo, tally: SloCounters::default() }
    }

    /// Counts a request that failed before its first token: its first-token target is missed.
    pub fn failed(&self) {
        if self.slo.ttft_us.is_some() {
            self.tally.promise(Objective::FirstToken, SloOutcome::Missed);
        }
    }

    /// Records a measured latency, and whether it met the class's target.
    pub(crate) fn saw(&self, objective: Objective, time: Duration) {
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

/// All service classes; the first is the default, the second is for background requests.
#[derive(Debug)]
pub struct ServiceClasses {
    classes: Vec<ClassState>,
    of_tenant: HashMap<String, ClassId>,
    of_adapter: HashMap<String, ClassId>,
}

impl ServiceClasses {
    /// Creates the classes of validated `settings`, and adds the default class and the class for background
    /// requests if they are not among them.
    #[must_use]
    pub fn new(settings: Vec<ServiceClass>) -> Self {
        let (named, others): (Vec<_>, Vec<_>) =
            settings.into_iter().partition(|class| [DEFAULT_CLASS, BACKGROUND_CLASS].contains(&&*class.name));
        let first = [DEFAULT_CLASS, BACKGROUND_CLASS].map(|name| {
            let set = named.iter().find(|class| class.name == name).cloned();
            set.unwrap_or_else(|| ServiceClass { name: name.to_owned(), ..ServiceClass::default() })
        });
        let classes: Vec<ClassState> = first.into_iter().chain(others).map(ClassState::new).collect();
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

    /// Returns the class of a request.
    #[must_use]
    pub fn of(&self, adapter: Option<&str>, tenant: &str) -> ClassId {
        let of_adapter = adapter.and_then(|adapter| self.of_adapter.get(adapter));
        of_adapter.or_else(|| self.of_tenant.get(tenant)).copied().unwrap_or(ClassId(0))
    }

    /// Returns the class of background requests.
    #[must_use]
    pub(crate) fn background(&self) -> ClassId {
        ClassId(1)
    }

    /// Whether the adapter of a request may determine its class.
    #[must_use]
    pub(crate) fn look_at_adapters(&self) -> bool {
        !self.of_adapter.is_empty()
    }

    #[must_use]
    pub fn get(&self, id: ClassId) -> &ClassState {
        &self.classes[id.0]
    }

    /// Iterates over all classes with their ids.
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
