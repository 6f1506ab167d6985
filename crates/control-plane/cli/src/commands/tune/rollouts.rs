//! Answers of the adapter in training and their rewards, which the trainer asks for in a run of GRPO.
//!
//! A thread of its own samples and judges, so that the run hears signals meanwhile.
//!
//! # Layout
//!
//! - [`sampler`]: answers from the gateway
//! - [`reward`]: rewards from a Python file or an HTTP endpoint

pub(super) mod reward;
mod sampler;

use std::{
    fs::File,
    io::{self, PipeWriter, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

use control_protocol::training::rollout::{Rollout, RolloutPrompt, RolloutReply, RolloutRequest};
use serde_json::json;

use self::{
    reward::{JudgedAnswer, RewardError, RewardSource},
    sampler::{SampledAnswer, Sampler},
};
use super::name::RunName;
use crate::client::{ClientError, GatewayClient};

#[derive(Debug, thiserror::Error)]
pub(crate) enum RolloutError {
    #[error("cannot sample answers of the adapter")]
    Sample(#[from] ClientError),
    #[error("an answer has no reward")]
    Reward(#[from] RewardError),
    #[error("cannot write the answers to {}", path.display())]
    Log { path: PathBuf, source: io::Error },
}

/// Thread that answers the trainer's requests.
#[derive(Debug)]
pub(super) struct RolloutWorker {
    sampler: Arc<Sampler>,
    requests: Sender<RolloutRequest>,
    thread: JoinHandle<Result<(), RolloutError>>,
}

impl RolloutWorker {
    /// Starts the thread, which writes replies to `replies` and all answers to the file `log`.
    pub(super) fn start(
        client: GatewayClient,
        name: &RunName,
        rewards: RewardSource,
        replies: PipeWriter,
        log: &Path,
    ) -> io::Result<Self> {
        let (requests, waiting) = channel();
        let sampler = Arc::new(Sampler { client, name: format!("{name}.rollouts") });
        let log =
            RolloutLog { path: log.to_owned(), file: File::options().append(true).create(true).open(log)? };
        let own = Arc::clone(&sampler);
        let work = move || answer_all(&waiting, &own, rewards, replies, log);
        let thread = thread::Builder::new().name("rollouts".to_owned()).spawn(work)?;
        Ok(Self { sampler, requests, thread })
    }

    /// Queues a request of the trainer. A thread that has failed takes none, and the trainer stops then.
    pub(super) fn request(&self, request: RolloutRequest) {
        let _ = self.requests.send(request);
    }

    /// Ends the thread, removes the adapter from the gateway, and returns why the thread failed. Does not
    /// wait for a request under way.
    pub(super) fn end(self) -> Result<(), RolloutError> {
        let Self { sampler, requests, thread } = self;
        drop(requests);
        sampler.forget();
        if thread.is_finished() { thread.join().unwrap_or(Ok(())) } else { Ok(()) }
    }
}

/// Answers requests until none can come, or until the trainer is gone.
fn answer_all(
    requests: &Receiver<RolloutRequest>,
    sampler: &Sampler,
    mut rewards: RewardSource,
    mut replies: PipeWriter,
    mut log: RolloutLog,
) -> Result<(), RolloutError> {
    while let Ok(request) = requests.recv() {
        let reply = reply_to(&request, sampler, &mut rewards, &mut log)?;
        if send(&mut replies, &reply).is_err() {
            // The trainer has ended, and its exit says why.
            break;
        }
    }
    Ok(())
}

fn reply_to(
    request: &RolloutRequest,
    sampler: &Sampler,
    rewards: &mut RewardSource,
    log: &mut RolloutLog,
) -> Result<RolloutReply, RolloutError> {
    let groups = sampler.draw(request)?;
    let mut judged = Vec::new();
    for (RolloutPrompt { prompt, row, .. }, group) in request.prompts.iter().zip(&groups) {
        judged.extend(group.iter().map(|it| JudgedAnswer { prompt, answer: &it.text, row }));
    }
    let values = rewards.rewards(&judged)?;
    log.add(request.step, &judged, &values)?;
    let mut values = values.into_iter();
    let mut rollout = |SampledAnswer { tokens, logprobs, .. }| Rollout {
        tokens,
        logprobs,
        reward: values.next().expect("each answer has a reward"),
    };
    let groups = groups.into_iter().map(|group| group.into_iter().map(&mut rollout).collect());
    Ok(RolloutReply { groups: groups.collect() })
}

fn send(replies: &mut PipeWriter, reply: &RolloutReply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    replies.write_all(&line)
}

/// File with all answers of a run, one JSON object for each.
struct RolloutLog {
    path: PathBuf,
    file: File,
}

impl RolloutLog {
    fn add(&mut self, step: u64, judged: &[JudgedAnswer], rewards: &[f64]) -> Result<(), RolloutError> {
        let mut lines = String::new();
        for (JudgedAnswer { prompt, answer, .. }, reward) in judged.iter().zip(rewards) {
            let line = json!({ "step": step, "prompt": prompt, "answer": answer, "reward": reward });
            lines.push_str(&format!("{line}\n"));
        }
        let failed = |source| RolloutError::Log { path: self.path.clone(), source };
        self.file.write_all(lines.as_bytes()).map_err(failed)
    }
}
