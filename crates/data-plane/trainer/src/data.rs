//! Training data: JSON, one example per line.
//!
//! There are several kinds of lines ([`DataKind`]). The first line decides the kind of the file, and every
//! line must have it. All lines are read and tokenized before training starts, so that a fault in the last
//! line costs no training. Faults are collected, each with its line and a remedy.
//!
//! An answer is learned as the model would generate it: the tokens before it are exactly those of a request,
//! and it ends with the token at which serving stops. Some templates show earlier turns differently from the
//! last turn (Qwen3 removes their reasoning content). Then no single token row is right for all turns, and
//! the conversation becomes several examples.
//!
//! # Layout
//! - `source`: files of several formats as lines; `json_array`, `table`: arrays and tables as lines
//! - `lines`: the lines of a file and its hash, in one pass
//! - `kind`, `fields`: the kind of a line and access to its fields
//! - `sample`: the content of a line, for all kinds; `message`, `tool_data`: messages, tools and calls;
//!   `rating`: rated answers; `distillation_data`: recorded answers of a model
//! - `encode`: samples as tokens
//! - `prompts`: prompts without their answers, for a teacher model
//! - `rollout_data`: prompts that the adapter in training answers, for a reward
//! - `fault`: errors of files and lines

mod distillation_data;
mod encode;
mod fault;
mod fields;
mod json_array;
mod kind;
mod lines;
mod message;
mod prompts;
mod rating;
mod rollout_data;
mod sample;
mod source;
mod table;
mod tool_data;

use std::{io, ops::Range, path::PathBuf};

use model_files::strict_json;
use serde_json::{Map, Value};

pub use distillation_data::DistillationSample;
pub use encode::Encoder;
pub use fault::{DataError, LineFault, MAX_FAULTS_SHOWN, Problem};
pub use kind::DataKind;
pub use prompts::{DataPrompt, FilePrompts, prompts, prompts_of_files};
pub use rating::RatedAnswer;
pub use rollout_data::RolloutItem;
pub use source::find_files;

use encode::Encoded;
use fields::{LineFields, UnreadFields};
use lines::DataLines;
use source::DataSource;

/// Limits of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataLimits {
    /// Maximum bytes per line.
    pub line_bytes: usize,
    /// Maximum lines per file.
    pub lines: usize,
    /// Maximum tokens per example.
    pub max_tokens: usize,
    /// Maximum tokens of all examples; each takes eight bytes.
    pub total_tokens: usize,
}

impl Default for DataLimits {
    fn default() -> Self {
        Self { line_bytes: 1 << 20, lines: 1 << 20, max_tokens: 4096, total_tokens: 1 << 28 }
    }
}

/// Tokens to learn from.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Line of the file, from 1.
    pub line: usize,
    /// At least two tokens.
    pub tokens: Vec<u32>,
    /// Weight of each token's prediction, except the first: `weights[i]` belongs to `tokens[i + 1]`.
    pub weights: Vec<f32>,
}

/// Two answers to one prompt. The weights are 1 for answer tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct PreferencePair {
    /// The better answer and its prompt.
    pub chosen: Example,
    /// The worse answer and its prompt.
    pub rejected: Example,
}

/// The content of a file, in the order of its lines.
#[derive(Debug, Clone, PartialEq)]
pub enum DataItems {
    Examples(Vec<Example>),
    Pairs(Vec<PreferencePair>),
    Rated(Vec<RatedAnswer>),
    /// Recorded answers of a model.
    Said(Vec<DistillationSample>),
    /// Prompts that the adapter in training answers.
    Prompts(Vec<RolloutItem>),
}

impl DataItems {
    /// Returns the number of examples, pairs or answers.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Examples(examples) => examples.len(),
            Self::Pairs(pairs) => pairs.len(),
            Self::Rated(rated) => rated.len(),
            Self::Said(said) => said.len(),
            Self::Prompts(prompts) => prompts.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of all items.
    #[must_use]
    pub fn tokens(&self) -> usize {
        let of = |example: &Example| example.tokens.len();
        match self {
            Self::Examples(examples) => examples.iter().map(of).sum(),
            Self::Pairs(pairs) => pairs.iter().map(|pair| of(&pair.chosen) + of(&pair.rejected)).sum(),
            Self::Rated(rated) => rated.iter().map(|rated| of(&rated.example)).sum(),
            Self::Said(said) => said.iter().map(|said| of(&said.example)).sum(),
            Self::Prompts(prompts) => prompts.iter().map(|prompt| prompt.tokens.len()).sum(),
        }
    }

