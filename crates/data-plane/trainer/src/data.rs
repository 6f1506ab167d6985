//! Training data as people have it: JSON, one example a line.
//!
//! Several kinds of lines are known ([`DataKind`]). The first line says which kind a file has, and every line must be of it. All
//! lines are read and turned into tokens before anything runs, so that a fault in the last one costs no training; faults are
//! collected, each with its line and with what to do.
//!
//! An answer is learned as the model would have to give it: the tokens before it are those a request would send, byte for
//! byte and token for token, and it ends with the token at which serving stops. Where a template shows earlier turns
//! otherwise than it showed them when they were the last (Qwen3 takes their thoughts out), no one row of tokens is right for
//! all turns, and the conversation becomes several examples.
//!
//! # Layout
//! - `lines`: the lines of a file, and its hash, in one reading
//! - `kind`, `fields`: what a line is, field by field
//! - `sample`: what it means, whatever its form was; `distillation_data`: what a model said
//! - `encode`: the same in tokens
//! - `prompts`: what is asked, without the answers
//! - `fault`: what can be wrong with it

mod distillation_data;
mod encode;
mod fault;
mod fields;
mod kind;
mod lines;
mod prompts;
mod sample;

use std::{fs::File, io, ops::Range, path::Path};

use model_files::strict_json;
use serde_json::{Map, Value};

pub use distillation_data::DistillationSample;
pub use encode::Encoder;
pub use fault::{DataError, LineFault, MAX_FAULTS_SHOWN, Problem};
pub use kind::DataKind;
pub use prompts::{DataPrompt, FilePrompts, prompts};

use encode::Encoded;
use fields::LineFields;
use lines::DataLines;

/// Bounds on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataLimits {
    /// Bytes of a line.
    pub line_bytes: usize,
    /// Lines of a file.
    pub lines: usize,
    /// Tokens of an example.
    pub max_tokens: usize,
    /// Tokens of all examples together. Each takes eight bytes.
    pub total_tokens: usize,
}

impl Default for DataLimits {
    fn default() -> Self {
        Self { line_bytes: 1 << 20, lines: 1 << 20, max_tokens: 4096, total_tokens: 1 << 28 }
    }
}

/// A row of tokens to learn from.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// The line it is from, counted from 1.
    pub line: usize,
    /// At least two.
    pub tokens: Vec<u32>,
    /// How much the prediction of each token but the first counts: `weights[i]` is that of `tokens[i + 1]`.
    pub weights: Vec<f32>,
}

/// Two answers to one prompt. The weights are 1 where the answers are.
#[derive(Debug, Clone, PartialEq)]
pub struct PreferencePair {
    /// The better one.
    pub chosen: Example,
    /// The worse one.
    pub rejected: Example,
}

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub enum DataItems {
    /// Rows to learn from, in the order of their lines.
    Examples(Vec<Example>),
    /// Answers to compare, in the order of their lines.
    Pairs(Vec<PreferencePair>),
    /// What a model said, in the order of its lines.
    Said(Vec<DistillationSample>),
}

impl DataItems {
    /// Examples, or pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Examples(examples) => examples.len(),
            Self::Pairs(pairs) => pairs.len(),
            Self::Said(said) => said.len(),
        }
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of all of them.
    #[must_use]
    pub fn tokens(&self) -> usize {
        let of = |example: &Example| example.tokens.len();
        match self {
            Self::Examples(examples) => examples.iter().map(of).sum(),
            Self::Pairs(pairs) => pairs.iter().map(|pair| of(&pair.chosen) + of(&pair.rejected)).sum(),
            Self::Said(said) => said.iter().map(|said| of(&said.example)).sum(),
        }
    }

    /// Of each line that there is, in order, the numbers of what it became.
    #[must_use]
    pub fn of_lines(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let mut of_line = |count: usize| {
            end += count;
            end - count..end
        };
        match self {
            Self::Examples(all) => {
                all.chunk_by(|a, b| a.line == b.line).map(|line| of_line(line.len())).collect()
            }
            Self::Said(all) => {
                let is_one =
                    |a: &DistillationSample, b: &DistillationSample| a.example.line == b.example.line;
                all.chunk_by(is_one).map(|line| of_line(line.len())).collect()
            }
            Self::Pairs(all) => all.iter().map(|_| of_line(1)).collect(),
        }
    }

    /// The line of each of those with these numbers.
    ///
    /// # Panics
    /// If there is no such number.
    #[must_use]
    pub fn lines(&self, numbers: &[usize]) -> Vec<u64> {
        let line = |&number: &usize| match self {
            Self::Examples(all) => all[number].line as u64,
            Self::Pairs(all) => all[number].chosen.line as u64,
            Self::Said(all) => all[number].example.line as u64,
        };
        numbers.iter().map(line).collect()
    }

    /// Those with these numbers.
    ///
    /// # Panics
    /// If there is no such number.
    #[must_use]
    pub fn pick(&self, numbers: &[usize]) -> Self {
        fn of<T: Clone>(all: &[T], numbers: &[usize]) -> Vec<T> {
            numbers.iter().map(|&number| all[number].clone()).collect()
        }
        match self {
            Self::Examples(all) => Self::Examples(of(all, numbers)),
            Self::Pairs(all) => Self::Pairs(of(all, numbers)),
            Self::Said(all) => Self::Said(of(all, numbers)),
        }
    }
}

