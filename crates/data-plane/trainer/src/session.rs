//! One adapter, trained command by command.
//!
//! The verbs are those of Tinker's API: accumulate gradients, make a step, save or export the adapter. HTTP
//! is served elsewhere.

pub mod commands;

use std::{error::Error, path::Path};

use kernels::lora::LoraPrecision;
use model::{adapter::MethodWeights, backward::TrainError, shape::config::ModelConfig};

use control_protocol::training::session::{
    Adam, CommandDone, CommandRefusal, CommandReply, ExportedAdapter, Lora, TrainingCommand,
};

use crate::{
    adapter::{AdapterSpec, NoModule},
    checkpoint::{Checkpoint, CheckpointOrigin},
    loss::{Loss, LossMetrics},
    optimizer::{Hyperparameters, OptimizerState},
    peft::{self, SaveDtype},
    step::{
        Direction, SequenceSample, TrainState, TrainStepError,
        microbatch_pool::{BorrowedBase, MicrobatchPool},
    },
};

const MAX_RANK: usize = 256;

/// Result of a command that succeeded.
#[derive(Debug, Default)]
struct CommandOutcome {
    metrics: LossMetrics,
    /// Kind and size of a new or loaded adapter.
    shape: Option<AdapterSpec>,
    /// Log-probabilities of the targets.
    logprobs: Vec<f32>,
    /// Configuration and weight file of an exported adapter.
    files: Option<(String, Vec<u8>)>,
}

impl CommandOutcome {
    /// Returns the reply and the bytes after its line.
    fn reply(self) -> (CommandDone, Vec<u8>) {
        let numbers = self.logprobs.len();
        let metrics = self.metrics.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let lora = self.shape.as_ref().and_then(lora);
        let Some((config, weights)) = self.files else {
            let payload = self.logprobs.into_iter().flat_map(f32::to_le_bytes).collect();
            return (CommandDone { numbers, metrics, lora, adapter: None }, payload);
        };
        let adapter = Some(ExportedAdapter { config, weight_bytes: weights.len() as u64 });
        (CommandDone { numbers, metrics, lora, adapter }, weights)
    }

    fn begun(shape: AdapterSpec) -> Self {
        Self { shape: Some(shape), ..Self::default() }
    }
}

/// Attributes a failed step to the server if the base failed, else to the user.
fn refusal<E: Error + 'static>(error: &TrainStepError<E>) -> CommandRefusal {
    match error {
        TrainStepError::Train(TrainError::Base(_)) => CommandRefusal::server(error.to_string()),
        _ => CommandRefusal::user(error.to_string()),
    }
}

/// Whether a saved state includes the accumulated gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GradientRetention {
    Keep,
    Forget,
}

#[derive(Debug)]
enum SessionStage<B> {
    /// No adapter exists yet.
    Waiting(Box<MicrobatchPool<B>>),
    /// An adapter is in training.
    Learning(Box<TrainState<B>>, AdapterSpec),
    /// Creating the adapter failed, and the session cannot be used any more.
    Broken,
}

/// A trainer that executes commands.
#[derive(Debug)]
pub struct TrainerSession<B> {
    stage: SessionStage<B>,
    precision: LoraPrecision,
    base: String,
}

impl<B: BorrowedBase> TrainerSession<B> {
    /// Makes a session on the base with the content hash `base`.
    pub fn new(lanes: MicrobatchPool<B>, precision: LoraPrecision, base: String) -> Self {
        Self { stage: SessionStage::Waiting(Box::new(lanes)), precision, base }
    }

    /// Executes a command with its `numbers`; returns the reply and the bytes after its line.
    pub fn carry_out(&mut self, order: &TrainingCommand, numbers: &[[u8; 4]]) -> (CommandReply, Vec<u8>) {
        match self.try_to(order, numbers) {
            Ok(outcome) => {
                let (done, payload) = outcome.reply();
                (CommandReply::Done(done), payload)
            }
            Err(refusal) => (CommandReply::Refused(refusal), Vec::new()),
        }
    }

