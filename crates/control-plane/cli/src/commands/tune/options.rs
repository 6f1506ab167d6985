//! Training options of `tune`, which the trainer takes under the same names.

use std::{ffi::OsString, io, path::PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Method of the adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum AdapterMethod {
    /// Linear layers, by low-rank deltas
    Lora,
    /// Outputs of linear layers, by a factor each
    Ia3,
    /// Keys and values before the first token
    Prefix,
}

/// Schedule of the learning rate after the warmup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Schedule {
    /// As it is
    Constant,
    /// Down to nothing, by the same amount each step
    Linear,
    /// Down to nothing, along a half wave
    Cosine,
}

/// Precision of the base's layers in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum TrainPrecision {
    /// As requests get them
    Serving,
    /// As exactly as the weights allow
    Exact,
}

/// Number format in which an adapter is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Dtype {
    /// 32 bits: as it was trained
    F32,
    /// 16 bits, of which most are digits
    F16,
    /// 16 bits that reach as far as 32
    Bf16,
}

/// Options of the trainer; the trainer chooses the value of each missing option.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct TrainingArguments {
    /// Examples to measure the loss on, which are not trained on
    #[arg(long, value_name = "FILE", conflicts_with = "held_out")]
    validation: Option<PathBuf>,
    /// Share of the examples to hold out for the same, in percent
    #[arg(long, value_name = "PERCENT")]
    held_out: Option<u8>,
    /// Goes on from this PEFT adapter
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Trains a draft: the base's first blocks, with an adapter of their own, learn to guess what the model
    /// says
    #[arg(long, conflicts_with_all = ["from", "validation"])]
    draft: bool,
    /// Blocks that the draft has
    #[arg(long, value_name = "N", requires = "draft")]
    draft_layers: Option<u32>,
    /// Tokens that the draft may guess; 0 for all
    #[arg(long, value_name = "N", requires = "draft")]
    draft_shortlist: Option<u32>,
    /// Method of the adapter, which decides what changes in the base
    #[arg(long, value_enum, value_name = "METHOD")]
    method: Option<AdapterMethod>,
    /// Rank of the deltas
    #[arg(long, value_name = "N")]
    rank: Option<u32>,
    /// Deltas are scaled by this over the rank
    #[arg(long, value_name = "X", value_parser = finite)]
    alpha: Option<f64>,
    /// Deltas are scaled by alpha over the root of the rank
    #[arg(long)]
    rslora: bool,
    /// Share of what the adapter is given that is dropped while it learns
    #[arg(long, value_name = "SHARE", value_parser = finite)]
    dropout: Option<f64>,
    /// Linear layers to change, as q_proj,v_proj
    #[arg(long, value_name = "LIST")]
    targets: Option<String>,
    /// Tokens of a prefix
    #[arg(long, value_name = "N")]
    virtual_tokens: Option<u32>,
    /// Largest learning rate
    #[arg(long, value_name = "X", value_parser = finite)]
    learning_rate: Option<f64>,
    /// How the learning rate goes on after its warmup
    #[arg(long, value_enum, value_name = "SCHEDULE")]
    schedule: Option<Schedule>,
    /// Steps in which the learning rate rises
    #[arg(long, value_name = "N")]
    warmup_steps: Option<u64>,
    /// How often every example is seen
    #[arg(long, value_name = "N")]
    epochs: Option<u64>,
    /// Ends after so many steps
    #[arg(long, value_name = "N")]
    max_steps: Option<u64>,
    /// Examples of a step
    #[arg(long, value_name = "N")]
    batch_size: Option<u32>,
    /// Longest example, in tokens
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Weight decay of AdamW
    #[arg(long, value_name = "X", value_parser = finite)]
    weight_decay: Option<f64>,
    /// Gradients longer than this are shortened to it
    #[arg(long, value_name = "X", value_parser = finite)]
    max_grad_norm: Option<f64>,
    /// How closely preferences (DPO) keep to the base
    #[arg(long, value_name = "X", value_parser = finite)]
    beta: Option<f64>,
    /// Random seed; the same seed and data give the same adapter
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Steps from one checkpoint to the next
    #[arg(long, value_name = "N")]
    checkpoint_steps: Option<u64>,
    /// With what numbers the base's layers are computed
    #[arg(long, value_enum, value_name = "PRECISION")]
    precision: Option<TrainPrecision>,
    /// With what numbers the adapter is stored
    #[arg(long, value_enum, value_name = "DTYPE")]
    save_dtype: Option<Dtype>,
    /// Cores the trainer computes on, as 0-3,8
    #[arg(long, value_name = "LIST")]
    cores: Option<String>,
}

/// Options by name, as a run's record stores them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct TrainingOptions(Map<String, Value>);

impl TrainingArguments {
    /// Returns the given options with canonical paths, or the path that cannot be read and its error.
    pub(super) fn given(mut self) -> Result<TrainingOptions, (PathBuf, io::Error)> {
        for path in [&mut self.validation, &mut self.from].into_iter().flatten() {
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

    /// Returns the random seed; 0 by default.
    pub(super) fn seed(&self) -> u64 {
        self.0.get("seed").and_then(Value::as_u64).unwrap_or_default()
    }

    /// Merges these options over `earlier` ones.
    pub(super) fn over(self, earlier: Self) -> Self {
        let mut options = earlier.0;
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

/// Parses a finite number, because JSON cannot hold others.
fn finite(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if number.is_finite() { Ok(number) } else { Err("it must be finite".into()) }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser};

    use super::*;

    #[derive(Parser)]
    struct TrainingCommandLine {
        #[command(flatten)]
        training: TrainingArguments,
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
        let line =
            ["--rank=4", "--rslora", "--learning-rate", "2e-4", "--method", "lora", "--targets", "q_proj"];
        let expected = "--method lora --rank 4 --rslora --targets q_proj --learning-rate 0.0002";
        assert_eq!(text(&options(&line)), expected);
        // The trainer takes an integer.
        assert_eq!(text(&options(&["--held-out", "5"])), "--held-out 5");
    }

    #[test]
    fn every_option_is_kept_under_the_name_it_is_given_by() {
        let command = TrainingCommandLine::command();
        let known: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        let Value::Object(kept) = serde_json::to_value(TrainingArguments::default()).unwrap() else {
            panic!()
        };
        assert_eq!(kept.keys().map(String::as_str).collect::<Vec<_>>(), known);
    }

    #[test]
    fn what_is_given_anew_wins_over_what_was_given_before() {
        let all = options(&["--epochs", "5"]).over(options(&["--rank", "4", "--epochs", "1"]));
        assert_eq!(text(&all), "--rank 4 --epochs 5");
    }

    #[test]
    fn what_is_no_number_and_what_is_not_there_is_refused() {
        for wrong in [["--alpha", "nan"], ["--rank", "-1"], ["--schedule", "square"]] {
            assert!(TrainingCommandLine::try_parse_from(["tune"].iter().chain(&wrong)).is_err(), "{wrong:?}");
        }
        let training = TrainingCommandLine::parse_from(["tune", "--from", "/nowhere"]).training;
        assert_eq!(training.given().unwrap_err().0, PathBuf::from("/nowhere"));
    }
}
