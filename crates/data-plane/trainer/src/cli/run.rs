//! The command `run`: from arguments to an adapter on disk.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use client::cli::{
    remote_base::ConnectedBase,
    terminal::{OutputFormat, Terminal},
};
use control_protocol::training::{ExampleToken, RunResult, TrainingEvent};
use model::{
    adapter::{Adapter, AdapterError, AnyAdapter, MethodWeights},
    shape::config::ModelConfig,
};
use settings::exit::Exit;
use text::tokenizer::{SkipSpecial, Tokenizer};

use super::{
    ProgramExit,
    arguments::RunArguments,
    error::TunerError,
    event_output::{print, tell_faults},
    job_console::JobConsole,
    layers, method,
};
use crate::{
    adapter::AdapterSpec,
    checkpoint::{Checkpoint, CheckpointError, CheckpointLock, CheckpointOrigin},
    data::{self, DataItems, DataKind, DataLimits, Dataset, Encoder, Example},
    draft::{self, DraftSize, DraftTraining},
    grpo::RolloutSampling,
    job::{DatasetSplit, JobEnd, TrainingJob},
    peft,
    plan::{InitialAdapter, JobPlan},
    step::TrainState,
};

/// The adapter with which the job begins.
struct StartingAdapter {
    start: InitialAdapter,
    /// Kind and size of the adapter.
    shape: AdapterSpec,
    method: MethodWeights,
    /// Content of the file `adapter_config.json`.
    options: Vec<u8>,
}

pub(super) fn run(arguments: &RunArguments) -> Result<ProgramExit, TunerError> {
    method::check_asked(arguments)?;
    if arguments.output.exists() {
        let path = arguments.output.display();
        return Err(TunerError::Usage(format!("{path} exists already; choose another --output")));
    }
    let mut console = JobConsole::new(arguments.stdin_use())?;
    let begun = Instant::now();
    let terminal = Terminal { format: OutputFormat::Json, quiet: true };
    let masking = arguments.masking(terminal)?;
    let rented = arguments.rent.rent(&masking, terminal)?;
    let config = rented.base.config().clone();
    let blocks = arguments.blocks(&config);
    let beginning = beginning(arguments, &ModelConfig { layers: blocks, ..config.clone() })?;
    let mut plan = arguments.plan(beginning.start.clone(), &beginning.shape, &config)?;
    let data = read(&arguments.data, &rented, &plan)?;
    let validation = arguments.spec.validation.as_ref().map(std::slice::from_ref);
    let validation = validation.map(|path| read(path, &rented, &plan)).transpose()?;
    let method = method::of_data(arguments, data.kind, validation.as_ref().map(|data| data.kind))?;
    let about_data = AboutData::of(&data, rented.text.tokenizer(), arguments.dry_run);
    let origin_data = hashes(&data, validation.as_ref());
    let course = DatasetSplit::new(data.items, validation.map(|data| data.items), &plan);
    check_split(&course, &plan)?;
    let draft = draft(&plan, &course, &rented)?;
    let sampling = sampling(arguments, &plan, &beginning)?;
    let (_, steps) = course.batches(&plan);
    plan.warmup_steps = arguments.warmup(steps);
    let origin = CheckpointOrigin {
        plan: serde_json::to_string(&plan).unwrap_or_default(),
        data: origin_data,
        base: types::AdapterVersion(rented.session.catalog().base_hash).to_string(),
    };
    let claimed = arguments.checkpoints.as_deref().filter(|_| arguments.trains());
    let _claim = claimed.map(CheckpointLock::new).transpose()?;
    let resumed = resumed(arguments, &origin, &beginning.method)?;
    let (lanes, precision) =
        layers::lanes(arguments.precision(), &arguments.compute, rented, masking, blocks)?;
    let learning = TrainState::new(lanes, precision, beginning.method.clone())?;
    let mut learning = learning.with_dropout(plan.dropout, plan.seed);
    let resumed_step = resumed.as_ref().map(|checkpoint| checkpoint.state.step);
    if let Some(Checkpoint { method, state, best, .. }) = resumed {
        (learning.method, learning.state, learning.best) = (method, state, best);
    }
    let (parameters, vocabulary) = (learning.parameters(), config.vocab_size);
    let sizes = Sizes { method, data: about_data, steps, parameters, resumed_step, vocabulary };
    print(&plan_event(&plan, &beginning.shape, &course, draft.as_ref(), &sizes))?;
    if arguments.dry_run {
        return Ok(ProgramExit::Exit(Exit::Ok));
    }
    let (checkpoints, checkpoint_steps) = (arguments.checkpoints.clone(), arguments.checkpoint_steps());
    let job = TrainingJob { plan, course, draft, sampling, origin, checkpoints, checkpoint_steps };
    if arguments.find_learning_rate {
        let Some(curve) = job.find_learning_rate(&mut learning, &mut console)? else {
            return Ok(ProgramExit::Signal(console.signal()));
        };
        print(&TrainingEvent::LearningRate(curve))?;
        return Ok(ProgramExit::Exit(Exit::Ok));
    }
    match job.run(&mut learning, &mut console)? {
        JobEnd::Stopped { .. } => Ok(ProgramExit::Signal(console.signal())),
        JobEnd::Done { loss, held_out_loss, best_step } => {
            let shortlist = job.draft.as_ref().map_or(&[][..], |draft| &draft.shortlist);
            let generation = written(arguments, &beginning.options, &learning.method, &config, shortlist)?;
            let (steps, seconds) = (learning.state.step, begun.elapsed().as_secs_f64());
            let result = RunResult { steps, loss, held_out_loss, best_step, generation, seconds };
            print(&TrainingEvent::Done(result))?;
            Ok(ProgramExit::Exit(Exit::Ok))
        }
    }
}

