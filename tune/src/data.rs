//! Training data as people have it: JSON, one example a line.
//!
//! Six kinds of lines are known ([`Kind`]). The first line says which kind a file has, and every line must be of it. All
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
//! - `sample`: what it means, whatever its form was
//! - `encode`: the same in tokens
//! - `fault`: what can be wrong with it

mod encode;
mod fault;
mod fields;
mod kind;
mod lines;
mod sample;

use std::{fs::File, io, ops::Range, path::Path};

use files::strict_json;
use serde_json::Value;

pub use encode::Encoder;
pub use fault::{DataError, Fault, MAX_FAULTS_SHOWN, Problem};
pub use kind::Kind;

use encode::Encoded;
use fields::Fields;
use lines::Lines;

/// Bounds on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a line.
    pub line_bytes: usize,
    /// Lines of a file.
    pub lines: usize,
    /// Tokens of an example.
    pub max_tokens: usize,
    /// Tokens of all examples together. Each takes eight bytes.
    pub total_tokens: usize,
}

impl Default for Limits {
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
pub struct Pair {
    /// The better one.
    pub chosen: Example,
    /// The worse one.
    pub rejected: Example,
}

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Items {
    /// Rows to learn from, in the order of their lines.
    Examples(Vec<Example>),
    /// Answers to compare, in the order of their lines.
    Pairs(Vec<Pair>),
}

impl Items {
    /// Examples, or pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Examples(examples) => examples.len(),
            Self::Pairs(pairs) => pairs.len(),
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
        }
    }

    /// Of each line that there is, in order, the numbers of what it became.
    #[must_use]
    pub fn of_lines(&self) -> Vec<Range<usize>> {
        let Self::Examples(all) = self else {
            return (0..self.len()).map(|number| number..number + 1).collect();
        };
        let mut end = 0;
        let of_line = |line: &[Example]| {
            end += line.len();
            end - line.len()..end
        };
        all.chunk_by(|a, b| a.line == b.line).map(of_line).collect()
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
        };
        numbers.iter().map(line).collect()
    }

    /// Those with these numbers.
    ///
    /// # Panics
    /// If there is no such number.
    #[must_use]
    pub fn pick(&self, numbers: &[usize]) -> Self {
        match self {
            Self::Examples(all) => {
                Self::Examples(numbers.iter().map(|&number| all[number].clone()).collect())
            }
            Self::Pairs(all) => Self::Pairs(numbers.iter().map(|&number| all[number].clone()).collect()),
        }
    }
}

/// A file of training data.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// What its lines are.
    pub kind: Kind,
    /// What they hold.
    pub items: Items,
    /// The hash of the file's bytes.
    pub hash: blake3::Hash,
}

/// Reads the file at `path`.
///
/// # Errors
/// If it cannot be read or holds too much, and if anything is wrong with any line: then all of that.
pub fn read_file(path: &Path, encoder: &Encoder<'_>, limits: &Limits) -> Result<Dataset, DataError> {
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
pub fn read(file: impl io::Read, encoder: &Encoder<'_>, limits: &Limits) -> Result<Dataset, DataError> {
    let mut reading = Reading { encoder, limits, kind: None, items: Vec::new(), total_tokens: 0 };
    let mut lines = Lines::new(file, limits.line_bytes);
    let mut problems = Vec::new();
    let mut count = 0;
    while let Some((number, line)) = lines.next_line().map_err(DataError::Stream)? {
        if number > limits.lines {
            return Err(DataError::TooManyLines { limit: limits.lines });
        }
        match line.and_then(|line| reading.line(number, line)) {
            Ok(()) if reading.total_tokens > limits.total_tokens => {
                return Err(DataError::TooManyTokens { line: number, limit: limits.total_tokens });
            }
            Ok(()) => {}
            Err(fault) => {
                count += 1;
                if problems.len() < MAX_FAULTS_SHOWN {
                    problems.push(Problem { line: number, fault });
                }
            }
        }
    }
    if count > 0 {
        return Err(DataError::Problems { problems, count });
    }
    let kind = reading.kind.ok_or(DataError::Empty)?;
    Ok(Dataset { kind, items: items(reading.items), hash: lines.hash() })
}

/// A file that is being read.
struct Reading<'a> {
    encoder: &'a Encoder<'a>,
    limits: &'a Limits,
    /// Known from the first line that says it.
    kind: Option<Kind>,
    items: Vec<Encoded>,
    total_tokens: usize,
}

impl Reading<'_> {
    fn line(&mut self, number: usize, line: &str) -> Result<(), Fault> {
        let value = strict_json::parse(line.as_bytes()).map_err(|error| Fault::Json(error.to_string()))?;
        let Value::Object(map) = value else { return Err(Fault::NoObject) };
        let found = Kind::of(&map).ok_or_else(|| Fault::unknown_kind(&map))?;
        let kind = *self.kind.get_or_insert(found);
        if !kind.fits(&map) {
            return Err(Fault::OtherKind { expected: kind, found });
        }
        let sample = sample::read(kind, &mut Fields::of(map))?;
        let encoded = self.encoder.encode(number, &sample, self.limits.max_tokens)?;
        self.total_tokens += encoded.tokens();
        self.items.push(encoded);
        Ok(())
    }
}

/// The lines' items in one row; all are of one kind.
fn items(encoded: Vec<Encoded>) -> Items {
    let (mut examples, mut pairs) = (Vec::new(), Vec::new());
    for one in encoded {
        match one {
            Encoded::Examples(more) => examples.extend(more),
            Encoded::Pair(pair) => pairs.push(pair),
        }
    }
    if pairs.is_empty() { Items::Examples(examples) } else { Items::Pairs(pairs) }
}
