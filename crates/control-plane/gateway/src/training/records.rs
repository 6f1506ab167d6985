//! Records of files and jobs, as the database stores them.

use std::collections::BTreeMap;

use control_protocol::training::TrainingPlan;
use serde::{Deserialize, Serialize};

/// A file that a client uploaded or a job produced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Id: `file-` and digits.
    pub id: String,
    pub tenant: String,
    /// Name that the client gave.
    pub name: String,
    pub purpose: Purpose,
    /// Length of the file.
    pub bytes: u64,
    /// BLAKE3 hash of the content in hexadecimal; empty for files from before hashes were stored.
    #[serde(default)]
    pub hash: String,
    /// Creation time in seconds since 1970.
    pub created_at: u64,
    /// Time of the deletion in seconds since 1970; `None` for a file that is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
}

/// Prefix of file objects in a fleet's bucket.
pub(super) const FILES: &str = "training/files/";
/// Prefix of job objects in a fleet's bucket.
const JOBS: &str = "training/jobs/";

impl FileRecord {
    /// Path of the file in a fleet's bucket.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{FILES}{}", self.id)
    }

    /// Returns the file's object in the bucket, under the name `name` within a job.
    #[must_use]
    pub fn object(&self, name: &str) -> ObjectRecord {
        let (bytes, hash) = (self.bytes, self.hash.clone());
        ObjectRecord { name: name.to_owned(), path: self.path(), bytes, hash }
    }
}

/// Returns the id of the file at `path` in a fleet's bucket, if `path` is a file's.
#[must_use]
pub(crate) fn file_of(path: &str) -> Option<&str> {
    path.strip_prefix(FILES)
}

/// Object in a fleet's bucket that a job needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectRecord {
    /// Name within the job's directory.
    pub name: String,
    /// Path in the bucket.
    pub path: String,
    /// Length of the object.
    pub bytes: u64,
    /// BLAKE3 hash of the content in hexadecimal.
    pub hash: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Training or validation data.
    FineTune,
    /// Metrics of a job, as CSV.
    FineTuneResults,
    /// Lines of a batch.
    Batch,
    /// Results of a batch.
    BatchOutput,
}

impl Purpose {
    /// Name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FineTune => "fine-tune",
            Self::FineTuneResults => "fine-tune-results",
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
        }
    }

    /// Returns the purpose of an upload by its name in the API.
    #[must_use]
    pub(crate) fn of_upload(name: &str) -> Option<Self> {
        [Self::FineTune, Self::Batch].into_iter().find(|purpose| purpose.as_str() == name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobStatus {
    /// The job waits for a trainer.
    Queued,
    /// The trainer reads the data.
    ValidatingFiles,
    /// The trainer runs steps.
    Running,
    /// The owner paused the job; it resumes from its checkpoint.
    Paused,
    /// The adapter is served.
    Succeeded,
    /// The job ended without an adapter.
    Failed,
    /// The owner cancelled the job.
    Cancelled,
}

impl JobStatus {
    /// Name in the API.
    #[must_use]
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::ValidatingFiles => "validating_files",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// True if the status cannot change any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }

    /// True if the job has a trainer or waits for one.
    #[must_use]
    pub(crate) fn is_due(self) -> bool {
        matches!(self, Self::Queued | Self::ValidatingFiles | Self::Running)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainingMethod {
    /// Cross-entropy of the target tokens.
    Supervised,
    /// Direct preference optimization over pairs of answers.
    Dpo,
    /// Kahneman-Tversky optimization over single rated answers.
    Kto,
}

impl TrainingMethod {
    /// Returns the name of the method in requests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Supervised => "supervised",
            Self::Dpo => "dpo",
            Self::Kto => "kto",
        }
    }
}

/// Hyperparameters that the caller chose; the trainer chooses the others.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct JobHyperparameters {
    /// Number of passes over the examples.
    pub n_epochs: Option<u64>,
    /// Number of examples per step.
    pub batch_size: Option<u64>,
    /// Factor of the default learning rate.
    pub learning_rate_multiplier: Option<f64>,
    /// Strength `beta` of DPO and KTO.
    pub beta: Option<f64>,
    /// Weight of KTO's good answers.
    #[serde(default)]
    pub desirable_weight: Option<f64>,
    /// Weight of KTO's bad answers.
    #[serde(default)]
    pub undesirable_weight: Option<f64>,
    /// Rank of the LoRA adapter.
    pub rank: Option<u64>,
    /// Scale `lora_alpha` of LoRA.
    pub alpha: Option<f64>,
    /// Whether alpha is divided by the square root of the rank (rsLoRA).
    pub use_rslora: bool,
    /// Dropout probability of LoRA's input.
    #[serde(default)]
    pub dropout: Option<f64>,
    /// Linear layers that get an adapter; the default ones if empty.
    pub target_modules: Vec<String>,
    /// Seed of the example order and the initial weights.
    pub seed: Option<u64>,
}

/// A job as its caller described it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Base, or the adapter that is trained further.
    pub model: String,
    /// Id of the training file.
    pub training_file: String,
    /// Id of the validation file.
    pub validation_file: Option<String>,
    /// Last part of the adapter's name, after the tenant.
    pub suffix: Option<String>,
    pub method: TrainingMethod,
    pub choices: JobHyperparameters,
    /// Free key-value pairs of the caller.
    pub metadata: BTreeMap<String, String>,
}

