//! The text printed once the gateway is ready: address, models, and two example requests.

use std::{path::PathBuf, time::Duration};

use serde_json::json;
use tokio::sync::mpsc::Sender;

use super::{detach::ForegroundMode, plan::StartPlan, process::ProcessRole};
use crate::{
    client::{GatewayClient, Loading},
    terminal::{PrintFormat, Terminal},
};

/// Content of the banner known before the start.
#[derive(Debug, Clone)]
pub(crate) struct StartupBanner {
    /// Names of the expected models, base first.
    expected_models: Vec<String>,
    /// Directory from which adapters are loaded and into which trained adapters are written.
    adapter_root: PathBuf,
    /// Cores of the LoRA workers.
    worker_cores: Vec<u32>,
    /// Maximum number of concurrent trainers.
    max_trainers: u32,
    keys: Keys,
    place: ForegroundMode,
    /// Command that stops the deployment.
    stop_command: String,
    terminal: Terminal,
}

/// Process ids of the supervised processes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ProcessIds {
    /// Executors by role; several executors by name.
    pub(crate) executors: Vec<(ProcessRole, Option<u32>)>,
    pub(crate) gateway: Option<u32>,
    pub(crate) trainer: Option<u32>,
    pub(crate) workers: Vec<u32>,
}

/// Interval between progress requests to a loading gateway.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Message of the background thread about the gateway.
#[derive(Debug)]
pub(crate) enum GatewayNotice {
    Loading(Loading),
    /// The gateway is ready for requests.
    Welcome {
        url: String,
        /// Names that requests may use as `model`, base first.
        models: Vec<String>,
    },
}

/// Whether requests need an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keys {
    None,
    Needed,
}

impl StartupBanner {
    pub(crate) fn new(plan: &StartPlan, place: ForegroundMode, terminal: Terminal) -> Self {
        let mut expected_models = vec![plan.served_name.clone()];
        expected_models.extend(plan.other_bases.iter().cloned());
        expected_models.extend(plan.adapters.iter().cloned());
        let keys = if plan.has_keys { Keys::Needed } else { Keys::None };
        let worker_cores = plan.recipes.workers.iter().map(|(worker, _)| worker.core).collect();
        let (max_trainers, stop_command) = (plan.max_trainers, plan.stop_command.clone());
        let adapter_root = plan.adapter_root.clone();
        Self {
            expected_models,
            adapter_root,
            worker_cores,
            max_trainers,
            keys,
            place,
            stop_command,
            terminal,
        }
    }

    /// Waits in the background until the gateway is ready, then requests its models, which may include
    /// adapters of earlier starts. A gateway that does not answer must not block the supervisor.
    pub(crate) fn ask_in_background(&self, url: String, news: Sender<GatewayNotice>) {
        let (expected, terminal) = (self.expected_models.clone(), self.terminal);
        std::thread::spawn(move || {
            let client = GatewayClient::new(&url, terminal);
            // A failed send means that the supervisor has ended.
            while let Some(loading) = client.still_loading() {
                if news.blocking_send(GatewayNotice::Loading(loading)).is_err() {
                    return;
                }
                std::thread::sleep(ASK_AGAIN_AFTER);
            }
            let served = client.models().map(|models| models.into_iter().map(|model| model.id).collect());
            let models = served.unwrap_or(expected);
            let _ = news.blocking_send(GatewayNotice::Welcome { url, models });
        });
    }

    pub(crate) fn print(&self, url: &str, models: &[String], elapsed: Duration, process_ids: &ProcessIds) {
        self.terminal.print(match self.terminal.format {
            PrintFormat::Json => self.json(url, models, process_ids),
            PrintFormat::Human => self.text(url, models, elapsed),
        });
    }

    fn json(&self, url: &str, models: &[String], ids: &ProcessIds) -> String {
        let mut pids = json!({
            "holobiont": std::process::id(), "gateway": ids.gateway, "holobiont-trainer": ids.trainer,
            "lora-worker": ids.workers,
        });
        ids.executors.iter().for_each(|(role, id)| pids[role.to_string()] = json!(id));
        let adapter_root = self.adapter_root.to_string_lossy();
        json!({"url": url, "models": models, "adapter_root": adapter_root, "pids": pids, "stop": self.stop_command})
            .to_string()
    }