    fn try_to(
        &mut self,
        order: &TrainingCommand,
        numbers: &[[u8; 4]],
    ) -> Result<CommandOutcome, CommandRefusal> {
        let nothing = |()| CommandOutcome::default();
        match order {
            TrainingCommand::Create { lora, seed } => {
                let shape = shape(lora)?;
                self.create(&shape, *seed)?;
                Ok(CommandOutcome::begun(shape))
            }
            TrainingCommand::Load { directory, optimizer } => {
                Ok(CommandOutcome::begun(self.load(directory, *optimizer)?))
            }
            TrainingCommand::ForwardBackward { loss, options, forward_only, lengths, inputs } => {
                let loss =
                    Loss::named(loss, options).map_err(|error| CommandRefusal::user(error.to_string()))?;
                let direction = if *forward_only { Direction::Forward } else { Direction::Backward };
                let learning = self.learning()?;
                let data = data(loss, lengths, inputs, numbers)?;
                check(&data, &learning.model().config)?;
                let gathered = learning.gather(&data, loss, direction).map_err(|error| refusal(&error))?;
                let (metrics, logprobs) = (gathered.metrics, gathered.logprobs);
                Ok(CommandOutcome { metrics, logprobs, ..CommandOutcome::default() })
            }
            TrainingCommand::OptimStep(adam) => {
                check_step(adam)?;
                let &Adam { learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm } = adam;
                let hyper = Hyperparameters { learning_rate, beta1, beta2, eps, weight_decay };
                let max_norm = (grad_clip_norm > 0.0).then_some(grad_clip_norm);
                let norm =
                    self.learning()?.step_gathered(&hyper, max_norm).map_err(|error| refusal(&error))?;
                let metrics = LossMetrics::from([("grad_norm:mean", norm)]);
                Ok(CommandOutcome { metrics, ..CommandOutcome::default() })
            }
            TrainingCommand::SaveState { directory } => {
                self.save_state(directory, GradientRetention::Forget).map(nothing)
            }
            TrainingCommand::Suspend { directory } => {
                self.save_state(directory, GradientRetention::Keep).map(nothing)
            }
            TrainingCommand::ExportWeights {} => {
                Ok(CommandOutcome { files: Some(self.export()?), ..CommandOutcome::default() })
            }
        }
    }

    fn learning(&mut self) -> Result<&mut TrainState<B>, CommandRefusal> {
        match &mut self.stage {
            SessionStage::Learning(learning, _) => Ok(learning),
            SessionStage::Waiting(_) | SessionStage::Broken => {
                Err(CommandRefusal::user("there is no adapter yet: create one, or load one"))
            }
        }
    }

    fn create(&mut self, shape: &AdapterSpec, seed: u64) -> Result<(), CommandRefusal> {
        let SessionStage::Waiting(lanes) = &self.stage else {
            return Err(CommandRefusal::user("there is an adapter already: a session has one"));
        };
        let config = &lanes.model().config;
        let shape = shape.clone().on(config);
        check_shape(&shape)?;
        let method = shape.start(config, seed);
        self.begin(method, shape)
    }

    fn begin(&mut self, method: MethodWeights, shape: AdapterSpec) -> Result<(), CommandRefusal> {
        match std::mem::replace(&mut self.stage, SessionStage::Broken) {
            SessionStage::Waiting(lanes) => {
                let learning =
                    TrainState::new(*lanes, self.precision, method).map_err(|error| refusal(&error))?;
                self.stage = SessionStage::Learning(Box::new(learning), shape);
                Ok(())
            }
            other => {
                self.stage = other;
                Err(CommandRefusal::user("there is an adapter already: a session has one"))
            }
        }
    }

    fn load(&mut self, directory: &Path, optimizer: bool) -> Result<AdapterSpec, CommandRefusal> {
        let refused = |why: String| CommandRefusal::user(format!("cannot load the state: {why}"));
        let (found, checkpoint) = self.read(directory).map_err(refused)?;
        let Checkpoint { method, state, gradients, .. } = checkpoint;
        match &self.stage {
            SessionStage::Learning(_, shape) if *shape != found => {
                return Err(refused(
                    "its rank or layers differ from those of the session's adapter".to_owned(),
                ));
            }
            SessionStage::Learning(..) => {}
            SessionStage::Waiting(_) | SessionStage::Broken => self.begin(method.clone(), found.clone())?,
        }
        let learning = self.learning()?;
        learning.restore(method, if optimizer { Some(state) } else { None });
        if let Some(sums) = gradients {
            learning.set_gathered(&sums);
        }
        Ok(found)
    }

