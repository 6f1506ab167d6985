//! Rewards of answers: a function `reward(prompt, answer, row)` in a Python file, or an HTTP endpoint.

use std::{
    ffi::OsStr,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::calls::{Retries, concurrently};
use crate::terminal::printable;

/// Program that calls the function of a Python file.
const HOST: &str = include_str!("reward_host.py");

/// Number of concurrent requests to an endpoint.
const CALLERS: usize = 8;

/// Repeats of a request to an endpoint that is busy or cannot be reached.
const RETRIES: Retries = Retries { attempts: 5, pause: Duration::from_secs(1) };

/// Maximum time of a request to an endpoint.
const CALL_TIMEOUT: Duration = Duration::from_secs(300);

/// An answer whose reward is asked for.
#[derive(Debug, Serialize)]
pub(in super::super) struct JudgedAnswer<'a> {
    /// The prompt as the data have it: a text or a list of messages.
    pub(in super::super) prompt: &'a Value,
    /// Text of the answer.
    pub(in super::super) answer: &'a str,
    /// All fields of the prompt's line.
    pub(in super::super) row: &'a Map<String, Value>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RewardError {
    #[error("cannot start python3 for the rewards of {}", .path.display())]
    NoPython { path: PathBuf, source: io::Error },
    /// The file or its function raised an exception, or returned no number.
    #[error("{}: {}", .path.display(), printable(message))]
    Python { path: PathBuf, message: String },
    #[error("the process with the rewards of {} has ended", .0.display())]
    PythonEnded(PathBuf),
    #[error("cannot get a reward from {}", printable(url))]
    Endpoint { url: String, source: Box<ureq::Error> },
    #[error("{} answered {status}: {}", printable(url), printable(body))]
    Status { url: String, status: u16, body: String },
    #[error("{} answered without a number in `reward`: {}", printable(url), printable(body))]
    NoReward { url: String, body: String },
    #[error("the reward {0} is not a finite number")]
    NotFinite(f64),
}

/// Source of rewards.
#[derive(Debug)]
pub(in super::super) enum RewardSource {
    Python(PythonReward),
    Endpoint(RewardEndpoint),
}

impl RewardSource {
    /// Opens the source that `--reward` names.
    pub(in super::super) fn open(reward: &str) -> Result<Self, RewardError> {
        if reward.starts_with("http://") || reward.starts_with("https://") {
            return Ok(Self::Endpoint(RewardEndpoint::new(reward)));
        }
        PythonReward::start(Path::new(reward)).map(Self::Python)
    }

    /// Returns the rewards of `answers` in their order.
    pub(in super::super) fn rewards(&mut self, answers: &[JudgedAnswer]) -> Result<Vec<f64>, RewardError> {
        let rewards = match self {
            Self::Python(python) => answers.iter().map(|answer| python.reward(answer)).collect(),
            Self::Endpoint(endpoint) => concurrently(answers, CALLERS, |answer| endpoint.reward(answer)),
        };
        rewards.and_then(|rewards: Vec<f64>| match rewards.iter().find(|reward| !reward.is_finite()) {
            Some(reward) => Err(RewardError::NotFinite(*reward)),
            None => Ok(rewards),
        })
    }
}

/// Reply of the Python process.
#[derive(Deserialize)]
struct HostReply {
    reward: Option<f64>,
    error: Option<String>,
}

/// A Python process with the user's function.
#[derive(Debug)]
pub(in super::super) struct PythonReward {
    path: PathBuf,
    process: Child,
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl PythonReward {
    fn start(path: &Path) -> Result<Self, RewardError> {
        let failed = |source| RewardError::NoPython { path: path.to_owned(), source };
        let mut process = Command::new("python3")
            .args([OsStr::new("-c"), OsStr::new(HOST), path.as_os_str()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C ends the run in order, and the process with it.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let (Some(requests), Some(replies)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(failed(io::ErrorKind::BrokenPipe.into()));
        };
        let mut python = Self { path: path.to_owned(), process, requests, replies: BufReader::new(replies) };
        python.reply().map(|_| python)
    }

    fn reward(&mut self, answer: &JudgedAnswer) -> Result<f64, RewardError> {
        let ended = |_| RewardError::PythonEnded(self.path.clone());
        let line = serde_json::to_string(answer).map_err(ended)?;
        writeln!(self.requests, "{line}").map_err(|_| RewardError::PythonEnded(self.path.clone()))?;
        self.reply()?.ok_or_else(|| RewardError::PythonEnded(self.path.clone()))
    }

    fn reply(&mut self) -> Result<Option<f64>, RewardError> {
        let mut line = String::new();
        let ended = || RewardError::PythonEnded(self.path.clone());
        // Python writes NaN and infinities, which JSON does not have.
        self.replies.read_line(&mut line).map_err(|_| ended())?;
        match serde_json::from_str(&line) {
            Ok(HostReply { error: Some(message), .. }) => {
                Err(RewardError::Python { path: self.path.clone(), message })
            }
            Ok(HostReply { reward, .. }) => Ok(reward),
            Err(_) if line.contains("reward") => {
                let message = format!("the reward must be a finite number, and the reply is {}", line.trim());
                Err(RewardError::Python { path: self.path.clone(), message })
            }
            Err(_) => Err(ended()),
        }
    }
}

impl Drop for PythonReward {
    fn drop(&mut self) {
        // A process that has ended needs no signal.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An HTTP endpoint that answers a posted [`JudgedAnswer`] with `{"reward": NUMBER}`.
#[derive(Debug)]
pub(in super::super) struct RewardEndpoint {
    agent: ureq::Agent,
    url: String,
}

impl RewardEndpoint {
    fn new(url: &str) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(CALL_TIMEOUT))
            .max_idle_connections_per_host(CALLERS)
            .build();
        Self { agent: config.into(), url: url.to_owned() }
    }

    fn reward(&self, answer: &JudgedAnswer) -> Result<f64, RewardError> {
        let may_pass = |error: &RewardError| {
            matches!(error, RewardError::Endpoint { .. } | RewardError::Status { status: 429 | 500.., .. })
        };
        RETRIES.call(may_pass, || self.call(answer))
    }

    fn call(&self, answer: &JudgedAnswer) -> Result<f64, RewardError> {
        let url = || self.url.clone();
        let failed = |source| RewardError::Endpoint { url: url(), source: Box::new(source) };
        let mut response = self.agent.post(&self.url).send_json(answer).map_err(failed)?;
        let status = response.status().as_u16();
        let body = response.body_mut().read_to_string().map_err(failed)?;
        if !(200..300).contains(&status) {
            return Err(RewardError::Status { url: url(), status, body: beginning(&body) });
        }
        let reply: Value = serde_json::from_str(&body).unwrap_or_default();
        reply["reward"].as_f64().ok_or_else(|| RewardError::NoReward { url: url(), body: beginning(&body) })
    }
}

/// Returns the beginning of a body that a message repeats.
fn beginning(body: &str) -> String {
    body.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read as _, Write as _},
        net::TcpListener,
        thread,
    };

    use serde_json::json;

    use super::*;

    fn python(text: &str) -> Result<RewardSource, RewardError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("reward.py");
        fs::write(&path, text).unwrap();
        RewardSource::open(path.to_str().unwrap())
    }

