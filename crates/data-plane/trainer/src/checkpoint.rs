//! Checkpoints: adapter, optimizer state and step number in one file, which is replaced atomically.
//!
//! Random numbers and the order of examples depend only on seed and step, so the file does not hold them. A
//! resumed job ends with the same bits as an uninterrupted one.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
};

use model::adapter::MethodWeights;
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};

use crate::{
    optimizer::OptimizerState,
    peft::{METADATA, NamedTensor, SaveDtype, serialize, sync, write_file},
};

pub const FILE: &str = control_protocol::training::CHECKPOINT_FILE;

/// Maximum size of a file that is read; a checkpoint has three or four values per parameter.
const MAX_BYTES: u64 = 16 << 30;

/// Data of a job that must not change when it resumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointOrigin {
    /// The [`JobPlan`](crate::plan::JobPlan) in JSON.
    pub plan: String,
    /// Hash of the training data.
    pub data: String,
    /// Content hash of the base.
    pub base: String,
}

/// The saved state of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    pub origin: CheckpointOrigin,
    pub method: MethodWeights,
    pub state: OptimizerState,
    /// Gradients accumulated for the next step, per tensor; `None` for a job, which saves between steps.
    pub gradients: Option<Vec<Vec<f32>>>,
    /// The adapter with the lowest held-out loss, if the job keeps it.
    pub best: Option<BestAdapter>,
}

/// The adapter of the step with the lowest held-out loss so far.
#[derive(Debug, Clone, PartialEq)]
pub struct BestAdapter {
    /// Number of steps that the adapter has learned.
    pub step: u64,
    pub loss: f64,
    /// Number of evaluations after that of `step`.
    pub evaluations_since: u64,
    pub method: MethodWeights,
}

impl BestAdapter {
    /// Returns the better of `earlier` and of the adapter `method` with the held-out loss `loss`.
    #[must_use]
    pub fn after(earlier: Option<Self>, step: u64, loss: f64, method: &MethodWeights) -> Self {
        match earlier {
            Some(best) if best.loss <= loss => {
                let is_new = u64::from(step > best.step);
                Self { evaluations_since: best.evaluations_since + is_new, ..best }
            }
            _ => Self { step, loss, evaluations_since: 0, method: method.clone() },
        }
    }
}

/// Error of writing or reading a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{} cannot be {done}", path.display())]
    Io {
        path: PathBuf,
        /// Failed operation: `written` or `read`.
        done: &'static str,
        source: io::Error,
    },
    /// The checkpoint belongs to another job.
    #[error("{} belongs to a job with a different {what}; resume with the original {what}, or remove \
             --resume", path.display())]
    Other {
        path: PathBuf,
        /// Part of the origin that differs.
        what: &'static str,
    },
    /// Another job uses the directory.
    #[error("{} is in use by another trainer; wait until that trainer ends, or name another \
             directory", .0.display())]
    InUse(PathBuf),
    /// The file is not a valid checkpoint.
    #[error("{} is not a valid checkpoint: {why}; remove --resume to start over", path.display())]
    Broken { path: PathBuf, why: String },
}