    fn read(&self, directory: &Path) -> Result<(AdapterSpec, Checkpoint), String> {
        let config = match &self.stage {
            SessionStage::Waiting(lanes) => &lanes.model().config,
            SessionStage::Learning(learning, _) => &learning.model().config,
            SessionStage::Broken => return Err("this session has ended".to_owned()),
        };
        let gone = || "it no longer exists".to_owned();
        let origin = Checkpoint::origin(directory).map_err(|error| error.to_string())?.ok_or_else(gone)?;
        if origin.base != self.base {
            return Err("it was trained on another base model".to_owned());
        }
        let shape: AdapterSpec = serde_json::from_str(&origin.plan).map_err(|error| error.to_string())?;
        check_shape(&shape).map_err(|refusal| refusal.message)?;
        let start = shape.start(config, 0);
        let read = Checkpoint::read(directory, &origin, &start).map_err(|error| error.to_string())?;
        Ok((shape, read.ok_or_else(gone)?))
    }

    fn save_state(&mut self, directory: &Path, gathered: GradientRetention) -> Result<(), CommandRefusal> {
        let SessionStage::Learning(learning, shape) = &self.stage else {
            return Err(CommandRefusal::user("there is no adapter yet: create one, or load one"));
        };
        let plan = serde_json::to_string(shape).map_err(|error| CommandRefusal::server(error.to_string()))?;
        let origin = CheckpointOrigin { plan, data: String::new(), base: self.base.clone() };
        let (method, state) = (learning.method.clone(), learning.state.clone());
        let sums = || learning.gathered().into_iter().map(<[f32]>::to_vec).collect();
        let gradients = (gathered == GradientRetention::Keep).then(sums);
        Checkpoint { origin, method, state, gradients, best: None }
            .write(directory)
            .map_err(|error| CommandRefusal::server(format!("cannot save the state: {error}")))
    }

    /// Returns configuration and weight file of the adapter, the bytes that [`peft::write`] writes.
    fn export(&mut self) -> Result<(String, Vec<u8>), CommandRefusal> {
        let SessionStage::Learning(learning, shape) = &self.stage else {
            return Err(CommandRefusal::user("there is no adapter yet: create one, or load one"));
        };
        let config = &learning.model().config;
        let failed = |why: String| CommandRefusal::server(format!("cannot export the adapter: {why}"));
        let options = String::from_utf8(peft::options(shape, 0.0, config));
        let options = options.map_err(|error| failed(error.to_string()))?;
        let weights = peft::weight_file(&learning.method, config, SaveDtype::F32, &[]);
        Ok((options, weights.map_err(|error| failed(error.to_string()))?))
    }
}

impl<B: BorrowedBase> TrainState<B> {
    /// Restores a saved state. Without `state`, the optimizer starts anew. Accumulated gradients are dropped.
    fn restore(&mut self, method: MethodWeights, state: Option<OptimizerState>) {
        let lengths: Vec<usize> = method.tensors().into_iter().map(<[f32]>::len).collect();
        self.method = method;
        self.state = state.unwrap_or_else(|| OptimizerState::new(&lengths));
        self.forget();
    }
}