    /// Returns for each line, in order, the range of item numbers that come from it.
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
            Self::Prompts(all) => all.iter().map(|_| of_line(1)).collect(),
            Self::Rated(all) => all.iter().map(|_| of_line(1)).collect(),
        }
    }

    /// Returns the line of each item in `numbers`.
    ///
    /// # Panics
    /// Panics if a number is out of range.
    #[must_use]
    pub fn lines(&self, numbers: &[usize]) -> Vec<u64> {
        let line = |&number: &usize| match self {
            Self::Examples(all) => all[number].line as u64,
            Self::Pairs(all) => all[number].chosen.line as u64,
            Self::Rated(all) => all[number].example.line as u64,
            Self::Said(all) => all[number].example.line as u64,
            Self::Prompts(all) => all[number].line as u64,
        };
        numbers.iter().map(line).collect()
    }

    /// Returns copies of the items in `numbers`.
    ///
    /// # Panics
    /// Panics if a number is out of range.
    #[must_use]
    pub fn pick(&self, numbers: &[usize]) -> Self {
        fn of<T: Clone>(all: &[T], numbers: &[usize]) -> Vec<T> {
            numbers.iter().map(|&number| all[number].clone()).collect()
        }
        match self {
            Self::Examples(all) => Self::Examples(of(all, numbers)),
            Self::Pairs(all) => Self::Pairs(of(all, numbers)),
            Self::Rated(all) => Self::Rated(of(all, numbers)),
            Self::Said(all) => Self::Said(of(all, numbers)),
            Self::Prompts(all) => Self::Prompts(of(all, numbers)),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    pub kind: DataKind,
    pub items: DataItems,
    /// Hash of all lines; of several files, hash of the hashes of their lines.
    pub hash: blake3::Hash,
    /// Names of fields that training ignores, such as `messages[].id`.
    pub unread: Vec<String>,
}

/// Reads the files at `paths` one after the other; the numbers of lines go on from file to file.
///
/// # Errors
/// Fails if a file cannot be read or the data exceed a limit, or if any line has a fault; all faults are
/// reported.
pub fn read_files(
    paths: &[PathBuf],
    encoder: &Encoder<'_>,
    limits: &DataLimits,
) -> Result<Dataset, DataError> {
    read_sources(sources(paths), encoder, limits)
}

/// Reads the prompts of the files at `paths`, for answers of the adapter in training.
///
/// # Errors
/// Fails as [`read_files`] does, and if a line has no prompt.
pub fn rollout_prompts_of_files(
    paths: &[PathBuf],
    encoder: &Encoder<'_>,
    limits: &DataLimits,
) -> Result<Dataset, DataError> {
    read_rollout_prompts(sources(paths), encoder, limits)
}

/// Reads prompts from `file`, for answers of the adapter in training.
///
/// # Errors
/// Fails as [`rollout_prompts_of_files`] does.
pub fn rollout_prompts(
    file: impl io::Read,
    encoder: &Encoder<'_>,
    limits: &DataLimits,
) -> Result<Dataset, DataError> {
    read_rollout_prompts(one_source(file), encoder, limits)
}

/// Reads prompts. Rewards read the other fields, so no field counts as unread.
fn read_rollout_prompts<'a>(
    sources: impl Iterator<Item = Result<DataSource<'a>, DataError>>,
    encoder: &Encoder<'_>,
    limits: &DataLimits,
) -> Result<Dataset, DataError> {
    let mut items = Vec::new();
    let hash = each_line(sources, limits, |line, row| {
        let (field, prompt) = rollout_data::prompt_of(&row)?;
        let tokens = encoder.rollout_prompt(line, &prompt, limits.max_tokens)?;
        let count = tokens.len();
        items.push(RolloutItem { line, tokens, field, row });
        Ok(count)
    })?;
    if items.is_empty() {
        return Err(DataError::Empty);
    }
    Ok(Dataset { kind: DataKind::Prompts, items: DataItems::Prompts(items), hash, unread: Vec::new() })
}

/// Reads training data from `file`.
///
/// # Errors
/// Fails as [`read_files`] does.
pub fn read(file: impl io::Read, encoder: &Encoder<'_>, limits: &DataLimits) -> Result<Dataset, DataError> {
    read_sources(one_source(file), encoder, limits)
}

fn read_sources<'a>(
    sources: impl Iterator<Item = Result<DataSource<'a>, DataError>>,
    encoder: &Encoder<'_>,
    limits: &DataLimits,
) -> Result<Dataset, DataError> {
    let (mut encoded, unread, mut kind) = (Vec::new(), UnreadFields::default(), None);
    let hash = each_line(sources, limits, |number, map| {
        let kind = one_kind(&mut kind, &map)?;
        let mut line = LineFields::of(map, &unread);
        let weight = sample::weight(kind, &mut line)?;
        let sample = sample::read(kind, &mut line)?;
        let item = encoder.encode(number, &sample, limits.max_tokens)?.weighted(weight);
        let tokens = item.tokens();
        encoded.push(item);
        Ok(tokens)
    })?;
    let kind = kind.ok_or(DataError::Empty)?;
    Ok(Dataset { kind, items: items(encoded), hash, unread: unread.names() })
}

