//! Gradients of log-probabilities at the logits they are of.

use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// One row's log-probability of a token, and what the loss changes with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogProbability {
    /// The token.
    pub token: u32,
    /// Logarithm of the sum of the exponentials of the row's logits.
    pub log_sum: f32,
    /// The gradient at the log-probability.
    pub gradient: f32,
}

/// Replaces each row of `logits` by the gradient at it, `gradient * (1 of the token - probability)`; zero where the
/// gradient is.
///
/// # Panics
///
/// If rows and `of` do not fit together, or there is no such token.
pub fn log_probability_gradients(
    pool: &mut ThreadPool,
    isa: Isa,
    logits: &mut [f32],
    vocabulary: usize,
    of: &[LogProbability],
) {
    assert_eq!(logits.len(), of.len() * vocabulary, "a token for each row");
    assert!(of.iter().all(|row| (row.token as usize) < vocabulary), "tokens of the vocabulary");
    let rows = OutPtr(logits.as_mut_ptr());
    pool.run(of.len(), |row| {
        let rows = &rows;
        // SAFETY: the row exists and is this thread's alone.
        let logits = unsafe { std::slice::from_raw_parts_mut(rows.0.add(row * vocabulary), vocabulary) };
        if of[row].gradient == 0.0 {
            logits.fill(0.0);
        } else {
            isa.dispatch(LogitRow { logits, of: of[row] });
        }
    });
}

struct OutPtr(*mut f32);
// SAFETY: threads are given rows of their own of a buffer that outlives the parallel region.
unsafe impl Sync for OutPtr {}

struct LogitRow<'a> {
    logits: &'a mut [f32],
    of: LogProbability,
}

impl Kernel for LogitRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { logits, of: LogProbability { token, log_sum, gradient } } = self;
        let own = f64::from(gradient) * -f64::exp_m1(f64::from(logits[token as usize] - log_sum));
        let (log_sum, factor) = (S::splat(log_sum), S::splat(-gradient));
        for c in (0..logits.len()).step_by(LANES) {
            let n = LANES.min(logits.len() - c);
            // SAFETY: as many lanes exist.
            unsafe {
                let at = logits.as_mut_ptr().add(c);
                S::store_head(at, S::mul(factor, S::exp(S::sub(S::load_head(at, n), log_sum))), n);
            }
        }
        // Near 1, the difference of two numbers loses what the exponential does not.
        logits[token as usize] = own as f32;
    }
}