    fn rewards(source: &mut RewardSource, answers: &[&str]) -> Result<Vec<f64>, RewardError> {
        let row = Map::from_iter([("wanted".to_owned(), json!("b"))]);
        let prompt = json!([{ "role": "user", "content": "Which letter?" }]);
        let judged: Vec<_> =
            answers.iter().map(|answer| JudgedAnswer { prompt: &prompt, answer, row: &row }).collect();
        source.rewards(&judged)
    }

    #[test]
    fn a_function_gets_prompt_answer_and_row_and_may_print() {
        let text = "print('loading')\ndef reward(prompt, answer, row):\n    print(prompt[0]['content'])\n    \
                    return answer == row['wanted']\n";
        let mut source = python(text).unwrap();
        assert_eq!(rewards(&mut source, &["a", "b"]).unwrap(), [0.0, 1.0]);
        assert_eq!(rewards(&mut source, &[]).unwrap(), [0.0; 0]);
    }

    #[test]
    fn what_a_function_does_wrong_is_named() {
        let complaint = |text: &str| match python(text) {
            Ok(mut source) => rewards(&mut source, &["a"]).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        let head = "def reward(prompt, answer, row):\n    ";
        for (text, part) in [
            ("x = 1\n", "AttributeError: module 'reward_of_user' has no attribute 'reward'"),
            ("def reward(:\n", "SyntaxError"),
            (&format!("{head}return row['missing']\n"), "KeyError: 'missing' (line 2)"),
            (&format!("{head}return 'good'\n"), "ValueError"),
            (&format!("{head}return float('nan')\n"), "must be a finite number"),
            (&format!("{head}import os; os._exit(3)\n"), "has ended"),
        ] {
            let complaint = complaint(text);
            assert!(complaint.contains(part), "{complaint}");
        }
        let missing = RewardSource::open("/nowhere/reward.py").unwrap_err().to_string();
        assert!(missing.contains("FileNotFoundError"), "{missing}");
    }

    /// Starts an endpoint whose reward is the number of letters `b` in the answer; the first call fails.
    fn endpoint() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/reward", listener.local_addr().unwrap());
        thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let (mut text, mut piece) = (String::new(), [0; 4096]);
                while !text.ends_with('}') {
                    let count = stream.read(&mut piece).unwrap();
                    text.push_str(std::str::from_utf8(&piece[..count]).unwrap());
                }
                let body: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
                let answer = body["answer"].as_str().unwrap();
                let (status, body) = match (number, answer) {
                    (0, _) => ("503 Service Unavailable", "busy".to_owned()),
                    (_, "none") => ("200 OK", "{}".to_owned()),
                    (_, "bad") => ("400 Bad Request", "I take other rows".to_owned()),
                    _ => ("200 OK", json!({ "reward": answer.matches('b').count() }).to_string()),
                };
                let length = body.len();
                write!(
                    stream,
                    "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
                )
                .unwrap();
            }
        });
        url
    }

    #[test]
    fn an_endpoint_is_asked_again_while_it_is_busy_and_its_rewards_keep_their_order() {
        let mut source = RewardSource::open(&endpoint()).unwrap();
        let answers: Vec<String> = (0..20).map(|count| "b".repeat(count)).collect();
        let answers: Vec<&str> = answers.iter().map(String::as_str).collect();
        let expected: Vec<f64> = (0..20).map(f64::from).collect();
        assert_eq!(rewards(&mut source, &answers).unwrap(), expected);
        let complaint = rewards(&mut source, &["none"]).unwrap_err().to_string();
        assert!(complaint.contains("without a number in `reward`"), "{complaint}");
        let complaint = rewards(&mut source, &["bad"]).unwrap_err().to_string();
        assert!(complaint.contains("400: I take other rows"), "{complaint}");
    }
}