/// Writes the adapter, and returns its content hash.
fn written(
    arguments: &RunArguments,
    options: &[u8],
    method: &MethodWeights,
    config: &ModelConfig,
    shortlist: &[u32],
) -> Result<String, TunerError> {
    let dtype = arguments.spec.save_dtype.unwrap_or_default();
    peft::write(&arguments.output, options, method, config, dtype, shortlist)?;
    let written = AnyAdapter::read(&arguments.output, config)?;
    Ok(written.adapter().generation.to_string())
}

fn beginning(arguments: &RunArguments, config: &ModelConfig) -> Result<StartingAdapter, TunerError> {
    let Some(from) = &arguments.spec.from else {
        let asked = arguments.shape()?;
        if let Some(module) = asked.missing_on(config).filter(|_| arguments.spec.targets.is_some()) {
            return Err(TunerError::NoTarget(module));
        }
        let shape = asked.on(config);
        let method = shape.start(config, arguments.seed());
        let options = if arguments.spec.draft { peft::draft_options } else { peft::options };
        let options = options(&shape, arguments.dropout(), config);
        return Ok(StartingAdapter { start: InitialAdapter::New(shape.clone()), shape, method, options });
    };
    let options = fs::read(from.join(peft::CONFIG_FILE)).map_err(|source| TunerError::System {
        what: "cannot read adapter_config.json of the --from adapter, which must be in PEFT's format",
        source,
    })?;
    let adapter = Adapter::read(from, config)?;
    if adapter.method.invocation().is_some() {
        return Err(TunerError::Activated);
    }
    if adapter.changes_experts() {
        return Err(AdapterError::NoExperts { place: "a trainer" }.into());
    }
    if let Some(other) = other_type(&options) {
        return Err(TunerError::OtherType(other));
    }
    let shape = AdapterSpec::like(&adapter.method);
    let start = InitialAdapter::From(adapter.generation.to_string());
    Ok(StartingAdapter { start, shape, method: adapter.method, options })
}

/// Returns the type of an adapter that is not trained as the type that its options name.
fn other_type(options: &[u8]) -> Option<String> {
    let options: serde_json::Value = serde_json::from_slice(options).ok()?;
    let name = options["peft_type"].as_str()?;
    (!["LORA", "IA3", "PREFIX_TUNING"].contains(&name)).then(|| name.to_owned())
}

