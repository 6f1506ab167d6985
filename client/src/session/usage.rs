//! Counters of a session.

use std::time::Duration;

/// Steps of an octave: latencies are known to 3 %.
const STEPS: u32 = 32;

/// Octaves, counted in tenths of a microsecond.
const OCTAVES: u32 = 32;

/// Counters since the session began.
#[derive(Debug, Clone, Default)]
pub struct SessionUsage {
    /// Number of calls answered with rows.
    pub calls: u64,
    /// Number of rows in these calls.
    pub rows: u64,
    /// Bytes of rows sent, without headers.
    pub bytes_out: u64,
    /// Bytes of rows received, without headers.
    pub bytes_in: u64,
    /// Time that calls waited in the executor's queue, in microseconds.
    pub waited_us: u64,
    /// Time from sending calls to their answers, in microseconds.
    pub calls_us: u64,
    /// Number of repeated calls.
    pub repeats: u64,
    /// Number of connections after the first.
    pub reconnections: u64,
    /// Latencies of single calls.
    pub latencies: Latencies,
}

/// Histogram of latencies, with logarithmic buckets.
#[derive(Clone)]
pub struct Latencies {
    counts: [u32; (STEPS * OCTAVES) as usize],
    total: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: [0; (STEPS * OCTAVES) as usize], total: 0 }
    }
}

impl std::fmt::Debug for Latencies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Latencies").field("total", &self.total).finish_non_exhaustive()
    }
}

impl Latencies {
    /// Records the latency of one call.
    pub fn add(&mut self, latency: Duration) {
        // The unit is a tenth of a microsecond, because the fastest calls take a few microseconds.
        let tenths = u64::from(u32::try_from(latency.as_nanos() / 100).unwrap_or(u32::MAX).max(1));
        let octave = tenths.ilog2();
        let step = ((tenths - (1 << octave)) * u64::from(STEPS)) >> octave;
        let index = (u64::from(octave * STEPS) + step).min(self.counts.len() as u64 - 1);
        let count = &mut self.counts[usize::try_from(index).unwrap_or_default()];
        *count = count.saturating_add(1);
        self.total += 1;
    }

    /// Removes all recorded latencies.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the latency in microseconds that a `share` (0 to 1) of calls do not exceed; `None` if empty.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
        let wanted = self.total as f64 * share;
        let mut seen = 0.0;
        let index = self.counts.iter().position(|&count| {
            seen += f64::from(count);
            count > 0 && seen >= wanted
        })?;
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let within = f64::from(index % STEPS) + 0.5;
        Some(f64::from(index / STEPS).exp2() * (1.0 + within / f64::from(STEPS)) / 10.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_known_to_a_few_percent() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile_us(0.5), None);
        for microseconds in 1..=1000 {
            latencies.add(Duration::from_micros(microseconds));
        }
        for (share, expected) in [(0.5, 500.0), (0.99, 990.0), (0.01, 10.0)] {
            let found = latencies.quantile_us(share).expect("there are some");
            assert!((found / expected - 1.0).abs() < 0.04, "{share}: {found} against {expected}");
        }
        latencies.add(Duration::from_secs(1 << 40));
        assert!(latencies.quantile_us(1.0).expect("there are some") > 1e8, "the longest there is");
    }
}