fn check_shape(shape: &AdapterSpec) -> Result<(), CommandRefusal> {
    match shape {
        AdapterSpec::Lora { rank, .. } if !(1..=MAX_RANK).contains(rank) => {
            Err(CommandRefusal::user(format!("the rank is {rank}; it must be 1 to {MAX_RANK}")))
        }
        AdapterSpec::Lora { targets, .. } if targets.is_empty() => Err(CommandRefusal::user(
            "the adapter has no layers to train; select attention, MLP (not in a mixture of experts) or \
             unembedding",
        )),
        AdapterSpec::Lora { .. } => Ok(()),
        AdapterSpec::Ia3 { .. } | AdapterSpec::Prefix { .. } => {
            Err(CommandRefusal::user("only LoRA can be trained here"))
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the optimizer rounds these too")]
fn check_step(adam: &Adam) -> Result<(), CommandRefusal> {
    let &Adam { learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm } = adam;
    let rules = [
        ("learning_rate", learning_rate.is_finite() && learning_rate >= 0.0, "a number >= 0"),
        ("beta1", (0.0..1.0).contains(&beta1), "at least 0 and below 1"),
        ("beta2", (0.0..1.0).contains(&beta2), "at least 0 and below 1"),
        ("eps", eps.is_finite() && eps as f32 > 0.0, "a number above 0"),
        ("weight_decay", weight_decay.is_finite() && weight_decay >= 0.0, "a number >= 0"),
        (
            "grad_clip_norm",
            grad_clip_norm.is_finite() && grad_clip_norm >= 0.0,
            "a number >= 0; 0 is no limit",
        ),
    ];
    match rules.into_iter().find(|(_, holds, _)| !holds) {
        Some((name, _, rule)) => Err(CommandRefusal::user(format!("{name} must be {rule}"))),
        None => Ok(()),
    }
}

/// Returns the per-token inputs that a loss needs.
fn needed(loss: Loss) -> &'static [&'static str] {
    match loss {
        Loss::CrossEntropy => &["weights"],
        Loss::Policy(_) => &["logprobs", "advantages"],
    }
}

/// Splits `numbers` into sequences: for each its tokens, its targets, and its inputs.
fn data(
    loss: Loss,
    lengths: &[usize],
    inputs: &[String],
    numbers: &[[u8; 4]],
) -> Result<Vec<SequenceSample>, CommandRefusal> {
    let needed = needed(loss);
    if let Some(unknown) = inputs.iter().find(|name| !needed.contains(&name.as_str())) {
        return Err(CommandRefusal::user(format!(
            "this loss does not take '{unknown}' in loss_fn_inputs; remove it, and give target_tokens, {}",
            needed.join(", ")
        )));
    }
    if let Some(missing) = needed.iter().find(|name| !inputs.iter().any(|input| input == *name)) {
        return Err(CommandRefusal::user(format!("this loss needs '{missing}' in loss_fn_inputs")));
    }
    let mut rest = numbers;
    let mut take = |count: usize| {
        let (taken, behind) = rest.split_at(count);
        rest = behind;
        taken
    };
    let integers = |bytes: &[[u8; 4]]| bytes.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let floats = |bytes: &[[u8; 4]]| bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let mut data = Vec::with_capacity(lengths.len());
    for &length in lengths {
        let mut datum = SequenceSample {
            tokens: integers(take(length)),
            targets: integers(take(length)),
            ..SequenceSample::default()
        };
        for input in inputs {
            let values = floats(take(length));
            match input.as_str() {
                "logprobs" => datum.sampling_logprobs = values,
                _ => datum.weights = values,
            }
        }
        data.push(datum);
    }
    Ok(data)
}

fn check(data: &[SequenceSample], config: &ModelConfig) -> Result<(), CommandRefusal> {
    for (number, datum) in data.iter().enumerate() {
        let (length, limit) = (datum.tokens.len(), config.context_length);
        if length == 0 || length > limit {
            return Err(CommandRefusal::user(format!(
                "datum {number} has {length} tokens; the model takes 1 to {limit}"
            )));
        }
        let mut tokens = datum.tokens.iter().chain(&datum.targets);
        if let Some(token) = tokens.find(|&&token| token as usize >= config.vocab_size) {
            let size = config.vocab_size;
            return Err(CommandRefusal::user(format!(
                "datum {number} has the token {token}; the vocabulary has {size}"
            )));
        }
    }
    Ok(())
}

fn shape(lora: &Lora) -> Result<AdapterSpec, CommandRefusal> {
    let targets = lora.targets.iter().map(|name| name.parse());
    let targets =
        targets.collect::<Result<_, NoModule>>().map_err(|error| CommandRefusal::user(error.to_string()))?;
    Ok(AdapterSpec::Lora { rank: lora.rank, alpha: lora.alpha, rslora: false, targets })
}

fn lora(shape: &AdapterSpec) -> Option<Lora> {
    match shape {
        &AdapterSpec::Lora { rank, alpha, ref targets, .. } => {
            Some(Lora { rank, alpha, targets: targets.iter().map(ToString::to_string).collect() })
        }
        AdapterSpec::Ia3 { .. } | AdapterSpec::Prefix { .. } => None,
    }
}
