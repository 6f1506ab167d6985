//! Open-loop load: each request starts at its time, independent of the requests before it.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Maximum number of open requests: each has a thread.
const MAX_ARRIVALS: usize = 20_000;

/// Sends each of `items` when it is due and returns the answers in the order of `items`.
///
/// # Errors
/// The first failed request.
pub(crate) fn at_their_times<T: Sync, R: Send>(
    items: &[T],
    due: impl Fn(&T) -> Duration,
    ask: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (begin, ask) = (Instant::now(), &ask);
    thread::scope(|scope| {
        let clients: Vec<_> = items
            .iter()
            .map(|item| {
                thread::sleep((begin + due(item)).saturating_duration_since(Instant::now()));
                thread::Builder::new().spawn_scoped(scope, move || ask(item))
            })
            .collect();
        let answers = clients.into_iter().map(|client| {
            let client = client.context("no thread for a request")?;
            client.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked")))
        });
        answers.collect()
    })
}

/// Times of a Poisson process with `per_s` arrivals per second, for `length`.
pub(crate) fn poisson(per_s: f64, length: Duration, seed: u64) -> Vec<Duration> {
    let (mut random, mut at) = (StdRng::seed_from_u64(seed), 0.0);
    let mut times = Vec::new();
    while times.len() < MAX_ARRIVALS {
        at += -(1.0 - random.random::<f64>()).ln() / per_s;
        if at >= length.as_secs_f64() {
            break;
        }
        times.push(Duration::from_secs_f64(at));
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_come_at_their_rate_and_are_answered_in_their_order() {
        let times = poisson(1000.0, Duration::from_millis(200), 1);
        assert!((150..250).contains(&times.len()) && times.is_sorted(), "{}", times.len());
        let begin = Instant::now();
        let answers = at_their_times(&times, |at| *at, |at| Ok((*at, begin.elapsed()))).unwrap();
        assert!(answers.iter().zip(&times).all(|((asked, now), at)| asked == at && now >= at));
    }
}