/// Lock of a checkpoint directory that excludes other jobs until it is dropped.
#[derive(Debug)]
pub struct CheckpointLock(#[expect(dead_code, reason = "held, not read")] File);

impl CheckpointLock {
    /// Locks the directory `path`, and creates it if it is missing.
    ///
    /// # Errors
    /// Fails if another job holds the lock, or the directory cannot be created.
    pub fn new(path: &Path) -> Result<Self, CheckpointError> {
        let to = path.join("lock");
        let failed = |source| CheckpointError::Io { path: to.clone(), done: "written", source };
        fs::create_dir_all(path).map_err(failed)?;
        let file = File::create(&to).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(CheckpointError::InUse(path.to_owned())),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct CheckpointHeader {
    version: u32,
    step: u64,
    origin: CheckpointOrigin,
    /// Description of the best adapter, whose tensors are in the file too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<BestHeader>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct BestHeader {
    step: u64,
    loss: f64,
    evaluations_since: u64,
}

const VERSION: u32 = 1;

impl Checkpoint {
    /// Writes the checkpoint to the directory `path`, in place of an older one, and syncs it to disk.
    ///
    /// # Errors
    /// Fails if the checkpoint cannot be written; an older checkpoint is kept.
    pub fn write(&self, path: &Path) -> Result<(), CheckpointError> {
        let to = path.join(FILE);
        let failed = |source| CheckpointError::Io { path: to.clone(), done: "written", source };
        let mut tensors = Vec::new();
        let mut push = |name: &str, number: usize, values| {
            let shape = vec![<[f32]>::len(values)];
            tensors.push(NamedTensor { name: format!("{name}.{number}"), shape, values });
        };
        for (number, values) in self.method.tensors().into_iter().enumerate() {
            push("parameter", number, values);
        }
        for (number, moments) in self.state.moments.iter().enumerate() {
            push("exp_avg", number, &moments.exp_avg);
            push("exp_avg_sq", number, &moments.exp_avg_sq);
        }
        for (number, values) in self.gradients.iter().flatten().enumerate() {
            push("gradient", number, values);
        }
        for (number, values) in self.best.iter().flat_map(|best| best.method.tensors()).enumerate() {
            push("best", number, values);
        }
        let words = self.header();
        let words = serde_json::to_string(&words).map_err(|error| failed(error.into()))?;
        let bytes = serialize(&tensors, SaveDtype::F32, &[], Some(words))
            .map_err(|error| failed(io::Error::other(error)))?;
        let beside = path.join(format!("{FILE}.partial"));
        fs::create_dir_all(path)
            .and_then(|()| write_file(&beside, &bytes))
            .and_then(|()| fs::rename(&beside, &to))
            .and_then(|()| sync(path))
            .map_err(|error| {
                // On a full disk this file would take the space that the next checkpoint needs.
                let _ = fs::remove_file(&beside);
                failed(error)
            })
    }

    fn header(&self) -> CheckpointHeader {
        let best = self.best.as_ref().map(|best| BestHeader {
            step: best.step,
            loss: best.loss,
            evaluations_since: best.evaluations_since,
        });
        CheckpointHeader { version: VERSION, step: self.state.step, origin: self.origin.clone(), best }
    }

    /// Reads the origin of the checkpoint in the directory `path`; `None` if there is no checkpoint.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not valid.
    pub fn origin(path: &Path) -> Result<Option<CheckpointOrigin>, CheckpointError> {
        let from = path.join(FILE);
        let broken = |why: String| CheckpointError::Broken { path: from.clone(), why };
        bytes(&from)?.map(|bytes| words(&bytes).map(|words| words.origin).map_err(broken)).transpose()
    }

    /// Reads the checkpoint in the directory `path` for an adapter shaped as `start`; `None` if missing.
    ///
    /// # Errors
    /// Fails if the checkpoint has another origin, cannot be read or is not valid.
    pub fn read(
        path: &Path,
        origin: &CheckpointOrigin,
        start: &MethodWeights,
    ) -> Result<Option<Self>, CheckpointError> {
        let from = path.join(FILE);
        let broken = |why: String| CheckpointError::Broken { path: from.clone(), why };
        let Some(bytes) = bytes(&from)? else { return Ok(None) };
        let words = words(&bytes).map_err(&broken)?;
        if let Some(what) = words.origin.differs(origin) {
            return Err(CheckpointError::Other { path: from, what });
        }
        let file = SafeTensors::deserialize(&bytes).map_err(|error| broken(error.to_string()))?;
        let mut method = start.clone();
        let lengths: Vec<usize> = method.tensors().into_iter().map(<[f32]>::len).collect();
        let mut state = OptimizerState::new(&lengths);
        state.step = words.step;
        let read = |name: &str, number: usize, to: &mut [f32]| fill(&file, &format!("{name}.{number}"), to);
        for (number, (values, moments)) in
            method.tensors_mut().into_iter().zip(&mut state.moments).enumerate()
        {
            read("parameter", number, values).map_err(&broken)?;
            read("exp_avg", number, &mut moments.exp_avg).map_err(&broken)?;
            read("exp_avg_sq", number, &mut moments.exp_avg_sq).map_err(&broken)?;
        }
        let mut gradients = file
            .tensor("gradient.0")
            .is_ok()
            .then(|| lengths.iter().map(|&length| vec![0.0; length]).collect::<Vec<_>>());
        for (number, values) in gradients.iter_mut().flatten().enumerate() {
            read("gradient", number, values).map_err(&broken)?;
        }
        let best = words.best.map(|header| best(header, &file, start)).transpose().map_err(&broken)?;
        Ok(Some(Self { origin: words.origin, method, state, gradients, best }))
    }
}

impl CheckpointOrigin {
    fn differs(&self, other: &Self) -> Option<&'static str> {
        let parts = [
            ("base model", &self.base, &other.base),
            ("data", &self.data, &other.data),
            ("plan", &self.plan, &other.plan),
        ];
        parts.into_iter().find(|(_, a, b)| a != b).map(|(what, _, _)| what)
    }
}

fn best(header: BestHeader, file: &SafeTensors<'_>, start: &MethodWeights) -> Result<BestAdapter, String> {
    let BestHeader { step, loss, evaluations_since } = header;
    let mut method = start.clone();
    for (number, values) in method.tensors_mut().into_iter().enumerate() {
        fill(file, &format!("best.{number}"), values)?;
    }
    Ok(BestAdapter { step, loss, evaluations_since, method })
}

/// Reads the file, if it exists.
fn bytes(from: &Path) -> Result<Option<Vec<u8>>, CheckpointError> {
    let failed = |source| CheckpointError::Io { path: from.to_owned(), done: "read", source };
    match fs::metadata(from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
        Ok(found) if found.len() > MAX_BYTES => {
            Err(CheckpointError::Broken { path: from.to_owned(), why: "it is too large".to_owned() })
        }
        Ok(_) => fs::read(from).map(Some).map_err(failed),
    }
}

fn words(bytes: &[u8]) -> Result<CheckpointHeader, String> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
    let words = metadata
        .metadata()
        .as_ref()
        .and_then(|words| words.get(METADATA))
        .ok_or("it has no description of a job")?;
    let words: CheckpointHeader = serde_json::from_str(words).map_err(|error| error.to_string())?;
    if words.version == VERSION { Ok(words) } else { Err(format!("its version is {}", words.version)) }
}

fn fill(file: &SafeTensors<'_>, name: &str, to: &mut [f32]) -> Result<(), String> {
    let tensor = file.tensor(name).map_err(|error| format!("{name}: {error}"))?;
    let values = tensor.data().as_chunks::<4>().0;
    if tensor.dtype() != safetensors::Dtype::F32 || values.len() != to.len() {
        return Err(format!("the tensor {name} has the wrong shape or data type"));
    }
    to.iter_mut().zip(values).for_each(|(to, bytes)| *to = f32::from_le_bytes(*bytes));
    Ok(())
}
