//! Whether a forecast keeps what was promised. Who would be served too late is told so at once, with the time after which it
//! is worth asking again, instead of taking a place from somebody who can be served in time.

use std::time::Duration;

use super::{Choice, Slo};

/// The shortest that somebody is told to wait.
const MIN_RETRY: Duration = Duration::from_millis(100);

/// And the longest.
const MAX_RETRY: Duration = Duration::from_secs(600);

/// Even the best executor would break a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WouldMiss {
    /// The first token would come too late.
    #[error("the first token would come after {forecast_us} us, promised are {promised_us}")]
    FirstToken {
        /// When it would come.
        forecast_us: u64,
        /// When it should.
        promised_us: u64,
        /// After so long those before it will be through.
        retry_after: Duration,
    },
    /// Tokens would follow each other too slowly.
    #[error("tokens would take {forecast_us} us each, promised are {promised_us}")]
    Pace {
        /// How long each would take.
        forecast_us: u64,
        /// How long it should.
        promised_us: u64,
        /// After so long fewer should run together.
        retry_after: Duration,
    },
}

impl WouldMiss {
    /// When to ask again.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        match *self {
            Self::FirstToken { retry_after, .. } | Self::Pace { retry_after, .. } => retry_after,
        }
    }
}

/// Lets a request in if its choice keeps what it was promised. Answers have `answer_tokens` in the mean.
///
/// # Errors
/// The forecast is longer than the promise. What is too long of a wait for the first token is how long it takes until
/// somebody would be in time; where the pace is too slow, it is what the answers under way take to be through by half.
pub fn admit(choice: &Choice, slo: &Slo, answer_tokens: f64) -> Result<(), WouldMiss> {
    let forecast = choice.forecast;
    let after = |us: f64| Duration::from_secs_f64((us * 1e-6).clamp(0.0, 1e6)).clamp(MIN_RETRY, MAX_RETRY);
    if let Some(promised_us) = slo.ttft_us
        && forecast.ttft_us > promised_us
    {
        let retry_after = after((forecast.ttft_us - promised_us) as f64);
        return Err(WouldMiss::FirstToken { forecast_us: forecast.ttft_us, promised_us, retry_after });
    }
    if let Some(promised_us) = slo.tpot_us
        && forecast.tpot_us > promised_us
    {
        let retry_after = after(forecast.tpot_us as f64 * answer_tokens / 2.0);
        return Err(WouldMiss::Pace { forecast_us: forecast.tpot_us, promised_us, retry_after });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::Forecast, *};

    const SLO: Slo = Slo { ttft_us: Some(1_000_000), tpot_us: Some(50_000) };

    fn verdict(ttft_us: u64, tpot_us: u64) -> Result<(), WouldMiss> {
        admit(&Choice { executor: 0, forecast: Forecast { ttft_us, tpot_us } }, &SLO, 60.0)
    }

    #[test]
    fn who_would_be_late_is_told_by_how_much_and_nobody_else_is_refused() {
        assert_eq!(verdict(1_000_000, 50_000), Ok(()));
        assert_eq!(verdict(3_500_000, 0).unwrap_err().retry_after(), Duration::from_millis(2500));
        assert_eq!(verdict(1_000_001, 0).unwrap_err().retry_after(), MIN_RETRY);
        assert_eq!(verdict(u64::MAX, 0).unwrap_err().retry_after(), MAX_RETRY);
        assert_eq!(verdict(0, 60_000).unwrap_err().retry_after(), Duration::from_millis(1800));
        let nothing = Slo::default();
        let choice = Choice { executor: 0, forecast: Forecast { ttft_us: u64::MAX, tpot_us: u64::MAX } };
        assert_eq!(admit(&choice, &nothing, 60.0), Ok(()));
    }
}
