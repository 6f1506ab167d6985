//! Clients that hold a workload's conversations with a real deployment: each starts at its time and continues
//! after each answer and a think time.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use simulator::workload::{Conversation, Workload};

use super::SAID;
use crate::{
    holobiont_runner::Holobiont,
    workload::{AdapterChoice, AnswerKind, BenchRequest, FIRST_WORD, LAST_WORD},
};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DialogueTiming {
    /// Seconds from the request to its first token.
    pub(super) ttft_s: f64,
    /// Mean seconds between tokens; `None` if there was only one.
    pub(super) tpot_s: Option<f64>,
    pub(super) prompt: usize,
    pub(super) cached: usize,
}

/// Runs every conversation of `workload`; turns that would begin after `end` are skipped, as in the
/// simulator.
///
/// # Errors
/// If a request fails.
pub(super) fn run_dialogues(
    server: &Holobiont,
    workload: &Workload,
    end: Duration,
) -> Result<Vec<DialogueTiming>> {
    let begin = Instant::now();
    thread::scope(|scope| {
        let talks = workload.conversations.iter().filter(|talk| talk.start < end);
        let clients: Vec<_> =
            talks.map(|talk| scope.spawn(move || turns(server, talk, begin, end))).collect();
        let mut heard = Vec::new();
        for client in clients {
            heard.extend(client.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked")))?);
        }
        Ok(heard)
    })
}

fn turns(
    server: &Holobiont,
    talk: &Conversation,
    begin: Instant,
    end: Duration,
) -> Result<Vec<DialogueTiming>> {
    let mut heard = Vec::new();
    let mut due = begin + talk.start;
    for (turn, next) in (0..talk.turns.len()).zip(talk.turns.iter().skip(1).map(Some).chain([None])) {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let job = job(talk, turn);
        let timeline = server.ask(&job)?;
        let further = timeline.tokens - 1;
        heard.push(DialogueTiming {
            ttft_s: (timeline.first - timeline.sent).as_secs_f64(),
            tpot_s: (further > 0).then(|| (timeline.last - timeline.first).as_secs_f64() / further as f64),
            prompt: job.prompt.len(),
            cached: timeline.cached,
        });
        let Some(next) = next else { break };
        due = timeline.last + next.think;
        if due >= begin + end {
            break;
        }
    }
    Ok(heard)
}

/// Prompt of a turn: the simulator's prompt, with the forced answers.
fn job(talk: &Conversation, turn: usize) -> BenchRequest {
    let mut prompt: Vec<u32> =
        (0..talk.span(turn).0).map(|position| clamp_token(talk.token(position))).collect();
    for (before, answered) in talk.turns[..turn].iter().enumerate() {
        let answer = talk.span(before).0;
        prompt[answer..answer + answered.reply].fill(SAID);
    }
    BenchRequest {
        prompt,
        who: AdapterChoice::Adapter(talk.adapter),
        generate: talk.turns[turn].reply,
        says: AnswerKind::Token(SAID),
    }
}

/// Maps a token of the simulator, which may be any number, to the vocabulary.
fn clamp_token(token: u32) -> u32 {
    FIRST_WORD + token % (LAST_WORD - FIRST_WORD)
}

#[cfg(test)]
mod tests {
    use simulator::workload::ConversationTurn;

    use super::*;

    #[test]
    fn a_prompt_goes_on_from_the_answer_that_was_given() {
        let turn = |prompt, reply| ConversationTurn { think: Duration::ZERO, prompt, reply };
        let turns = vec![turn(3, 2), turn(1, 4)];
        let talk = Conversation { start: Duration::ZERO, adapter: 1, system: 2, content: 7, turns };
        let [first, second] = [0, 1].map(|turn| job(&talk, turn));
        assert_eq!((first.prompt.len(), first.generate), (5, 2));
        assert_eq!(second.prompt[..5], first.prompt[..]);
        assert_eq!((second.prompt.len(), &second.prompt[5..7]), (8, &[SAID; 2][..]));
        assert!(second.prompt.iter().all(|token| (FIRST_WORD..LAST_WORD).contains(token)));
    }
}
