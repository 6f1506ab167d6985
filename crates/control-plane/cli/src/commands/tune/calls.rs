//! Calls of other programs: repeated while a failure may pass, and several at once.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

/// Repeats of a call that fails.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retries {
    /// Maximum number of calls.
    pub(super) attempts: usize,
    /// Time between two calls.
    pub(super) pause: Duration,
}

impl Retries {
    /// Repeats `call` while it fails with an error that `may_pass`, and returns the last result.
    pub(super) fn call<T, E>(
        self,
        may_pass: impl Fn(&E) -> bool,
        call: impl Fn() -> Result<T, E>,
    ) -> Result<T, E> {
        for _ in 1..self.attempts {
            match call() {
                Err(error) if may_pass(&error) => thread::sleep(self.pause),
                other => return other,
            }
        }
        call()
    }
}

/// Calls `call` for each item, at most `callers` at once, and returns the results in the order of the items.
///
/// # Errors
/// Fails with an error of a call; its thread makes no more calls, and the others go on with the rest.
pub(super) fn concurrently<I: Sync, T: Send, E: Send>(
    items: &[I],
    callers: usize,
    call: impl Fn(&I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut own = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(number) else { return Ok(own) };
            own.push((number, call(item)?));
        }
    };
    let results: Vec<Result<Vec<(usize, T)>, E>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..callers.min(items.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no caller panics")).collect()
    });
    let mut all =
        results.into_iter().collect::<Result<Vec<_>, E>>()?.into_iter().flatten().collect::<Vec<_>>();
    all.sort_unstable_by_key(|(number, _)| *number);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_call_is_repeated_while_its_failure_may_pass() {
        let retries = Retries { attempts: 3, pause: Duration::ZERO };
        let calls = |passing: bool, successes_from: usize| {
            let count = Cell::new(0);
            let call = || {
                count.set(count.get() + 1);
                if count.get() >= successes_from { Ok(count.get()) } else { Err("busy") }
            };
            (retries.call(|_| passing, call), count.get())
        };
        assert_eq!(calls(true, 2), (Ok(2), 2));
        assert_eq!(calls(true, 9), (Err("busy"), 3));
        assert_eq!(calls(false, 2), (Err("busy"), 1));
    }

    #[test]
    fn results_are_in_the_order_of_the_items_and_an_error_is_returned() {
        let items: Vec<usize> = (0..50).collect();
        let doubled = concurrently(&items, 4, |item| Ok::<_, ()>(2 * item));
        assert_eq!(doubled, Ok(items.iter().map(|item| 2 * item).collect()));
        assert_eq!(concurrently(&items, 4, |item| if *item == 7 { Err(*item) } else { Ok(()) }), Err(7));
        assert_eq!(concurrently(&[], 4, |item: &usize| Ok::<_, ()>(*item)), Ok(Vec::new()));
    }
}