/// Opens the files at `paths`, each when the files before it have been read.
fn sources(paths: &[PathBuf]) -> impl Iterator<Item = Result<DataSource<'_>, DataError>> {
    let are_several = paths.len() > 1;
    paths.iter().map(move |path| {
        let read = |source| DataError::Read { path: path.clone(), source };
        let name = are_several.then(|| path.display().to_string());
        Ok(DataSource { name, path: Some(path.clone()), lines: source::open(path).map_err(read)? })
    })
}

fn one_source<'a>(file: impl io::Read + 'a) -> impl Iterator<Item = Result<DataSource<'a>, DataError>> {
    std::iter::once(Ok(DataSource { name: None, path: None, lines: Box::new(file) }))
}

/// Calls `take` with the number and fields of each line; `take` returns the line's number of tokens. Returns
/// the hash of the files.
fn each_line<'a>(
    sources: impl Iterator<Item = Result<DataSource<'a>, DataError>>,
    limits: &DataLimits,
    take: impl FnMut(usize, Map<String, Value>) -> Result<usize, LineFault>,
) -> Result<blake3::Hash, DataError> {
    let mut reading = LineReading { limits, take, lines: 0, tokens: 0, problems: Vec::new(), count: 0 };
    let hashes = sources.map(|source| reading.file(source?)).collect::<Result<Vec<_>, _>>()?;
    let LineReading { problems, count, .. } = reading;
    if count > 0 {
        return Err(DataError::Problems { problems, count });
    }
    Ok(match hashes.as_slice() {
        [one] => *one,
        several => several
            .iter()
            .fold(blake3::Hasher::new(), |mut all, one| {
                all.update(one.as_bytes());
                all
            })
            .finalize(),
    })
}

/// Reader of the lines of several files, which counts them and collects their faults.
struct LineReading<'a, T> {
    limits: &'a DataLimits,
    take: T,
    lines: usize,
    tokens: usize,
    /// The first faults.
    problems: Vec<Problem>,
    /// Number of all faulty lines.
    count: usize,
}

impl<T: FnMut(usize, Map<String, Value>) -> Result<usize, LineFault>> LineReading<'_, T> {
    /// Reads a file and returns the hash of its lines.
    fn file(&mut self, DataSource { name, path, lines }: DataSource<'_>) -> Result<blake3::Hash, DataError> {
        let mut lines = DataLines::new(lines, self.limits.line_bytes);
        let before = self.lines;
        let unreadable = |source| match &path {
            Some(path) => DataError::Read { path: path.clone(), source },
            None => DataError::Stream(source),
        };
        while let Some((number, line)) = lines.next_line().map_err(unreadable)? {
            self.lines = before + number;
            if self.lines > self.limits.lines {
                return Err(DataError::TooManyLines { limit: self.limits.lines });
            }
            match line.and_then(fields).and_then(|map| (self.take)(self.lines, map)) {
                Ok(more) => self.tokens += more,
                Err(fault) => self.note(Problem { file: name.clone(), line: number, fault }),
            }
            if self.tokens > self.limits.total_tokens {
                return Err(DataError::TooManyTokens { line: self.lines, limit: self.limits.total_tokens });
            }
        }
        Ok(lines.hash())
    }

    fn note(&mut self, problem: Problem) {
        self.count += 1;
        if self.problems.len() < MAX_FAULTS_SHOWN {
            self.problems.push(problem);
        }
    }
}

/// Returns the fields of a line.
fn fields(line: &str) -> Result<Map<String, Value>, LineFault> {
    let value = strict_json::parse(line.as_bytes()).map_err(|error| LineFault::Json(error.to_string()))?;
    if let Value::Object(map) = value { Ok(map) } else { Err(LineFault::NoObject) }
}

/// Returns the kind of a line, which must be the `kind` of the lines before.
fn one_kind(kind: &mut Option<DataKind>, line: &Map<String, Value>) -> Result<DataKind, LineFault> {
    let found = DataKind::of(line).ok_or_else(|| LineFault::unknown_kind(line))?;
    let kind = *kind.get_or_insert(found);
    if kind.fits(line) { Ok(kind) } else { Err(LineFault::OtherKind { expected: kind, found }) }
}

/// Joins the items of all lines, which have one kind.
fn items(encoded: Vec<Encoded>) -> DataItems {
    let (mut examples, mut pairs, mut rated, mut said) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for one in encoded {
        match one {
            Encoded::Examples(more) => examples.extend(more),
            Encoded::Pair(pair) => pairs.push(pair),
            Encoded::Rated(answer) => rated.push(answer),
            Encoded::Said(more) => said.extend(more),
        }
    }
    match (pairs.is_empty(), rated.is_empty(), said.is_empty()) {
        (false, ..) => DataItems::Pairs(pairs),
        (_, false, _) => DataItems::Rated(rated),
        (.., false) => DataItems::Said(said),
        _ => DataItems::Examples(examples),
    }
}
