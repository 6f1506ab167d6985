//! Choosing the next token of each row, on the device. See `sample.cu`.

use std::sync::Arc;

use super::{
    Cuda, CudaError, CudaStream, DeviceVec, Matrix, Pinned,
    launch::{Arg, LaunchShape, count, launch},
};
use crate::lora::ElementKind;

/// Threads of a block: `THREADS` of `sample.cu`.
const THREADS: u32 = 1024;
/// The largest vocabulary: `SPAN * THREADS` of `sample.cu`.
const MAX_TOKENS: usize = 1 << 20;
/// Words of `TokenChoice` in `sample.cu`.
const CHOICE_WORDS: usize = 8;
/// What stands for no token: `NO_TOKEN` of `sample.cu`.
const NO_TOKEN: u32 = u32::MAX;

/// How one row's token is chosen. What each number means is said in `model::sampling`, which chooses the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenChoice {
    /// Logits are divided by it; 0 takes the most likely token.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens until their probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Where in the distribution the token is, in `0.0..1.0`.
    pub draw: f64,
    /// What is told of it.
    pub report: ChoiceReport,
}

/// What is told of a chosen token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChoiceReport {
    /// Which it is.
    Token,
    /// Also the logarithm of the probability that the model itself gives it: one more pass over the row.
    LogProbability,
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChosenToken {
    /// Which it is.
    pub token: u32,
    /// The natural logarithm of its probability at temperature 1, without filters, at least -9999; -9999 if it was not
    /// asked for.
    pub log_probability: f32,
}

impl TokenChoice {
    /// As `sample.cu` reads it.
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

/// What is to be chosen, and what was. Its memory is kept for reuse.
#[derive(Debug)]
pub struct ChosenTokens {
    choices: DeviceVec<u32>,
    /// For the next pass, which the host need not see.
    tokens: DeviceVec<u32>,
    /// For the host: a token and its log-probability's bits for each row.
    told: Pinned<u32>,
    rows: usize,
}

impl ChosenTokens {
    /// Room for the choices of `rows` rows.
    ///
    /// # Errors
    ///
    /// There is no room.
    pub fn new(cuda: &Arc<Cuda>, rows: usize) -> Result<Self, CudaError> {
        Ok(Self {
            choices: DeviceVec::new(cuda, rows * CHOICE_WORDS)?,
            tokens: DeviceVec::new(cuda, rows)?,
            told: Pinned::new(cuda, 2 * rows)?,
            rows: 0,
        })
    }

    /// Takes in how the tokens of the next rows are to be chosen. It grows if it must.
    ///
    /// # Errors
    ///
    /// The device is lost, or there is no room.
    ///
    /// # Panics
    ///
    /// If a number is out of its range.
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

    /// The chosen tokens, where the next pass finds them; `u32::MAX` where there is none.
    #[must_use]
    pub fn tokens(&self) -> &DeviceVec<u32> {
        &self.tokens
    }

    /// What was chosen, once `stream` has come so far: `None` for a row without any finite logit.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn read(&self, stream: &CudaStream) -> Result<Vec<Option<ChosenToken>>, CudaError> {
        stream.synchronize()?;
        let mut words = vec![0; 2 * self.rows];
        self.told.read(0, &mut words);
        let of = |pair: &[u32]| {
            let (token, log_probability) = (pair[0], f32::from_bits(pair[1]));
            (token != NO_TOKEN).then_some(ChosenToken { token, log_probability })
        };
        Ok(words.chunks_exact(2).map(of).collect())
    }
}

/// Chooses a token of each row of `logits`, as [`ChosenTokens::ask`] was told. It takes no memory, so it may be recorded.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If something else was asked than there are rows, or the vocabulary is beyond 2^20 tokens.
pub fn choose(stream: &CudaStream, logits: &Matrix, chosen: &mut ChosenTokens) -> Result<(), CudaError> {
    assert_eq!(logits.kind(), ElementKind::F32, "logits are of 32 bits");
    assert_eq!(logits.rows(), chosen.rows, "a choice for each row");
    assert!(chosen.rows == 0 || (1..=MAX_TOKENS).contains(&logits.width()), "1 to {MAX_TOKENS} tokens");
    let arguments = [
        Arg::Ptr(logits.address()),
        Arg::U32(count(logits.width())),
        Arg::Ptr(chosen.choices.address()),
        Arg::Ptr(chosen.tokens.address()),
        Arg::Ptr(chosen.told.address_of(0)),
    ];
    // SAFETY: 1. The kernel is declared with these arguments. 2. A block takes a row; `ask` has made room for as many
    // choices and results. 3. What it writes is borrowed exclusively; the host reads it after it has waited.
    unsafe { launch(stream, "choose_tokens", LaunchShape::line(logits.rows(), THREADS), &arguments) }
}
