//! Chooses the next token of each row on the device; the kernel is in `sample.cu`.

use std::sync::Arc;

use super::{
    Cuda, CudaError, CudaStream, DeviceVec, Matrix, Pinned,
    launch::{Arg, LaunchShape, count, launch},
};
use crate::lora::ElementKind;

/// Threads per block: `THREADS` of `sample.cu`.
const THREADS: u32 = 1024;
/// Maximum vocabulary: `SPAN * THREADS` of `sample.cu`.
const MAX_TOKENS: usize = 1 << 20;
/// Words of `TokenChoice` in `sample.cu`.
const CHOICE_WORDS: usize = 8;
/// Marks a row without a token: `NO_TOKEN` of `sample.cu`.
const NO_TOKEN: u32 = u32::MAX;

/// Sampling parameters of one row. `model::sampling` documents the fields and chooses the same tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenChoice {
    /// Divisor of the logits; 0 selects the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Keeps the most likely tokens until their probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Position of the token in the cumulative distribution, in `0.0..1.0`.
    pub draw: f64,
    /// Values to report about the token.
    pub report: ChoiceReport,
}

/// Values to report about a chosen token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChoiceReport {
    /// Only the token id.
    Token,
    /// Also the log-probability under the unfiltered distribution, which costs one more pass over the row.
    LogProbability,
}

/// A token chosen for a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChosenToken {
    /// Id of the chosen token.
    pub token: u32,
    /// Natural logarithm of the probability at temperature 1 without filters, at least -9999; -9999 if not
    /// requested.
    pub log_probability: f32,
}

impl TokenChoice {
    fn words(self) -> [u32; CHOICE_WORDS] {
        let draw = self.draw.to_bits();
        [
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            draw as u32,
            (draw >> 32) as u32,
            u32::from(self.report == ChoiceReport::LogProbability),
            0,
        ]
    }
}

/// Sampling parameters of a batch and the chosen tokens. The memory is kept for reuse.
#[derive(Debug)]
pub struct ChosenTokens {
    choices: DeviceVec<u32>,
    /// Token ids for the next pass, which the host need not see.
    tokens: DeviceVec<u32>,
    /// Results for the host: token id and log-probability bits of each row.
    results: Pinned<u32>,
    rows: usize,
}

impl ChosenTokens {
    /// Allocates memory for `rows` rows.
    ///
    /// # Errors
    /// Fails if the device or locked host memory is exhausted.
    pub fn new(cuda: &Arc<Cuda>, rows: usize) -> Result<Self, CudaError> {
        Ok(Self {
            choices: DeviceVec::new(cuda, rows * CHOICE_WORDS)?,
            tokens: DeviceVec::new(cuda, rows)?,
            results: Pinned::new(cuda, 2 * rows)?,
            rows: 0,
        })
    }

    /// Uploads the sampling parameters of the next rows, growing the memory if necessary.
    ///
    /// # Errors
    /// Fails if the device is lost or memory is exhausted.
    ///
    /// # Panics
    /// Panics if a parameter is out of its range.
    pub fn ask(&mut self, stream: &CudaStream, choices: &[TokenChoice]) -> Result<(), CudaError> {
        for choice in choices {
            assert!(choice.temperature.is_finite() && choice.temperature >= 0.0, "a temperature");
            assert!(choice.top_p > 0.0 && (0.0..=1.0).contains(&choice.min_p), "filters that keep something");
            assert!((0.0..1.0).contains(&choice.draw), "a draw in 0..1");
        }
        if choices.len() > self.tokens.len() {
            *self = Self::new(stream.cuda(), choices.len().max(2 * self.tokens.len()))?;
        }
        self.rows = choices.len();
        let words: Vec<u32> = choices.iter().flat_map(|choice| choice.words()).collect();
        stream.upload(&words, &mut self.choices, 0)
    }

    /// Returns the chosen token ids on the device for the next pass; `u32::MAX` for rows without a token.
    #[must_use]
    pub fn tokens(&self) -> &DeviceVec<u32> {
        &self.tokens
    }

    /// Waits for `stream` and returns the chosen tokens; `None` for a row without a finite logit.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn read(&self, stream: &CudaStream) -> Result<Vec<Option<ChosenToken>>, CudaError> {
        stream.synchronize()?;
        let mut words = vec![0; 2 * self.rows];
        self.results.read(0, &mut words);
        let of = |pair: &[u32]| {
            let (token, log_probability) = (pair[0], f32::from_bits(pair[1]));
            (token != NO_TOKEN).then_some(ChosenToken { token, log_probability })
        };
        Ok(words.chunks_exact(2).map(of).collect())
    }
}

/// Chooses a token for each row of `logits` by the parameters of [`ChosenTokens::ask`]. The call does not
/// allocate, so a CUDA graph may record it.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the number of rows differs from that of `ask`, or the vocabulary exceeds 2^20 tokens.
pub fn choose(stream: &CudaStream, logits: &Matrix, chosen: &mut ChosenTokens) -> Result<(), CudaError> {
    assert_eq!(logits.kind(), ElementKind::F32, "logits are of 32 bits");
    assert_eq!(logits.rows(), chosen.rows, "a choice for each row");
    assert!(chosen.rows == 0 || (1..=MAX_TOKENS).contains(&logits.width()), "1 to {MAX_TOKENS} tokens");
    let arguments = [
        Arg::Ptr(logits.address()),
        Arg::U32(count(logits.width())),
        Arg::Ptr(chosen.choices.address()),
        Arg::Ptr(chosen.tokens.address()),
        Arg::Ptr(chosen.results.address_of(0)),
    ];
    // SAFETY: 1. The kernel is declared with these arguments. 2. A block takes a row; `ask` has made room for as many
    // choices and results. 3. The output is borrowed exclusively; the host reads it after waiting.
    unsafe { launch(stream, "choose_tokens", LaunchShape::line(logits.rows(), THREADS), &arguments) }
}
