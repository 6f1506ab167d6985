//! `holobiont up` as a server under test.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};

use crate::{
    http::{Dialect, DialectServer, SseEvent, free_port, get_as, with_prompt},
    process::LoggedProcess,
    workload::{AdapterChoice, AnswerKind, BenchRequest, form},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Installation {
    pub(crate) binaries: PathBuf,
    pub(crate) model: PathBuf,
    pub(crate) placement: DeploymentPlacement,
    pub(crate) key: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeploymentPlacement {
    /// One executor on these cores, in the format of `--cores`.
    Cores(String),
    /// One executor on these devices, in the formats of `--devices` and `--device-split`.
    Devices(String, String),
    /// The deployment file at this path.
    Described(PathBuf),
}

/// Adapter in the form `holobiont up --adapter NAME=DIR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedAdapter {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
}

/// Environment variable of `holobiont up` and its value.
pub(crate) type EnvSetting = (&'static str, String);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestModels {
    base: String,
    adapters: Vec<String>,
    key: Option<String>,
}

pub(crate) type Holobiont = DialectServer<RequestModels>;

impl Holobiont {
    /// Starts Holobiont with `adapters` and its state in `folder`, and waits until it is ready.
    ///
    /// # Errors
    /// Fails if Holobiont does not start.
    pub(crate) fn start(
        installation: &Installation,
        adapters: &[NamedAdapter],
        folder: &Path,
    ) -> Result<Self> {
        Self::start_with(installation, adapters, folder, &[])
    }

    /// Starts Holobiont as [`Holobiont::start`] does, with `settings` in its environment.
    ///
    /// # Errors
    /// Fails if Holobiont does not start.
    pub(crate) fn start_with(
        installation: &Installation,
        adapters: &[NamedAdapter],
        folder: &Path,
        settings: &[EnvSetting],
    ) -> Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let port = free_port()?;
        let mut command = Command::new(installation.binaries.join("holobiont"));
        command.arg("up").arg("--model").arg(&installation.model);
        command.arg("--listen").arg(format!("127.0.0.1:{port}")).arg("--state").arg(folder.join("state"));
        match &installation.placement {
            DeploymentPlacement::Cores(cores) => command.arg("--cores").arg(cores),
            DeploymentPlacement::Devices(devices, split) => {
                command.arg("--devices").arg(devices).arg("--device-split").arg(split)
            }
            DeploymentPlacement::Described(file) => command.arg("--config").arg(file),
        };
        command.envs(settings.iter().map(|(variable, value)| (variable, value)));
        for NamedAdapter { name, folder } in adapters {
            command.arg("--adapter").arg(format!("{name}={}", folder.display()));
        }
        let process = LoggedProcess::start(&mut command, &folder.join("log"))?;
        let unnamed = RequestModels::unnamed(adapters, installation.key.clone());
        Self::when_ready(process, port, unnamed)?.with_dialect(|models| models.named_by(port))
    }
}

impl RequestModels {
    /// Models of a server whose base has no known name yet.
    pub(crate) fn unnamed(adapters: &[NamedAdapter], key: Option<String>) -> Self {
        let adapters = adapters.iter().map(|adapter| adapter.name.clone()).collect();
        Self { base: String::new(), adapters, key }
    }

    /// Reads the base's name from `/v1/models`: the entry that is no adapter.
    ///
    /// # Errors
    /// If the server does not list its models, or lists only adapters.
    pub(crate) fn named_by(self, port: u16) -> Result<Self> {
        let listed = get_as(port, "/v1/models", self.key.as_deref())?;
        let listed: Value = serde_json::from_str(&listed).context("/v1/models is not JSON")?;
        let ids: Vec<&str> = listed["data"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|model| model["id"].as_str())
            .collect();
        let base = ids.iter().find(|id| self.adapters.iter().all(|name| name != *id));
        let base = base.ok_or_else(|| anyhow!("/v1/models lists no base model: {listed}"))?;
        Ok(Self { base: (*base).to_owned(), ..self })
    }

    pub(crate) fn of(&self, who: AdapterChoice) -> &str {
        match who {
            AdapterChoice::Base => &self.base,
            AdapterChoice::Adapter(index) => {
                self.adapters.get(index).map_or("adapter that was not loaded", String::as_str)
            }
        }
    }
}

impl Dialect for RequestModels {
    fn route(&self) -> &'static str {
        "/v1/completions"
    }

    fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    fn body(&self, job: &BenchRequest) -> Value {
        let mut body = json!({
            "model": self.of(job.who),
            "max_tokens": job.generate,
            "stream_options": { "include_usage": true },
        });
        match job.says {
            AnswerKind::Anything => {}
            AnswerKind::Token(token) => body["logit_bias"] = json!({ token.to_string(): 100 }),
            AnswerKind::Form => body["structured_outputs"] = json!({ "json": form() }),
        }
        with_prompt(body, job)
    }

    fn read(&self, event: &Value) -> Result<SseEvent> {
        ensure!(event["error"].is_null(), "the stream ended with an error: {}", event["error"]);
        let choice = &event["choices"][0];
        // The last token has arrived even if its text is empty.
        let has_text = choice["text"].as_str().is_some_and(|text| !text.is_empty());
        let is_last = choice["finish_reason"].is_string();
        let count = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let usage = &event["usage"];
        Ok(SseEvent {
            has_text: has_text || is_last,
            generated: count(&usage["completion_tokens"]),
            cached: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{BurstMix, burst};

    fn models() -> RequestModels {
        RequestModels { base: "smol".to_owned(), adapters: vec!["a0".to_owned(), "a1".to_owned()], key: None }
    }

    #[test]
    fn a_request_names_its_model_and_forbids_an_early_end() {
        let body = models().body(&burst(BurstMix::Adapters, 0)[1]);
        assert_eq!((body["model"].as_str(), body["ignore_eos"].as_bool()), (Some("a1"), Some(true)));
        assert_eq!(body["prompt"].as_array().map(Vec::len), Some(128));
        assert_eq!(models().body(&burst(BurstMix::Base, 0)[1])["model"], "smol");
    }

    #[test]
    fn text_usage_and_errors_are_told_apart() {
        let read = |event: Value| models().read(&event);
        assert!(read(json!({"choices": [{"text": "a"}], "usage": null})).unwrap().has_text);
        assert_eq!(read(json!({"choices": [{"text": ""}]})).unwrap(), SseEvent::default());
        assert!(read(json!({"choices": [{"text": "", "finish_reason": "length"}]})).unwrap().has_text);
        let usage = read(json!({"choices": [], "usage": {"completion_tokens": 64}})).unwrap();
        assert_eq!(usage, SseEvent { generated: Some(64), ..SseEvent::default() });
        assert!(read(json!({"error": {"message": "full"}})).unwrap_err().to_string().contains("full"));
    }
}
