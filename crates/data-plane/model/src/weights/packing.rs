//! Packs many matrices with several threads.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use kernels::Arena;

/// Progress of reading and packing weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Number of elements packed so far.
    pub done: u64,
    /// Number of elements of all linear layers and the embedding.
    pub total: u64,
}

/// Callback for progress, called from any of the threads.
pub(crate) type ProgressCallback<'a> = &'a (dyn Fn(LoadProgress) + Sync);

/// Bytes of an allocation for weights, so that small matrices share huge pages.
const ARENA_CHUNK_BYTES: usize = 32 << 20;

/// Packs `jobs` of `elements` each with `threads` threads; returns the results in order of the jobs.
///
/// # Errors
/// The error of the first failed job, in their order.
pub(crate) fn pack_all<J: Sync, T: Send, E: Send>(
    jobs: &[J],
    elements: impl Fn(&J) -> u64 + Sync,
    threads: usize,
    on_progress: ProgressCallback<'_>,
    pack: impl Fn(&Arena, &J) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let total = jobs.iter().map(&elements).fold(0, u64::saturating_add);
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let arena = Arena::new(ARENA_CHUNK_BYTES);
    let results: Mutex<Vec<Option<Result<T, E>>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { break };
                    let result = pack(&arena, job);
                    results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
                    let elements = elements(job);
                    let done = done.fetch_add(elements, Ordering::Relaxed) + elements;
                    on_progress(LoadProgress { done, total });
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().map(|result| result.expect("every job was taken")).collect()
}
