//! How long a call waits for company, and who goes first.

use std::time::{Duration, Instant};

use shmproto::layer::Class;

use super::settings::Batching;

/// How long a call of so many rows waits at one of `sites` sites (Symbiosis §3.6, CHECKLIST S-06): in proportion to its
/// rows, since who brings more gains more from company and loses less by waiting. A drafted tree has many rows and is as
/// urgent as one.
#[must_use]
pub fn wait(batching: &Batching, class: Class, rows: usize, sites: usize) -> Duration {
    let counted = match class {
        Class::Verify => rows.min(1),
        Class::Decode | Class::Prefill | Class::Training | Class::Noise => rows,
    };
    let factor = batching.class_factors[class as usize] * batching.wait_factor;
    let wanted = batching.row_wait.as_secs_f64() * counted as f64 * factor;
    // Factors are finite and not negative, and so is what is left under the bound.
    Duration::from_secs_f64(wanted.min(batching.most_wait.as_secs_f64()) / sites.max(1) as f64)
}

/// Whose turn it is: the least goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    class: u64,
    arrived: Instant,
}

impl Turn {
    /// The turn of a call of `class`: it rises by a class for every `aging` it has waited, so that in the end it is before
    /// everybody who came later.
    #[must_use]
    pub fn of(class: Class, arrived: Instant, now: Instant, aging: Duration) -> Self {
        let waited = now.saturating_duration_since(arrived).as_nanos();
        let risen = waited.checked_div(aging.as_nanos()).unwrap_or(u128::MAX);
        let class = (class as u64).saturating_sub(u64::try_from(risen).unwrap_or(u64::MAX));
        Self { class, arrived }
    }
}

/// Whether somebody waits for the next token.
#[must_use]
pub fn is_urgent(class: Class) -> bool {
    matches!(class, Class::Decode | Class::Verify)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_grows_with_the_rows_up_to_the_bound_and_is_shared_by_the_sites() {
        let batching = Batching::default();
        let micros = |class, rows, sites| wait(&batching, class, rows, sites).as_micros();
        assert_eq!(micros(Class::Decode, 1, 1), 195);
        assert_eq!(micros(Class::Prefill, 100, 1), 19_500);
        assert_eq!(micros(Class::Prefill, 10_000, 1), 50_000);
        assert_eq!(micros(Class::Prefill, 10_000, 100), 500);
        assert_eq!(micros(Class::Training, 10, 1), 3_900);
        assert_eq!(micros(Class::Noise, 10, 1), 7_800);
    }

    #[test]
    fn a_tree_waits_no_longer_than_a_token() {
        let batching = Batching::default();
        assert_eq!(wait(&batching, Class::Verify, 60, 4), wait(&batching, Class::Decode, 1, 4));
    }

    #[test]
    fn an_old_call_of_any_class_goes_before_a_new_one() {
        let aging = Duration::from_millis(10);
        let (old, later) = (Instant::now(), Instant::now() + Duration::from_millis(100));
        assert!(Turn::of(Class::Decode, later, later, aging) < Turn::of(Class::Noise, later, later, aging));
        assert!(Turn::of(Class::Noise, old, later, aging) < Turn::of(Class::Decode, later, later, aging));
    }
}