/// A file of training data.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// What its lines are.
    pub kind: DataKind,
    /// What they hold.
    pub items: DataItems,
    /// The hash of the file's bytes.
    pub hash: blake3::Hash,
}

/// Reads the file at `path`.
///
/// # Errors
/// If it cannot be read or holds too much, and if anything is wrong with any line: then all of that.
pub fn read_file(path: &Path, encoder: &Encoder<'_>, limits: &DataLimits) -> Result<Dataset, DataError> {
    let open = |source| DataError::Read { path: path.to_owned(), source };
    read(File::open(path).map_err(open)?, encoder, limits).map_err(|error| match error {
        DataError::Stream(source) => open(source),
        other => other,
    })
}

/// Reads what `file` gives.
///
/// # Errors
/// As [`read_file`].
pub fn read(file: impl io::Read, encoder: &Encoder<'_>, limits: &DataLimits) -> Result<Dataset, DataError> {
    let mut encoded = Vec::new();
    let (kind, hash) = each_line(file, limits, |number, kind, map| {
        let sample = sample::read(kind, &mut LineFields::of(map))?;
        let item = encoder.encode(number, &sample, limits.max_tokens)?;
        let tokens = item.tokens();
        encoded.push(item);
        Ok(tokens)
    })?;
    Ok(Dataset { kind, items: items(encoded), hash })
}

/// Takes what `file` gives line by line: `take` is given each one's number, kind and fields, and says how many tokens it has.
/// Gives the lines' kind and the file's hash.
fn each_line(
    file: impl io::Read,
    limits: &DataLimits,
    mut take: impl FnMut(usize, DataKind, Map<String, Value>) -> Result<usize, LineFault>,
) -> Result<(DataKind, blake3::Hash), DataError> {
    let mut lines = DataLines::new(file, limits.line_bytes);
    let (mut kind, mut tokens) = (None, 0);
    let (mut problems, mut count) = (Vec::new(), 0);
    while let Some((number, line)) = lines.next_line().map_err(DataError::Stream)? {
        if number > limits.lines {
            return Err(DataError::TooManyLines { limit: limits.lines });
        }
        let taken = line.and_then(|line| fields(&mut kind, line));
        match taken.and_then(|(kind, map)| take(number, kind, map)) {
            Ok(more) => tokens += more,
            Err(fault) => {
                count += 1;
                if problems.len() < MAX_FAULTS_SHOWN {
                    problems.push(Problem { line: number, fault });
                }
            }
        }
        if tokens > limits.total_tokens {
            return Err(DataError::TooManyTokens { line: number, limit: limits.total_tokens });
        }
    }
    if count > 0 {
        return Err(DataError::Problems { problems, count });
    }
    Ok((kind.ok_or(DataError::Empty)?, lines.hash()))
}

/// The fields of a line, which must be of the kind of those before it.
fn fields(kind: &mut Option<DataKind>, line: &str) -> Result<(DataKind, Map<String, Value>), LineFault> {
    let value = strict_json::parse(line.as_bytes()).map_err(|error| LineFault::Json(error.to_string()))?;
    let Value::Object(map) = value else { return Err(LineFault::NoObject) };
    let found = DataKind::of(&map).ok_or_else(|| LineFault::unknown_kind(&map))?;
    let kind = *kind.get_or_insert(found);
    if kind.fits(&map) { Ok((kind, map)) } else { Err(LineFault::OtherKind { expected: kind, found }) }
}

/// The lines' items in one row; all are of one kind.
fn items(encoded: Vec<Encoded>) -> DataItems {
    let (mut examples, mut pairs, mut said) = (Vec::new(), Vec::new(), Vec::new());
    for one in encoded {
        match one {
            Encoded::Examples(more) => examples.extend(more),
            Encoded::Pair(pair) => pairs.push(pair),
            Encoded::Said(more) => said.extend(more),
        }
    }
    match (pairs.is_empty(), said.is_empty()) {
        (true, true) => DataItems::Examples(examples),
        (false, _) => DataItems::Pairs(pairs),
        (true, false) => DataItems::Said(said),
    }
}