/// A checkpoint from which a job can resume.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    /// Last step in the checkpoint.
    pub step: u64,
    /// Loss of the step's batch.
    pub loss: Option<f64>,
    /// Loss of the validation data, if it was evaluated at this step.
    pub held_out_loss: Option<f64>,
    /// Tokens trained up to this step.
    pub trained_tokens: u64,
    /// Time of the checkpoint in seconds since 1970.
    pub at: u64,
}

/// Reason why a job has no adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Stable error code for programs.
    pub code: String,
    pub message: String,
    /// Request field that caused the failure, if any.
    pub param: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// Id: `ftjob-` and digits.
    pub id: String,
    pub tenant: String,
    pub order: JobSpec,
    /// Name of the resulting adapter.
    pub name: String,
    /// Adapter version of the name when the job was created; no other version is replaced.
    pub replaces: Option<String>,
    pub status: JobStatus,
    /// Creation time in seconds since 1970.
    pub created_at: u64,
    /// Time when the first trainer began, in seconds since 1970.
    pub started_at: Option<u64>,
    /// Time of the end in seconds since 1970.
    pub finished_at: Option<u64>,
    /// End as the trainer estimates it, in seconds since 1970.
    pub estimated_finish: Option<u64>,
    /// Complete choices of the trainer, once it has reported them.
    pub plan: Option<TrainingPlan>,
    pub step: u64,
    /// Tokens trained over all steps.
    pub trained_tokens: u64,
    /// Loss of the last step's batch.
    pub loss: Option<f64>,
    /// Checkpoint from which the job resumes.
    pub mark: Option<CheckpointRecord>,
    /// In a fleet, checkpoints on this host that are not in the bucket yet, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_marks: Vec<CheckpointRecord>,
    /// In a fleet, the job's inputs by name within its directory: data, checkpoint, the adapter to train
    /// further.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<ObjectRecord>,
    #[serde(default)]
    pub pauses: u32,
    /// Whether the adapter is being registered; the job cannot be cancelled then.
    #[serde(default)]
    pub is_closing: bool,
    /// Adapter version of the result, written by the transaction that registers the adapter.
    pub generation: Option<String>,
    /// Id of the file with the metrics.
    pub result_file: Option<String>,
    pub error: Option<Failure>,
}

impl JobRecord {
    /// Creates the record of a queued job.
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

    /// Id of the file with the job's metrics.
    #[must_use]
    pub(crate) fn results_id(&self) -> String {
        format!("file-{}", self.id.trim_start_matches("ftjob-"))
    }

    /// Returns the row of a job after its adapter version `generation` is registered. Returns `None` if `row`
    /// is not a job whose adapter is being registered.
    #[must_use]
    pub fn with_generation(row: &str, generation: &str) -> Option<String> {
        let mut job: Self = serde_json::from_str(row).ok()?;
        job.generation = Some(generation.to_owned());
        (job.is_closing && job.status.is_due()).then(|| serde_json::to_string(&job).ok()).flatten()
    }

    /// Whether the adapter is registered or being registered; the job cannot be paused or cancelled then.
    #[must_use]
    pub fn is_all_but_done(&self) -> bool {
        self.is_closing || self.generation.is_some()
    }

    /// Returns a new unique path for an object of the job in a fleet's bucket.
    #[must_use]
    pub(crate) fn fresh_path(&self, name: &str) -> String {
        format!("{JOBS}{}/{name}-{:016x}", self.id, crate::random::random_u64())
    }
}

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Time of the event in seconds since 1970.
    pub created_at: u64,
    pub level: EventLevel,
    pub message: String,
    /// Metrics of a step, if the event reports one.
    pub metrics: Option<StepMetrics>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventLevel {
    /// Regular progress of the job.
    Info,
    /// A problem that the job survives.
    Warn,
    /// The failure of the job.
    Error,
}

#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StepMetrics {
    /// Step number, from 1.
    pub step: u64,
    /// Total number of steps.
    pub total_steps: u64,
    /// Loss of the step's batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_loss: Option<f64>,
    /// Norm of the gradient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Loss of the validation data after the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_loss: Option<f64>,
}

impl EventRecord {
    /// Creates an event with the current time and without metrics.
    #[must_use]
    pub fn now(level: EventLevel, message: impl Into<String>) -> Self {
        Self { created_at: crate::clock::seconds_since_1970(), level, message: message.into(), metrics: None }
    }
}
