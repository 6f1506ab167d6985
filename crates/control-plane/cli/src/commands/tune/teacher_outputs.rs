//! Collects the target model's answers for training a draft adapter: tokens with the likeliest alternatives
//! at each position, half of the answers greedy. Answers are kept in the order of the prompts and are not
//! requested again.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use control_protocol::training::{ConversationMessage, TeacherPrompt};
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::calls::Retries;
use crate::{
    client::{ClientError, GatewayClient},
    terminal::stop_signals::StopSignals,
};

/// Maximum number of concurrent requests.
const CALLERS: usize = 32;
/// Number of likeliest tokens recorded per position; less likely tokens teach almost nothing.
const LIKELIEST: u32 = 8;
/// Sampling temperatures of a prompt's answers.
const TEMPERATURES: [f64; 2] = [0.0, 0.7];
/// Repeats of a request while the gateway is busy.
const RETRIES: Retries = Retries { attempts: 600, pause: Duration::from_secs(1) };

/// Settings of the requests. Equal settings give equal answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TeacherSettings {
    /// Model name in requests.
    pub(super) model: String,
    /// Identity of the weights: an adapter version, or the base's file.
    pub(super) weights: String,
    /// Maximum number of tokens per answer.
    pub(super) max_tokens: u32,
    /// Random seed of the sampling.
    pub(super) seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CollectionEnd {
    Done,
    /// A stop signal ended the collection.
    Stopped,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// The gateway refused or failed a request.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The answers cannot be stored, or the collection cannot start.
    #[error(transparent)]
    Keep(#[from] io::Error),
}

/// A file of answers with the settings and prompts behind it.
#[derive(Debug)]
pub(super) struct TeacherOutputs<'a> {
    /// File with one line of answers per prompt.
    pub(super) file: &'a Path,
    /// File with the settings of the stored answers.
    pub(super) asking_file: &'a Path,
    pub(super) asking: &'a TeacherSettings,
    pub(super) prompts: &'a [TeacherPrompt],
}

