//! What is kept of files and jobs, as it stands in the database.

use std::collections::BTreeMap;

use control_protocol::training::TrainingPlan;
use serde::{Deserialize, Serialize};

/// A file that somebody sent, or that came of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// `file-` and digits.
    pub id: String,
    /// Whose it is.
    pub tenant: String,
    /// What its sender calls it.
    pub name: String,
    /// What it is for.
    pub purpose: Purpose,
    /// Its length.
    pub bytes: u64,
    /// The BLAKE3 hash of its bytes, in hexadecimal; empty of a file that came before hashes were kept.
    #[serde(default)]
    pub hash: String,
    /// Seconds since 1970.
    pub created_at: u64,
}

/// What is before a file's id in a fleet's bucket.
pub(super) const FILES: &str = "training/files/";
/// What is before a job's id there.
const JOBS: &str = "training/jobs/";

impl FileRecord {
    /// What its bytes are called in a fleet's bucket.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{FILES}{}", self.id)
    }

    /// Its bytes there, as a job calls them `name`.
    #[must_use]
    pub fn object(&self, name: &str) -> ObjectRecord {
        let (bytes, hash) = (self.bytes, self.hash.clone());
        ObjectRecord { name: name.to_owned(), path: self.path(), bytes, hash }
    }
}

/// The file whose bytes are called so in a fleet's bucket, if they are a file's.
#[must_use]
pub fn file_of(path: &str) -> Option<&str> {
    path.strip_prefix(FILES)
}

/// Something in a fleet's bucket that a job needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectRecord {
    /// What it is called within the job's directory.
    pub name: String,
    /// What it is called in the bucket.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// The BLAKE3 hash of its bytes, in hexadecimal.
    pub hash: String,
}

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// To learn from.
    FineTune,
    /// What a job has measured, as CSV.
    FineTuneResults,
}

impl Purpose {
    /// As the API calls it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FineTune => "fine-tune",
            Self::FineTuneResults => "fine-tune-results",
        }
    }
}

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobStatus {
    /// It waits for a trainer.
    Queued,
    /// Its trainer reads the data.
    ValidatingFiles,
    /// Its trainer learns.
    Running,
    /// Its owner wants it to wait; it goes on from its checkpoint.
    Paused,
    /// The adapter is served.
    Succeeded,
    /// There will be no adapter.
    Failed,
    /// Its owner wants none.
    Cancelled,
}

impl JobStatus {
    /// True if nothing will happen any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }

    /// True if it has a trainer, or waits for one.
    #[must_use]
    pub fn is_due(self) -> bool {
        matches!(self, Self::Queued | Self::ValidatingFiles | Self::Running)
    }
}

/// What the losses of a job are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainingMethod {
    /// The log-probabilities of what should be said.
    Supervised,
    /// Which of two answers is the better one.
    Dpo,
}

/// What a caller chose of a job; the rest is left to the trainer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct JobHyperparameters {
    /// How often every example is seen.
    pub n_epochs: Option<u64>,
    /// Examples of a step.
    pub batch_size: Option<u64>,
    /// The usual learning rate is multiplied by it.
    pub learning_rate_multiplier: Option<f64>,
    /// Of preferences.
    pub beta: Option<f64>,
    /// Of LoRA.
    pub rank: Option<u64>,
    /// `lora_alpha`.
    pub alpha: Option<f64>,
    /// Whether alpha is divided by the root of the rank.
    pub use_rslora: bool,
    /// The share of what LoRA is given that is dropped.
    #[serde(default)]
    pub dropout: Option<f64>,
    /// Linear layers that get a part; the usual ones if it is empty.
    pub target_modules: Vec<String>,
    /// Decides order and first numbers.
    pub seed: Option<u64>,
}

/// A job as its caller described it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// The base, or the adapter that is trained further.
    pub model: String,
    /// The file to learn from.
    pub training_file: String,
    /// The file to judge by.
    pub validation_file: Option<String>,
    /// What the adapter will be called, behind the tenant's name.
    pub suffix: Option<String>,
    /// What losses are made of.
    pub method: TrainingMethod,
    /// What is chosen of it.
    pub choices: JobHyperparameters,
    /// The caller's own words.
    pub metadata: BTreeMap<String, String>,
}

/// Where a job has got to, that it can go on from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    /// After this step.
    pub step: u64,
    /// Of this step's batch.
    pub loss: Option<f64>,
    /// Of what is held out, if it was judged there.
    pub held_out_loss: Option<f64>,
    /// Tokens that were learned from until then.
    pub trained_tokens: u64,
    /// Seconds since 1970.
    pub at: u64,
}