/// Reads training data, and prints an event for each faulty line.
fn read(paths: &[PathBuf], rented: &ConnectedBase, plan: &JobPlan) -> Result<Dataset, TunerError> {
    // A fixed time makes templates that show a date render the same text in each run.
    let encoder = Encoder::new(rented.text.tokenizer(), rented.text.template(), SystemTime::UNIX_EPOCH);
    let limits = DataLimits { max_tokens: plan.max_tokens, ..DataLimits::default() };
    let read = data::find_files(paths).and_then(|files| match plan.grpo {
        Some(_) => data::rollout_prompts_of_files(&files, &encoder, &limits),
        None => data::read_files(&files, &encoder, &limits),
    });
    if let Err(error) = &read {
        tell_faults(error)?;
    }
    Ok(read?)
}

/// Fails if no examples are left to learn, or none to compare adapters by.
fn check_split(course: &DatasetSplit, plan: &JobPlan) -> Result<(), TunerError> {
    let problem = if course.learned().is_empty() {
        "no examples are left for training; lower --held-out"
    } else if plan.keep_best && course.held_out().is_empty() {
        "--keep-best compares held-out losses, and no examples are held out; add --validation"
    } else {
        return Ok(());
    };
    Err(TunerError::Usage(problem.to_owned()))
}

fn hashes(data: &Dataset, validation: Option<&Dataset>) -> String {
    let of = |data: &Dataset| data.hash.to_hex().to_string();
    validation.map_or_else(|| of(data), |validation| format!("{} {}", of(data), of(validation)))
}

fn resumed(
    arguments: &RunArguments,
    origin: &CheckpointOrigin,
    start: &MethodWeights,
) -> Result<Option<Checkpoint>, CheckpointError> {
    match &arguments.checkpoints {
        Some(directory) if arguments.resume => Checkpoint::read(directory, origin, start),
        _ => Ok(None),
    }
}

/// Returns the draft to train, if the plan has one.
fn draft(
    plan: &JobPlan,
    course: &DatasetSplit,
    rented: &ConnectedBase,
) -> Result<Option<DraftTraining>, TunerError> {
    let refused = |problem: &str| Err(TunerError::Usage(problem.to_owned()));
    match (plan.draft, course.learned()) {
        (Some(DraftSize { layers, shortlist: size }), DataItems::Said(said)) => {
            let vocabulary = rented.base.config().vocab_size;
            let shortlist = draft::shortlist(said, rented.text.tokenizer(), vocabulary, size);
            Ok(Some(DraftTraining { layers, shortlist }))
        }
        (Some(_), _) => refused(
            "a draft adapter needs answers of a model as data; `holobiont tune --draft` collects them",
        ),
        (None, DataItems::Said(_)) => refused("this data trains only draft adapters; add --draft"),
        (None, _) => Ok(None),
    }
}

/// Returns the sampling of answers, if the plan has GRPO.
fn sampling(
    arguments: &RunArguments,
    plan: &JobPlan,
    beginning: &StartingAdapter,
) -> Result<Option<RolloutSampling>, TunerError> {
    let Some(plan) = plan.grpo else { return Ok(None) };
    let directory = arguments.checkpoints.as_deref().map(Path::parent).map(|parent| {
        // Beside the checkpoints, which are read back only from files with their own names.
        parent.unwrap_or(Path::new(".")).join("sampled-adapter")
    });
    let directory = directory.ok_or_else(|| TunerError::Usage("--method grpo needs --checkpoints".into()))?;
    Ok(Some(RolloutSampling { plan, options: beginning.options.clone(), directory }))
}

/// Facts in the plan event that depend on data and checkpoint.
struct Sizes {
    method: &'static str,
    vocabulary: usize,
    data: AboutData,
    steps: u64,
    parameters: usize,
    resumed_step: Option<u64>,
}

