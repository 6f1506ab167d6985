//! Counters of the picker, in the text format of Prometheus.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::fleet::HostFleet;

/// Upper bounds of the decision time histogram, in microseconds.
const BOUNDS_US: [u64; 10] = [5, 10, 20, 50, 100, 200, 500, 1_000, 10_000, 100_000];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PickOutcome {
    Picked,
    /// No host was ready.
    Nobody,
    /// No host would have met the SLO targets.
    Late,
}

impl PickOutcome {
    const ALL: [Self; 3] = [Self::Picked, Self::Nobody, Self::Late];

    fn name(self) -> &'static str {
        match self {
            Self::Picked => "picked",
            Self::Nobody => "no_host_ready",
            Self::Late => "slo_unattainable",
        }
    }
}

#[derive(Debug, Default)]
pub struct PickerMetrics {
    outcomes: [AtomicU64; 3],
    /// Number of decisions per histogram bucket; the last bucket has no bound.
    times: [AtomicU64; BOUNDS_US.len() + 1],
    took_ns: AtomicU64,
    /// Responses of the first endpoint, and of another.
    served: [AtomicU64; 2],
    /// Requests by their first endpoint.
    picks: Mutex<BTreeMap<String, u64>>,
}

impl PickerMetrics {
    pub(crate) fn decided(&self, outcome: PickOutcome, endpoint: Option<&String>, took: Duration) {
        self.outcomes[outcome as usize].fetch_add(1, Relaxed);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let place = BOUNDS_US.iter().position(|bound| us <= *bound).unwrap_or(BOUNDS_US.len());
        self.times[place].fetch_add(1, Relaxed);
        self.took_ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        let Some(endpoint) = endpoint else { return };
        let mut picks = self.picks.lock().unwrap_or_else(PoisonError::into_inner);
        match picks.get_mut(endpoint) {
            Some(count) => *count += 1,
            None => _ = picks.insert(endpoint.clone(), 1),
        }
    }

    /// Counts a response of the first endpoint, or of another.
    pub(crate) fn served(&self, by_first: bool) {
        self.served[usize::from(!by_first)].fetch_add(1, Relaxed);
    }

    /// Returns all metrics in the text format of Prometheus.
    #[must_use]
    pub(crate) fn render(&self, fleet: &HostFleet) -> String {
        let (mut out, now) = (String::new(), Instant::now());
        let ages = fleet.ages(now);
        // The series of removed endpoints are dropped.
        let mut picks = self.picks.lock().unwrap_or_else(PoisonError::into_inner);
        picks.retain(|endpoint, _| ages.iter().any(|(address, _)| address.to_string() == *endpoint));
        let picks = picks.clone();
        head(&mut out, "decisions_total", "counter", "Requests for which a host was chosen, by outcome");
        for outcome in PickOutcome::ALL {
            let count = self.outcomes[outcome as usize].load(Relaxed);
            let _ =
                writeln!(out, "holobiont_picker_decisions_total{{outcome=\"{}\"}} {count}", outcome.name());
        }
        self.write_times(&mut out);
        head(&mut out, "picks_total", "counter", "Requests by chosen endpoint");
        for (endpoint, count) in picks {
            let _ = writeln!(out, "holobiont_picker_picks_total{{endpoint=\"{endpoint}\"}} {count}");
        }
        head(
            &mut out,
            "served_total",
            "counter",
            "Answers by whether the chosen endpoint or another one served them",
        );
        for (by, count) in ["picked", "other"].iter().zip(&self.served) {
            let _ = writeln!(out, "holobiont_picker_served_total{{by=\"{by}\"}} {}", count.load(Relaxed));
        }
        let count = fleet.count(now);
        head(&mut out, "endpoints", "gauge", "Hosts by whether they accept requests");
        for (state, count) in [("ready", count.ready), ("other", count.known - count.ready)] {
            let _ = writeln!(out, "holobiont_picker_endpoints{{state=\"{state}\"}} {count}");
        }
        head(
            &mut out,
            "snapshot_age_seconds",
            "gauge",
            "Age of a host's last report; absent if the host does not answer",
        );
        for (endpoint, age) in ages.iter().filter_map(|(endpoint, age)| Some((endpoint, (*age)?))) {
            let age = age.as_secs_f64();
            let _ = writeln!(out, "holobiont_picker_snapshot_age_seconds{{endpoint=\"{endpoint}\"}} {age}");
        }
        out
    }

    fn write_times(&self, out: &mut String) {
        const NAME: &str = "holobiont_picker_decision_seconds";
        head(
            out,
            "decision_seconds",
            "histogram",
            "Time of a decision, from the request body to the endpoint",
        );
        let mut sum = 0;
        for (bound_us, count) in BOUNDS_US.iter().zip(&self.times) {
            sum += count.load(Relaxed);
            let _ = writeln!(out, "{NAME}_bucket{{le=\"{}\"}} {sum}", *bound_us as f64 / 1e6);
        }
        sum += self.times[BOUNDS_US.len()].load(Relaxed);
        let _ = writeln!(out, "{NAME}_bucket{{le=\"+Inf\"}} {sum}");
        let _ = writeln!(out, "{NAME}_sum {}", self.took_ns.load(Relaxed) as f64 / 1e9);
        let _ = writeln!(out, "{NAME}_count {sum}");
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP holobiont_picker_{name} {help}\n# TYPE holobiont_picker_{name} {kind}");
}