impl TeacherOutputs<'_> {
    /// Returns the number of leading prompts that are answered in the file.
    pub(super) fn kept(&self) -> io::Result<usize> {
        Ok(self.kept_lines()?.0)
    }

    /// Returns the number of leading answered prompts and the bytes of their lines.
    fn kept_lines(&self) -> io::Result<(usize, u64)> {
        let asked = fs::read(self.asking_file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if asked.as_ref() != Some(self.asking) {
            return Ok((0, 0));
        }
        let mut lines = match File::open(self.file) {
            Ok(file) => BufReader::new(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, 0)),
            Err(error) => return Err(error),
        };
        let (mut count, mut bytes, mut line) = (0, 0, Vec::new());
        while let Some(prompt) = self.prompts.get(count) {
            line.clear();
            let length = lines.read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n')
                || !serde_json::from_slice(&line).is_ok_and(|kept: StoredPrompt| kept.is_of(prompt))
            {
                break;
            }
            (count, bytes) = (count + 1, bytes + length as u64);
        }
        Ok((count, bytes))
    }

    /// Requests the missing answers from `client` and reports the number of answered prompts to
    /// `on_progress`. The first stop signal ends the collection.
    pub(super) fn ask(
        &self,
        client: &GatewayClient,
        on_progress: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> Result<CollectionEnd, AskError> {
        let (kept, bytes) = self.kept_lines()?;
        let mut file = File::options().write(true).create(true).truncate(false).open(self.file)?;
        file.set_len(bytes)?;
        io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
        fs::write(self.asking_file, serde_json::to_vec_pretty(self.asking).map_err(io::Error::from)?)?;
        on_progress(kept)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ended = runtime.block_on(self.collect(client, kept, &mut file, on_progress));
        file.sync_all()?;
        ended
    }

    async fn collect(
        &self,
        client: &GatewayClient,
        kept: usize,
        file: &mut File,
        on_progress: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> Result<CollectionEnd, AskError> {
        let mut signals = StopSignals::new()?;
        let (client, hang_up) = client.apart();
        let (mut answered, asked) = self.start(&client, kept)?;
        let mut collected = OrderedLines { next: kept, waiting: BTreeMap::new() };
        let ended = loop {
            let answer = tokio::select! {
                answer = answered.recv() => answer,
                _ = signals.next() => break Ok(CollectionEnd::Stopped),
            };
            match answer {
                None => break Ok(CollectionEnd::Done),
                Some((_, Err(error))) => break Err(error.into()),
                Some((number, Ok(line))) => collected.add(number, line, file, on_progress)?,
            }
        };
        asked.is_over.store(true, Ordering::Relaxed);
        hang_up.hang_up();
        ended
    }

    /// Starts the request threads. The receiver yields each answer with its prompt's number.
    fn start(
        &self,
        client: &GatewayClient,
        kept: usize,
    ) -> io::Result<(UnboundedReceiver<TeacherOutput>, Arc<PromptQueue>)> {
        let queue = Arc::new(PromptQueue {
            asking: self.asking.clone(),
            prompts: self.prompts.to_vec(),
            next: AtomicUsize::new(kept),
            is_over: AtomicBool::new(false),
        });
        let (answers, answered) = unbounded_channel();
        for _ in 0..CALLERS.min(self.prompts.len() - kept) {
            let (queue, client, answers) = (Arc::clone(&queue), client.clone(), answers.clone());
            thread::Builder::new().name("asks".to_owned()).spawn(move || queue.work(&client, &answers))?;
        }
        Ok((answered, queue))
    }
}

/// The prompt of a stored line.
#[derive(Deserialize)]
struct StoredPrompt {
    kind: String,
    messages: Vec<ConversationMessage>,
    #[serde(rename = "answers")]
    _answers: Vec<IgnoredAny>,
}

impl StoredPrompt {
    fn is_of(&self, prompt: &TeacherPrompt) -> bool {
        self.kind == prompt.kind && self.messages == prompt.messages
    }
}

/// A prompt's number, and its line of answers.
type TeacherOutput = (usize, Result<String, ClientError>);

/// Buffer that writes lines in prompt order, independent of their order of arrival.
struct OrderedLines {
    next: usize,
    waiting: BTreeMap<usize, String>,
}

impl OrderedLines {
    fn add(
        &mut self,
        number: usize,
        line: String,
        file: &mut File,
        on_progress: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        self.waiting.insert(number, line);
        while let Some(line) = self.waiting.remove(&self.next) {
            file.write_all(line.as_bytes())?;
            self.next += 1;
            on_progress(self.next)?;
        }
        Ok(())
    }
}

/// Prompts that no request thread has taken yet.
#[derive(Debug)]
struct PromptQueue {
    asking: TeacherSettings,
    prompts: Vec<TeacherPrompt>,
    next: AtomicUsize,
    is_over: AtomicBool,
}

impl PromptQueue {
    fn work(&self, client: &GatewayClient, answers: &UnboundedSender<TeacherOutput>) {
        while !self.is_over.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(prompt) = self.prompts.get(number) else { return };
            let line = self.line(client, number, prompt);
            // The receiver is gone once the collection has ended.
            if answers.send((number, line)).is_err() {
                return;
            }
        }
    }

    /// Requests a prompt's answers and returns them as a line of training data.
    fn line(
        &self,
        client: &GatewayClient,
        number: usize,
        prompt: &TeacherPrompt,
    ) -> Result<String, ClientError> {
        let answers = TEMPERATURES.map(|temperature| self.answer(client, number, prompt, temperature));
        let answers = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
        let line = json!({ "kind": prompt.kind, "messages": prompt.messages, "answers": answers });
        Ok(format!("{line}\n"))
    }

    fn answer(
        &self,
        client: &GatewayClient,
        number: usize,
        prompt: &TeacherPrompt,
        temperature: f64,
    ) -> Result<Value, ClientError> {
        let TeacherSettings { model, max_tokens, seed, .. } = &self.asking;
        let body = json!({
            "model": model,
            "messages": prompt.messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            // Each prompt has a seed of its own, below 2^53.
            "seed": (seed % (1 << 21)) << 32 | number as u64,
            "logprobs": true,
            "top_logprobs": LIKELIEST,
            "return_tokens_as_token_ids": true,
        });
        let is_busy = |error: &ClientError| matches!(error, ClientError::Refused { status: 429 | 503, .. });
        let text = RETRIES.call(is_busy, || client.post_text("/v1/chat/completions", &body))?;
        let completion: Completion = serde_json::from_str(&text).map_err(ClientError::Garbled)?;
        let said = completion.choices.into_iter().next().map(|choice| choice.logprobs.content);
        Ok(as_answer(temperature, &said.unwrap_or_default()))
    }
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<LogprobChoice>,
}

#[derive(Deserialize)]
struct LogprobChoice {
    logprobs: Logprobs,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Vec<Token>,
}

#[derive(Deserialize)]
struct Token {
    token: TokenId,
    #[serde(default)]
    logprob: f64,
    #[serde(default)]
    top_logprobs: Vec<Token>,
}

/// A token that the API names by its id.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct TokenId(u32);

impl TryFrom<String> for TokenId {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let id = name.strip_prefix("token_id:").and_then(|id| id.parse().ok());
        id.map(Self).ok_or_else(|| format!("'{name}' is not a token id; the gateway is an older version"))
    }
}

/// Converts tokens to the trainer's format. Log probabilities keep three decimals, which is more than a
/// draft can learn.
fn as_answer(temperature: f64, said: &[Token]) -> Value {
    let rounded = |logprob: f64| (logprob.min(0.0) * 1000.0).round() / 1000.0;
    let likely = |token: &Token| -> Vec<(u32, f64)> {
        token.top_logprobs.iter().map(|other| (other.token.0, rounded(other.logprob))).collect()
    };
    json!({
        "temperature": temperature,
        "tokens": said.iter().map(|token| token.token.0).collect::<Vec<_>>(),
        "likely": said.iter().map(likely).collect::<Vec<_>>(),
    })
}