/// Facts about the data for the plan event.
struct AboutData {
    kind: DataKind,
    unread_fields: Vec<String>,
    /// The first example, if the plan is all that the command prints.
    sample: Vec<ExampleToken>,
}

impl AboutData {
    fn of(data: &Dataset, tokenizer: &Tokenizer, is_dry_run: bool) -> Self {
        let sample = if is_dry_run { learned_sample(&data.items, tokenizer) } else { Vec::new() };
        Self { kind: data.kind, unread_fields: data.unread.clone(), sample }
    }
}

/// Maximum number of tokens of the example that the plan shows.
const MAX_SAMPLE_TOKENS: usize = 2048;

/// Maximum number of bytes, and so of tokens, of a character in UTF-8.
const MAX_TOKENS_PER_CHARACTER: usize = 4;

/// Returns the tokens of the first example, or of the first pair's better answer, with their weights.
fn learned_sample(items: &DataItems, tokenizer: &Tokenizer) -> Vec<ExampleToken> {
    let example = match items {
        DataItems::Examples(examples) => examples.first(),
        DataItems::Pairs(pairs) => pairs.first().map(|pair| &pair.chosen),
        DataItems::Rated(rated) => rated.first().map(|rated| &rated.example),
        DataItems::Said(said) => said.first().map(|said| &said.example),
        DataItems::Prompts(_) => None,
    };
    let Some(Example { tokens, weights, .. }) = example else { return Vec::new() };
    let weights = [0.0].into_iter().chain(weights.iter().copied());
    let mut pending = Vec::new();
    let text = |(&token, weight)| {
        pending.push(token);
        let mut text = tokenizer.decode(&pending, SkipSpecial::No);
        // The text of a character that several tokens spell belongs to the last of them.
        match text.ends_with(char::REPLACEMENT_CHARACTER) && pending.len() < MAX_TOKENS_PER_CHARACTER {
            true => text.clear(),
            false => pending.clear(),
        }
        ExampleToken { text, weight }
    };
    tokens.iter().zip(weights).take(MAX_SAMPLE_TOKENS).map(text).collect()
}

fn plan_event(
    plan: &JobPlan,
    shape: &AdapterSpec,
    course: &DatasetSplit,
    draft: Option<&DraftTraining>,
    sizes: &Sizes,
) -> TrainingEvent {
    let of_draft =
        |DraftTraining { layers, shortlist }: &DraftTraining| control_protocol::training::DraftSummary {
            layers: *layers as u64,
            tokens: if shortlist.is_empty() { sizes.vocabulary as u64 } else { shortlist.len() as u64 },
        };
    let mut summary = control_protocol::training::TrainingPlan {
        examples: course.learned().len() as u64,
        held_out: course.held_out().len() as u64,
        tokens: course.learned().tokens() as u64,
        kind: sizes.data.kind.as_str().to_owned(),
        steps: sizes.steps,
        epochs: plan.epochs,
        learning_rate: plan.learning_rate,
        schedule: plan.decay.to_string(),
        warmup_steps: plan.warmup_steps,
        batch_size: plan.batch_size as u64,
        seed: plan.seed,
        parameters: sizes.parameters as u64,
        resumed_step: sizes.resumed_step,
        method: sizes.method.to_owned(),
        adapter_type: shape.adapter_type().to_owned(),
        draft: draft.map(of_draft),
        unread_fields: sizes.data.unread_fields.clone(),
        sample: sizes.data.sample.clone(),
        ..control_protocol::training::TrainingPlan::default()
    };
    if let AdapterSpec::Lora { rank, alpha, .. } = shape {
        (summary.rank, summary.alpha) = (Some(*rank as u64), Some(*alpha));
        summary.dropout = (plan.dropout > 0.0).then_some(plan.dropout);
    }
    if let AdapterSpec::Lora { targets, .. } | AdapterSpec::Ia3 { targets } = shape {
        summary.targets = targets.iter().map(ToString::to_string).collect();
    }
    TrainingEvent::Plan(summary)
}