    fn text(&self, url: &str, models: &[String], elapsed: Duration) -> String {
        let ink = self.terminal.ink();
        // An adapter makes the better example because it shows that `model` selects it.
        let model = models.get(1).or(models.first()).map_or("", String::as_str);
        let title = ink.bold("Holobiont is up");
        let stop = match self.place {
            ForegroundMode::Front => "Ctrl-C stops it".to_owned(),
            ForegroundMode::Behind => format!("stop it: {}", self.stop_command),
        };
        let time = ink.dim(&format!("after {:.1} s; {stop}", elapsed.as_secs_f64()));
        let (key_header, key) = match self.keys {
            Keys::None => ("", "api_key=\"none\""),
            Keys::Needed => (
                " \\\n    -H \"Authorization: Bearer $HOLOBIONT_API_KEY\"",
                "api_key=os.environ[\"HOLOBIONT_API_KEY\"]",
            ),
        };
        let import = if self.keys == Keys::Needed { "import os\n  from" } else { "from" };
        format!(
            "{title} {time}

  address  {url}
  models   {models}
  adapters {adapters}
  workers  {workers}
  trainers {trainers}

{ask}
  curl -N {url}/v1/chat/completions{key_header} \\
    -H 'Content-Type: application/json' \\
    -d '{{\"model\": \"{model}\", \"stream\": true, \"messages\": [{{\"role\": \"user\", \"content\": \"What is the sea?\"}}]}}'

{python}
  {import} openai import OpenAI
  client = OpenAI(base_url=\"{url}/v1\", {key})
  messages = [{{\"role\": \"user\", \"content\": \"What is the sea?\"}}]
  answer = client.chat.completions.create(model=\"{model}\", messages=messages)
  print(answer.choices[0].message.content)
",
            models = models.join("  "),
            adapters = self.adapter_root.display(),
            workers = self.workers(),
            trainers = self.trainers(),
            ask = ink.dim("# ask it"),
            python = ink.dim("# or from Python: pip install openai"),
        )
    }

    fn workers(&self) -> String {
        let cores: Vec<_> = self.worker_cores.iter().map(u32::to_string).collect();
        match cores.len() {
            0 => "none".into(),
            1 => format!("1, on core {}", cores.join(" ")),
            count => format!("{count}, on cores {}", cores.join(" ")),
        }
    }

    fn trainers(&self) -> String {
        match self.max_trainers {
            0 => "none".into(),
            count => format!("{count} at most"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{commands::up::process::Instance, terminal::Verbosity};

    fn greeting(keys: Keys) -> StartupBanner {
        let terminal = Terminal::new(PrintFormat::Human, Verbosity::Normal);
        let expected_models = vec!["base".into()];
        let (place, stop_command) = (ForegroundMode::Front, "holobiont down --state /s".into());
        StartupBanner {
            expected_models,
            adapter_root: "/srv/adapters".into(),
            worker_cores: vec![6, 7],
            max_trainers: 4,
            keys,
            place,
            stop_command,
            terminal,
        }
    }

    #[test]
    fn the_greeting_shows_address_models_and_both_examples() {
        let models = ["base".to_owned(), "pirate".to_owned()];
        let text = greeting(Keys::None).text("http://127.0.0.1:9", &models, Duration::from_millis(1500));
        for part in [
            "http://127.0.0.1:9/v1/chat/completions",
            "base  pirate",
            "adapters /srv/adapters",
            "2, on cores 6 7",
            "trainers 4 at most",
            "\"model\": \"pirate\"",
            "OpenAI(",
            "1.5 s",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(!text.contains("Authorization"));
    }

    #[test]
    fn the_greeting_says_how_to_stop_it() {
        let text =
            |place| StartupBanner { place, ..greeting(Keys::None) }.text("http://h", &[], Duration::ZERO);
        assert!(text(ForegroundMode::Front).contains("Ctrl-C stops it"));
        assert!(text(ForegroundMode::Behind).contains("stop it: holobiont down --state /s"));
    }

    #[test]
    fn with_keys_the_examples_show_one() {
        let text = greeting(Keys::Needed).text("http://h", &["base".to_owned()], Duration::ZERO);
        assert!(
            text.contains("Bearer $HOLOBIONT_API_KEY") && text.contains("import os\n  from openai"),
            "{text}"
        );
    }

    #[test]
    fn the_json_greeting_names_every_process() {
        let ids = ProcessIds {
            executors: vec![(ProcessRole::Executor(Instance::default()), Some(7))],
            gateway: None,
            trainer: Some(5),
            workers: vec![8, 9],
        };
        let text = greeting(Keys::None).json("http://h", &["base".to_owned()], &ids);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            ["base-executor", "gateway", "holobiont-trainer", "lora-worker"].map(|name| &value["pids"][name]),
            [&json!(7), &json!(null), &json!(5), &json!([8, 9])]
        );
        assert_eq!((&value["models"][0], &value["adapter_root"]), (&json!("base"), &json!("/srv/adapters")));
    }
}
