//! Replays the Azure LLM Inference Trace 2023: arrival, prompt tokens, generated tokens. The trace names no
//! adapter, so adapters are drawn.

use std::{fs, io, path::Path, time::Duration};

use super::{Conversation, ConversationTurn, Workload, WorkloadAdapter, popularity};
use crate::{random::RandomStream, workload::scenario::WorkloadSpec};

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {0}")]
    Read(String, #[source] io::Error),
    /// A line is not in the format of the Azure trace.
    #[error("line {line} of {path} is not `2023-11-16 18:17:03.9799600,4808,10`")]
    Line {
        /// Path of the trace file.
        path: String,
        /// Line number from 1.
        line: usize,
    },
}

/// Maximum prompt and answer lengths; longer ones are cut.
const MAX_TOKENS: (usize, usize) = (2048, 512);

/// A line of the trace: seconds since midnight, prompt tokens, answer tokens.
type TraceRow = (f64, usize, usize);

/// Returns the requests per second of a trace.
///
/// # Errors
/// The errors of [`replay`].
pub fn rate(path: &Path) -> Result<f64, TraceError> {
    Ok(rate_of(&read(path)?))
}

fn rate_of(rows: &[TraceRow]) -> f64 {
    let seconds = rows.last().map_or(0.0, |last| last.0) - rows.first().map_or(0.0, |first| first.0);
    rows.len() as f64 / seconds.max(1.0)
}

/// Reads the rows of a trace, at least one.
fn read(path: &Path) -> Result<Vec<TraceRow>, TraceError> {
    let name = path.display().to_string();
    let text = fs::read_to_string(path).map_err(|error| TraceError::Read(name.clone(), error))?;
    let lines = text.lines().enumerate().skip(1).filter(|(_, line)| !line.is_empty());
    let rows: Vec<TraceRow> = lines
        .map(|(index, line)| {
            parse(line).ok_or_else(|| TraceError::Line { path: name.clone(), line: index + 1 })
        })
        .collect::<Result<_, _>>()?;
    match rows.is_empty() {
        true => Err(TraceError::Line { path: name, line: 2 }),
        false => Ok(rows),
    }
}

/// Creates a workload from a trace, with arrivals proportional to the file's at the rate of `recipe`; the
/// scenario of `recipe` is ignored.
///
/// # Errors
/// If the file is missing, or is not a trace.
pub fn replay(path: &Path, recipe: &WorkloadSpec, seed: u64) -> Result<Workload, TraceError> {
    let rows = read(path)?;
    let (begin, scale) = (rows[0].0, rate_of(&rows) / recipe.per_s);
    let mut stream = RandomStream::new(seed, "replay", 0);
    let shares = recipe.popularity.shares(recipe.adapters, &mut stream);
    let divided = |tokens: usize| ((tokens as f64 / recipe.length_divisor).round() as usize).max(1);
    let conversations = rows.iter().enumerate().map(|(number, &(at, prompt, reply))| Conversation {
        start: Duration::from_secs_f64((at - begin).max(0.0) * scale),
        adapter: popularity::pick(&shares, stream.uniform()),
        system: 0,
        content: number as u64,
        turns: vec![ConversationTurn {
            think: Duration::ZERO,
            prompt: divided(prompt.min(MAX_TOKENS.0)),
            reply: divided(reply.min(MAX_TOKENS.1)),
        }],
    });
    let conversations = conversations.take_while(|conversation| conversation.start < recipe.end).collect();
    let tenants = usize::from(recipe.tenants.max(1));
    let adapters = (0..recipe.adapters)
        .map(|index| WorkloadAdapter { rank: recipe.rank, tenant: (index % tenants) as u16 })
        .collect();
    Ok(Workload { adapters, conversations, shares: recipe.shares })
}

fn parse(line: &str) -> Option<TraceRow> {
    let mut fields = line.split(',');
    let (_, time) = fields.next()?.split_once(' ')?;
    let mut parts = time.splitn(3, ':').map(str::parse::<f64>);
    let (hours, minutes, seconds) = (parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?);
    let prompt = fields.next()?.parse().ok()?;
    let reply = fields.next()?.trim().parse().ok()?;
    Some((hours * 3600.0 + minutes * 60.0 + seconds, prompt, reply))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{
        ShareAccounting, arrivals::ArrivalHistory, popularity::Popularity, scenario::Scenario,
    };

    const RECIPE: WorkloadSpec = WorkloadSpec {
        scenario: Scenario::Chat,
        adapters: 4,
        popularity: Popularity::Uniform,
        drift: 0.0,
        rank: 16,
        tenants: 1,
        shares: ShareAccounting::ByTenant,
        hostile_per_s: 0.0,
        per_s: 2.0,
        length_divisor: 2.0,
        before: ArrivalHistory::Nothing,
        end: Duration::from_secs(100),
    };

    #[test]
    fn rows_come_in_proportion_and_at_the_asked_rate() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,100,10\n\
                    2023-11-16 18:00:01.5000000,9999,20\n2023-11-16 18:00:03.0000000,50,1\n";
        fs::write(&file, rows).unwrap();
        let workload = replay(file.path(), &RECIPE, 1).unwrap();
        let starts: Vec<f64> = workload.conversations.iter().map(|talk| talk.start.as_secs_f64()).collect();
        assert_eq!(starts, [0.0, 0.75, 1.5]);
        let turn = workload.conversations[1].turns[0];
        assert_eq!((turn.prompt, turn.reply), (1024, 10));
    }

    #[test]
    fn another_file_is_refused_with_the_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, "header\n2023-11-16 18:00:00.0,1,1\nnonsense\n").unwrap();
        let error = replay(file.path(), &RECIPE, 1).unwrap_err();
        assert!(matches!(error, TraceError::Line { line: 3, .. }), "{error}");
    }
}
