//! Training options of `tune`, which the trainer takes under the same names.

use std::{ffi::OsString, io, path::PathBuf};

use control_protocol::training::spec::{AdapterType, TrainingSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Options of a run's trainer.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct TrainerOptions {
    #[command(flatten)]
    #[serde(flatten)]
    spec: TrainingSpec,
    /// Cores that the trainer computes on, as 0-3,8
    #[arg(long, value_name = "LIST")]
    cores: Option<String>,
}

/// Options by name, as a run's record stores them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct TrainingOptions(Map<String, Value>);

impl TrainerOptions {
    /// Returns the given options with canonical paths, or the path that cannot be read and its error.
    pub(super) fn given(mut self) -> Result<TrainingOptions, (PathBuf, io::Error)> {
        for path in [&mut self.spec.validation, &mut self.spec.from].into_iter().flatten() {
            *path = path.canonicalize().map_err(|source| (path.clone(), source))?;
        }
        let options = serde_json::to_value(self).unwrap_or_default();
        let given = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        let Value::Object(options) = options else { return Ok(TrainingOptions::default()) };
        Ok(TrainingOptions(options.into_iter().filter(|(_, value)| given(value)).collect()))
    }
}

impl TrainingOptions {
    /// True if the run trains a draft adapter.
    pub(super) fn are_of_draft(&self) -> bool {
        self.0.get("draft").is_some_and(|draft| draft == &Value::Bool(true))
    }

    /// True if the run learns from rewards.
    pub(super) fn are_of_grpo(&self) -> bool {
        self.0.get("method").is_some_and(|method| method == "grpo")
    }

    /// Returns the random seed; 0 by default.
    pub(super) fn seed(&self) -> u64 {
        self.0.get("seed").and_then(Value::as_u64).unwrap_or_default()
    }

    /// Merges these options over `earlier` ones.
    pub(super) fn over(self, earlier: Self) -> Self {
        let mut options = earlier.0;
        // Runs of earlier versions have the kind of adapter under the name `method`.
        let is_type = |value: &Value| AdapterType::deserialize(value).is_ok();
        if options.get("method").is_some_and(is_type)
            && let Some(kind) = options.remove("method")
        {
            options.insert("adapter-type".to_owned(), kind);
        }
        options.extend(self.0);
        Self(options)
    }

    /// Returns the options as command-line arguments of the trainer.
    pub(super) fn arguments(&self) -> impl Iterator<Item = OsString> {
        self.0.iter().flat_map(|(name, value)| {
            let value = match value {
                Value::Bool(_) => None,
                Value::String(text) => Some(text.clone()),
                number => Some(number.to_string()),
            };
            std::iter::once(format!("--{name}")).chain(value).map(OsString::from)
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser};

    use super::*;

    #[derive(Parser)]
    struct TrainingCommandLine {
        #[command(flatten)]
        training: TrainerOptions,
    }

    fn options(line: &[&str]) -> TrainingOptions {
        TrainingCommandLine::try_parse_from([&["tune"], line].concat()).unwrap().training.given().unwrap()
    }

    fn text(options: &TrainingOptions) -> String {
        options.arguments().map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_is_given_is_handed_on_and_nothing_else() {
        assert_eq!(text(&options(&[])), "");
        let line = [
            "--rank=4",
            "--rslora",
            "--learning-rate",
            "2e-4",
            "--adapter-type",
            "lora",
            "--targets",
            "q_proj",
        ];
        let expected = "--adapter-type lora --rank 4 --rslora --targets q_proj --learning-rate 0.0002";
        assert_eq!(text(&options(&line)), expected);
        // The trainer takes an integer.
        assert_eq!(text(&options(&["--held-out", "5"])), "--held-out 5");
    }

    #[test]
    fn every_option_is_kept_under_the_name_it_is_given_by() {
        let command = TrainingCommandLine::command();
        let known: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        let Value::Object(kept) = serde_json::to_value(TrainerOptions::default()).unwrap() else { panic!() };
        assert_eq!(kept.keys().map(String::as_str).collect::<Vec<_>>(), known);
    }

    #[test]
    fn what_is_given_anew_wins_over_what_was_given_before() {
        let all = options(&["--epochs", "5"]).over(options(&["--rank", "4", "--epochs", "1"]));
        assert_eq!(text(&all), "--rank 4 --epochs 5");
        let old: TrainingOptions = serde_json::from_str(r#"{"method": "ia3", "epochs": 1}"#).unwrap();
        assert_eq!(
            text(&options(&["--method", "dpo"]).over(old)),
            "--epochs 1 --adapter-type ia3 --method dpo"
        );
    }

    #[test]
    fn what_is_no_number_and_what_is_not_there_is_refused() {
        for wrong in [["--alpha", "nan"], ["--rank", "-1"], ["--schedule", "square"]] {
            assert!(TrainingCommandLine::try_parse_from(["tune"].iter().chain(&wrong)).is_err(), "{wrong:?}");
        }
        let old =
            TrainingCommandLine::try_parse_from(["tune", "--method", "lora"]).err().unwrap().to_string();
        assert!(old.contains("--adapter-type lora"), "{old}");
        let training = TrainingCommandLine::parse_from(["tune", "--from", "/nowhere"]).training;
        assert_eq!(training.given().unwrap_err().0, PathBuf::from("/nowhere"));
    }
}