/// Why there is no adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// A stable word.
    pub code: String,
    /// For a person.
    pub message: String,
    /// The field of the order that is to blame, if one is.
    pub param: Option<String>,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// `ftjob-` and digits.
    pub id: String,
    /// Whose it is.
    pub tenant: String,
    /// As it was asked for.
    pub order: JobSpec,
    /// What the adapter will be called.
    pub name: String,
    /// The generation that the name stood for when the job was created; nothing else is replaced.
    pub replaces: Option<String>,
    /// How far it is.
    pub status: JobStatus,
    /// Seconds since 1970.
    pub created_at: u64,
    /// When its first trainer began to learn.
    pub started_at: Option<u64>,
    /// When it ended.
    pub finished_at: Option<u64>,
    /// When its trainer thinks it will.
    pub estimated_finish: Option<u64>,
    /// Every choice, once its trainer has made them.
    pub plan: Option<TrainingPlan>,
    /// Steps that were made.
    pub step: u64,
    /// Tokens that were learned from, over all steps.
    pub trained_tokens: u64,
    /// Of the last step's batch.
    pub loss: Option<f64>,
    /// Where it can go on.
    pub mark: Option<CheckpointRecord>,
    /// In a fleet, checkpoints that are there and not yet in the bucket, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_marks: Vec<CheckpointRecord>,
    /// In a fleet, what it needs, by the name it has here: data, checkpoint, the adapter to go on from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<ObjectRecord>,
    /// How often it was paused.
    #[serde(default)]
    pub pauses: u32,
    /// Whether its adapter is being put under its name: nobody can cancel it then.
    #[serde(default)]
    pub is_closing: bool,
    /// What came of it: the content hash of the adapter. Written by the transaction that registers the adapter.
    pub generation: Option<String>,
    /// The file of its losses.
    pub result_file: Option<String>,
    /// Why nothing came of it.
    pub error: Option<Failure>,
}

impl JobRecord {
    /// A job that waits.
    #[must_use]
    pub fn new(id: String, tenant: &str, order: JobSpec, name: String, replaces: Option<String>) -> Self {
        Self {
            id,
            tenant: tenant.to_owned(),
            order,
            name,
            replaces,
            status: JobStatus::Queued,
            created_at: crate::clock::seconds_since_1970(),
            started_at: None,
            finished_at: None,
            estimated_finish: None,
            plan: None,
            step: 0,
            trained_tokens: 0,
            loss: None,
            mark: None,
            pending_marks: Vec::new(),
            objects: Vec::new(),
            pauses: 0,
            is_closing: false,
            generation: None,
            result_file: None,
            error: None,
        }
    }

    /// The id of the file that has what the job has measured.
    #[must_use]
    pub fn results_id(&self) -> String {
        format!("file-{}", self.id.trim_start_matches("ftjob-"))
    }

    /// The row of a job once its adapter of this generation is registered; `None` if `row` is not one of a job that is all but
    /// done.
    #[must_use]
    pub fn with_generation(row: &str, generation: &str) -> Option<String> {
        let mut job: Self = serde_json::from_str(row).ok()?;
        job.generation = Some(generation.to_owned());
        (job.is_closing && job.status.is_due()).then(|| serde_json::to_string(&job).ok()).flatten()
    }

    /// Whether the job's adapter is registered, or is about to be: then the job is not paused or cancelled any more.
    #[must_use]
    pub fn is_all_but_done(&self) -> bool {
        self.is_closing || self.generation.is_some()
    }

    /// What something new of it is called in a fleet's bucket: there is nothing else of that name.
    #[must_use]
    pub fn fresh_path(&self, name: &str) -> String {
        format!("{JOBS}{}/{name}-{:016x}", self.id, crate::random::random_u64())
    }
}

/// What happened to a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Seconds since 1970.
    pub created_at: u64,
    /// `info`, `warn` or `error`.
    pub level: EventLevel,
    /// For a person.
    pub message: String,
    /// Of a step: its figures.
    pub metrics: Option<StepMetrics>,
}

/// How much an event matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventLevel {
    /// It goes as it should.
    Info,
    /// It goes on, but not as it should.
    Warn,
    /// It is the end.
    Error,
}

/// Figures of a step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StepMetrics {
    /// From 1.
    pub step: u64,
    /// Of how many.
    pub total_steps: u64,
    /// Of the step's batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_loss: Option<f64>,
    /// Length of its gradient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Length of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Of what is held out, after the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_loss: Option<f64>,
}

impl EventRecord {
    /// An event without figures, now.
    #[must_use]
    pub fn now(level: EventLevel, message: impl Into<String>) -> Self {
        Self { created_at: crate::clock::seconds_since_1970(), level, message: message.into(), metrics: None }
    }
}
