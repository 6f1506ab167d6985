//! Microbatches on parallel lanes: bitwise equal to a single lane, and no lane waits for a failed one.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};
use testkit::paths::golden;

use control_protocol::training::session::{Adam, CommandDone, CommandReply, Lora, TrainingCommand};
use kernels::{Activations, ThreadPool, lora::LoraPrecision};
use model::{
    adapter::{Adapter, MethodWeights},
    backward::{SavedScope, TrainError, Trainer},
    client_weights::client_base::ClientBase,
    cpu::Compute,
    forward::{BaseLayers, LinearGroup, ReverseLayers},
    resident::kv_shape,
    sources::open::open,
    weights::ResidentLayers,
};
use trainer::{
    adapter::AdapterSpec,
    data::{Example, PreferencePair, RatedAnswer},
    loss::{KtoLoss, Loss, LossMetrics},
    optimizer::Hyperparameters,
    peft::{self, SaveDtype},
    session::TrainerSession,
    step::{
        Direction, KtoOptions, SequenceSample, TrainState, TrainStepError,
        microbatch_pool::{MicrobatchPool, MicrobatchWorker},
    },
};

const METHODS: [&str; 4] = ["lora-all", "ia3", "prefix", "lm-head"];
const HYPER: Hyperparameters =
    Hyperparameters { learning_rate: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallFault {
    Error,
    Panic,
}

#[derive(Debug, thiserror::Error)]
#[error("told so")]
struct InjectedFault;

impl From<Infallible> for InjectedFault {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// Layers with unequal delays, which fail after a number of calls on all lanes.
struct UnevenLayers {
    layers: ResidentLayers,
    calls: Arc<AtomicUsize>,
    last: usize,
    fault: CallFault,
}

impl UnevenLayers {
    fn call(&self) -> Result<(), InjectedFault> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call.is_multiple_of(7) {
            thread::sleep(Duration::from_micros(call as u64 * 37 % 300));
        }
        match self.fault {
            _ if call < self.last => Ok(()),
            CallFault::Error => Err(InjectedFault),
            CallFault::Panic => panic!("told so"),
        }
    }
}

impl BaseLayers<Compute> for UnevenLayers {
    type Error = InjectedFault;

    fn linear(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), InjectedFault> {
        self.call()?;
        self.layers.linear(compute, layer, group, x, out)?;
        Ok(())
    }

    fn embed(
        &self,
        compute: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut Vec<f32>,
    ) -> Result<(), InjectedFault> {
        self.layers.embed(compute, tokens, out)?;
        Ok(())
    }
}

impl ReverseLayers<Compute> for UnevenLayers {
    fn linear_transposed(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        g: &mut Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), InjectedFault> {
        self.call()?;
        self.layers.linear_transposed(compute, layer, group, g, out)?;
        Ok(())
    }
}

fn lanes(model: &str, count: usize, last: usize, fault: CallFault) -> MicrobatchPool<UnevenLayers> {
    let (path, calls) = (golden("models").join(model), Arc::default());
    let lane = || {
        let layers = ResidentLayers::load(&*open(&path).unwrap(), 1, &|_| {}).unwrap();
        let frame = ClientBase::open(&path).unwrap().frame;
        let shape = kv_shape(&frame.config, layers.sites().numerics().kv(None));
        let base = UnevenLayers { layers, calls: Arc::clone(&calls), last, fault };
        let trainer =
            Trainer::new(frame.into(), base, shape, ThreadPool::new(&[]).unwrap(), SavedScope::All).unwrap();
        MicrobatchWorker { trainer, core: None }
    };
    MicrobatchPool::new(lane(), (1..count).map(|_| lane()).collect())
}

/// An adapter of `method` that trains on `count` lanes; base layers fail after `last` calls.
fn learning(
    model: &str,
    method: &str,
    count: usize,
    last: usize,
    fault: CallFault,
) -> TrainState<UnevenLayers> {
    let lanes = lanes(model, count, last, fault);
    let start = golden("training").join(model).join(method).join("start");
    let start = Adapter::read(&start, &lanes.model().config).unwrap().method;
    TrainState::new(lanes, LoraPrecision::Exact, start).unwrap()
}

fn tokens(number: usize, length: usize) -> Vec<u32> {
    (0..length).map(|at| u32::try_from((at * 7 + number * 13 + at / 5) % 60).unwrap()).collect()
}

/// Examples of unequal lengths, in five microbatches of at most 512 rows.
fn examples() -> Vec<Example> {
    let lengths = [250, 240, 250, 90, 31, 200, 245, 2, 250, 250, 77];
    let example = |(number, length): (usize, usize)| Example {
        line: number + 1,
        tokens: tokens(number, length),
        weights: (1..length).map(|at| if at % 9 == 0 { 0.0 } else { 1.0 / at as f32 }).collect(),
    };
    lengths.into_iter().enumerate().map(example).collect()
}

fn pairs() -> Vec<PreferencePair> {
    let examples = examples();
    let of = |two: &[Example]| PreferencePair { chosen: two[0].clone(), rejected: two[1].clone() };
    examples.chunks_exact(2).map(of).collect()
}

fn data() -> Vec<SequenceSample> {
    let datum = |example: &Example| SequenceSample {
        tokens: example.tokens[..example.weights.len()].to_vec(),
        targets: example.tokens[1..].to_vec(),
        weights: example.weights.clone(),
        sampling_logprobs: Vec::new(),
    };
    examples().iter().map(datum).collect()
}

fn two_steps<T>(mut step: impl FnMut() -> T) -> [T; 2] {
    [(); 2].map(|()| step())
}

fn bits(method: &MethodWeights) -> Vec<u32> {
    method.tensors().into_iter().flatten().copied().map(f32::to_bits).collect()
}

const NEVER: usize = usize::MAX;

#[test]
fn examples_teach_the_same_bits_on_any_number_of_lanes() {
    let examples = examples();
    let examples: Vec<&Example> = examples.iter().collect();
    for (method, dropout) in METHODS.map(|method| (method, 0.0)).into_iter().chain([("lora-all", 0.2)]) {
        let learned = |count| {
            let mut learning =
                learning("llama-tied", method, count, NEVER, CallFault::Error).with_dropout(dropout, 3);
            let steps = two_steps(|| {
                let judged = learning.evaluate(&examples).unwrap().unwrap();
                let outcome = learning.learn(&examples, &HYPER, 1.0).unwrap();
                (judged.to_bits(), outcome.loss.to_bits(), outcome.grad_norm.to_bits(), outcome.rows)
            });
            (steps, bits(&learning.method))
        };
        let alone = learned(1);
        for count in [2, 3] {
            assert!(learned(count) == alone, "{method}, dropping {dropout}, on {count} lanes");
        }
    }
}

#[test]
fn pairs_teach_the_same_bits_on_any_number_of_lanes() {
    let pairs = pairs();
    let pairs: Vec<&PreferencePair> = pairs.iter().collect();
    for method in METHODS {
        let learned = |count| {
            let mut learning = learning("qwen3-qknorm", method, count, NEVER, CallFault::Error);
            let steps = two_steps(|| {
                let judged = learning.evaluate_pairs(&pairs, 0.1).unwrap().unwrap();
                let outcome = learning.prefer(&pairs, 0.1, &HYPER, 1.0).unwrap();
                (judged.to_bits(), outcome.loss.to_bits(), outcome.grad_norm.to_bits(), outcome.rows)
            });
            (steps, bits(&learning.method))
        };
        let alone = learned(1);
        for count in [2, 3] {
            assert!(learned(count) == alone, "{method} on {count} lanes");
        }
    }
}

#[test]
fn rated_answers_teach_the_same_bits_on_any_number_of_lanes() {
    let rate = |(number, example): (usize, Example)| RatedAnswer {
        example: Example {
            weights: (1..example.tokens.len()).map(|at| f32::from(u8::from(at > 1))).collect(),
            ..example
        },
        is_desirable: number % 3 > 0,
    };
    let rated: Vec<RatedAnswer> =
        examples().into_iter().filter(|it| it.tokens.len() > 2).enumerate().map(rate).collect();
    let rated: Vec<&RatedAnswer> = rated.iter().collect();
    let kto = KtoOptions {
        loss: KtoLoss { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.5 },
        max_tokens: 200,
    };
    for method in METHODS {
        let learned = |count| {
            let mut learning = learning("qwen3-qknorm", method, count, NEVER, CallFault::Error);
            let steps = two_steps(|| {
                let judged = learning.evaluate_rated(&rated, kto, 4).unwrap().unwrap();
                let outcome = learning.rate(&rated, kto, &HYPER, 1.0).unwrap();
                (judged.to_bits(), outcome.loss.to_bits(), outcome.grad_norm.to_bits(), outcome.rows)
            });
            (steps, bits(&learning.method))
        };
        let alone = learned(1);
        for count in [2, 3] {
            assert!(learned(count) == alone, "{method} on {count} lanes");
        }
    }
}

#[test]
fn what_is_gathered_is_the_same_bits_on_any_number_of_lanes() {
    let data = data();
    let number_bits = |metrics: LossMetrics| -> Vec<_> {
        metrics.into_iter().map(|(name, value)| (name, value.to_bits())).collect()
    };
    for method in METHODS {
        let gathered = |count| {
            let mut learning = learning("qwen2-bias", method, count, NEVER, CallFault::Error);
            let steps = two_steps(|| {
                let forward = learning.gather(&data, Loss::CrossEntropy, Direction::Forward).unwrap();
                let [first, second] = [&data[..7], &data[7..]]
                    .map(|data| learning.gather(data, Loss::CrossEntropy, Direction::Backward).unwrap());
                let logprobs = [&forward.logprobs[..], &first.logprobs, &second.logprobs].concat();
                let logprobs: Vec<u32> = logprobs.into_iter().map(f32::to_bits).collect();
                let metrics = [forward.metrics, first.metrics, second.metrics].map(number_bits);
                (logprobs, metrics, learning.step_gathered(&HYPER, None).unwrap().to_bits())
            });
            (steps, bits(&learning.method))
        };
        let alone = gathered(1);
        for count in [2, 3] {
            assert!(gathered(count) == alone, "{method} on {count} lanes");
        }
    }
}

#[test]
fn what_is_refused_leaves_adapter_optimizer_and_gradients_as_they_were() {
    let data = data();
    let mut wild_data = data[..1].to_vec();
    wild_data[0].weights.fill(f32::MAX);
    let wild = Hyperparameters { learning_rate: f64::MAX, ..HYPER };
    for method in METHODS {
        let learned = |tries: usize| {
            let mut learning = learning("qwen2-bias", method, 1, NEVER, CallFault::Error);
            learning.gather(&data, Loss::CrossEntropy, Direction::Backward).unwrap();
            for _ in 0..tries {
                let refused = learning.gather(&wild_data, Loss::CrossEntropy, Direction::Backward);
                assert!(
                    matches!(refused, Err(TrainStepError::NotANumber { what: "gradient", .. })),
                    "{refused:?}"
                );
                let refused = learning.step_gathered(&wild, Some(1e-3));
                assert!(
                    matches!(refused, Err(TrainStepError::NotANumber { what: "result", .. })),
                    "{refused:?}"
                );
            }
            let norm = learning.step_gathered(&HYPER, Some(1e-3)).unwrap();
            (norm.to_bits(), bits(&learning.method))
        };
        assert!(learned(2) == learned(0), "{method}");
    }
}

/// Data as a training command: the command, and its payload.
fn order(data: &[SequenceSample]) -> (TrainingCommand, Vec<[u8; 4]>) {
    let order = TrainingCommand::ForwardBackward {
        loss: "cross_entropy".to_owned(),
        options: BTreeMap::new(),
        forward_only: false,
        lengths: data.iter().map(|datum| datum.tokens.len()).collect(),
        inputs: vec!["weights".to_owned()],
    };
    let integers = |tokens: &[u32]| -> Vec<_> { tokens.iter().map(|token| token.to_le_bytes()).collect() };
    let numbers = data.iter().flat_map(|datum| {
        let weights: Vec<_> = datum.weights.iter().map(|weight| weight.to_le_bytes()).collect();
        [integers(&datum.tokens), integers(&datum.targets), weights].concat()
    });
    (order, numbers.collect())
}

#[test]
fn a_session_that_is_suspended_goes_on_in_another_trainer_to_the_same_bits() {
    const MODEL: &str = "qwen2-bias";
    let place = tempfile::tempdir().unwrap();
    let session = || {
        TrainerSession::new(lanes(MODEL, 1, NEVER, CallFault::Error), LoraPrecision::Exact, "base".to_owned())
    };
    let done = |session: &mut TrainerSession<UnevenLayers>, order: &TrainingCommand, numbers: &[[u8; 4]]| {
        let (answer, _) = session.carry_out(order, numbers);
        assert!(matches!(answer, CommandReply::Done(_)), "{answer:?}");
    };
    let adam = Adam {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-12,
        weight_decay: 0.0,
        grad_clip_norm: 0.0,
    };
    let data = data();
    let learned = |is_suspended: bool| {
        let lora = Lora { rank: 4, alpha: 32.0, targets: vec!["q_proj".to_owned(), "up_proj".to_owned()] };
        let mut now = session();
        done(&mut now, &TrainingCommand::Create { lora, seed: 5 }, &[]);
        for (number, half) in [&data[..7], &data[7..], &data[..3]].into_iter().enumerate() {
            let (order, numbers) = order(half);
            done(&mut now, &order, &numbers);
            if is_suspended {
                let directory = place.path().join(format!("suspended-{number}"));
                done(&mut now, &TrainingCommand::Suspend { directory: directory.clone() }, &[]);
                now = session();
                done(&mut now, &TrainingCommand::Load { directory, optimizer: true }, &[]);
            }
            if number > 0 {
                done(&mut now, &TrainingCommand::OptimStep(adam), &[]);
            }
        }
        let (reply, weights) = now.carry_out(&TrainingCommand::ExportWeights {}, &[]);
        let CommandReply::Done(CommandDone { adapter: Some(adapter), numbers: 0, .. }) = reply else {
            panic!("{reply:?}")
        };
        assert_eq!(adapter.weight_bytes, weights.len() as u64);
        weights
    };
    assert!(learned(true) == learned(false));
}

#[test]
fn an_exported_adapter_has_the_bytes_of_the_directory_of_a_job() {
    let (mut session, config) = {
        let lanes = lanes("qwen2-bias", 1, NEVER, CallFault::Error);
        let config = lanes.model().config.clone();
        (TrainerSession::new(lanes, LoraPrecision::Exact, "base".to_owned()), config)
    };
    let (refused, nothing) = session.carry_out(&TrainingCommand::ExportWeights {}, &[]);
    assert!(matches!(refused, CommandReply::Refused(_)) && nothing.is_empty(), "{refused:?}");
    let targets = ["q_proj", "down_proj", "lm_head"].map(str::to_owned).to_vec();
    let lora = Lora { rank: 4, alpha: 32.0, targets };
    session.carry_out(&TrainingCommand::Create { lora: lora.clone(), seed: 5 }, &[]);
    let (reply, weights) = session.carry_out(&TrainingCommand::ExportWeights {}, &[]);
    let CommandReply::Done(CommandDone { adapter: Some(adapter), .. }) = reply else { panic!("{reply:?}") };

    let targets = lora.targets.iter().map(|name| name.parse().unwrap()).collect();
    let shape = AdapterSpec::Lora { rank: 4, alpha: 32.0, rslora: false, targets };
    let place = tempfile::tempdir().unwrap();
    let (directory, method) = (place.path().join("adapter"), shape.start(&config, 5));
    let options = peft::options(&shape, 0.0, &config);
    peft::write(&directory, &options, &method, &config, SaveDtype::F32, &[]).unwrap();
    let file = |name: &str| std::fs::read(directory.join(name)).unwrap();
    assert_eq!(adapter.config.as_bytes(), file("adapter_config.json"));
    assert!(weights == file("adapter_model.safetensors"));
}

#[test]
fn a_lane_that_fails_lets_nobody_wait_and_its_own_error_is_told() {
    let (examples, data) = (examples(), data());
    let examples: Vec<&Example> = examples.iter().collect();
    for method in METHODS {
        // During the forward pass alone, while lanes wait for each other, and in the last microbatch.
        for last in [0, 10, 25, 40, 55, 70] {
            let mut learning = learning("llama-tied", method, 3, last, CallFault::Error);
            let before = learning.method.clone();
            let failed = learning.learn(&examples, &HYPER, 1.0).map(drop);
            assert!(
                matches!(failed, Err(TrainStepError::Train(TrainError::Base(InjectedFault)))),
                "{method}, {last}"
            );
            assert_eq!(learning.method, before);
            let failed = learning.gather(&data, Loss::CrossEntropy, Direction::Backward).map(drop);
            assert!(
                matches!(failed, Err(TrainStepError::Train(TrainError::Base(InjectedFault)))),
                "{method}, {last}"
            );
        }
    }
}

#[test]
fn a_lane_that_panics_ends_the_step_and_not_in_a_wait() {
    let examples = examples();
    let examples: Vec<&Example> = examples.iter().collect();
    for last in [5, 30, 60] {
        let mut learning = learning("llama-tied", "lora-all", 2, last, CallFault::Panic);
        let step = AssertUnwindSafe(|| learning.learn(&examples, &HYPER, 1.0).map(drop));
        assert!(catch_unwind(step).is_err(), "{last}");
    }
}
