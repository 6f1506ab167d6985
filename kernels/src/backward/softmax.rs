//! Gradients of log-probabilities with respect to their logits.

use crate::{
    isa::Isa,
    pool::ThreadPool,
    simd::{Kernel, LANES, Simd},
};

/// A token's log-probability in one row, and the loss gradient at it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogProbability {
    /// Token id, below the vocabulary size.
    pub token: u32,
    /// Logarithm of the sum of the exponentials of the row's logits.
    pub log_sum: f32,
    /// The gradient at the log-probability.
    pub gradient: f32,
}

/// Replaces each row of `logits` by its gradient, `gradient * ([c == token] - probability)`. Gradient 0 gives
/// a zero row.
///
/// # Panics
/// Panics if `of` and the rows of `logits` differ in number, or a token is outside the vocabulary.
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
        // SAFETY: the row exists, and no other thread has it.
        let logits = unsafe { std::slice::from_raw_parts_mut(rows.0.add(row * vocabulary), vocabulary) };
        if of[row].gradient == 0.0 {
            logits.fill(0.0);
        } else {
            isa.dispatch(LogitRow { logits, of: of[row] });
        }
    });
}

struct OutPtr(*mut f32);
// SAFETY: each thread gets its own rows; the buffer outlives the parallel region.
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
            // SAFETY: `n` lanes exist.
            unsafe {
                let at = logits.as_mut_ptr().add(c);
                S::store_head(at, S::mul(factor, S::exp(S::sub(S::load_head(at, n), log_sum))), n);
            }
        }
        // Near probability 1, `1 - p` cancels digits; `exp_m1` does not.
        logits[token as usize] = own as f32;
    }
}
