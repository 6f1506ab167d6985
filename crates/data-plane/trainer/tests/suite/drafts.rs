//! Draft adapters: training of a base's first blocks on the whole base's output, and the resulting files.

use std::{fs, ops::Range, path::Path};
use testkit::paths::golden_model as golden;

use kernels::{ThreadPool, lora::LoraPrecision};
use model::{
    adapter::MethodWeights,
    backward::{self, Gradients, Loss, SavedScope, TrainableAdapter, Trainer},
    client_weights::client_base::ClientBase,
    forward::ModelContext,
    resident::kv_shape,
    sources::open::open,
    weights::ResidentLayers,
};
use safetensors::SafeTensors;
use serde_json::Value;
use trainer::{
    adapter::{AdapterSpec, TargetModule},
    data::{DistillationSample, Example},
    draft::shortlist,
    optimizer::Hyperparameters,
    peft::{self, SaveDtype},
    step::TrainState,
};

/// Model of three blocks.
const MODEL: &str = "llama-tied";
const VOCABULARY: u32 = 320;

fn trainer(path: &Path, layers: usize) -> Trainer<ResidentLayers> {
    let base = ResidentLayers::load(&*open(path).unwrap(), 1, &|_| {}).unwrap();
    let frame = ClientBase::open(path).unwrap().frame.first_layers(layers);
    let shape = kv_shape(&frame.config, base.sites().numerics().kv(None));
    Trainer::new(frame.into(), base, shape, ThreadPool::new(&[]).unwrap(), SavedScope::All).unwrap()
}

fn shape() -> AdapterSpec {
    let targets = ["q_proj", "v_proj", "down_proj", "lm_head"];
    let targets = targets.iter().map(|name| name.parse::<TargetModule>().unwrap()).collect();
    AdapterSpec::Lora { rank: 4, alpha: 8.0, rslora: false, targets }
}

fn begun(frame: &ModelContext) -> MethodWeights {
    let mut method = shape().start(&frame.config, 3);
    for tensor in method.tensors_mut() {
        for (at, value) in tensor.iter_mut().enumerate() {
            *value += ((at * 37 % 19) as f32 - 9.0) * 0.004;
        }
    }
    method
}

/// Sample of a prompt and an answer, without likely tokens.
fn said(seed: u32, prompt: usize, answer: usize) -> DistillationSample {
    let tokens = (0..prompt + answer).map(|at| (at as u32 * 31 + seed * 7) % VOCABULARY).collect();
    let weights = [vec![0.0; prompt - 1], vec![1.0; answer]].concat();
    let example = Example { line: seed as usize, tokens, weights };
    DistillationSample { example, likely: Vec::new(), kind: "text".to_owned(), is_greedy: true }
}

fn learned(path: &Path, layers: usize, steps: usize) -> (f64, MethodWeights) {
    let trainer = trainer(path, layers);
    let start = begun(trainer.model());
    let mut learning = TrainState::new(trainer.into(), LoraPrecision::Exact, start).unwrap();
    let all: Vec<DistillationSample> = (0..3).map(|seed| said(seed, 9, 17)).collect();
    let hyper = Hyperparameters { learning_rate: 1e-2, ..Hyperparameters::default() };
    let mut loss = 0.0;
    for _ in 0..steps {
        loss = learning.distil(&all.iter().collect::<Vec<_>>(), &hyper, 1.0).unwrap().loss;
    }
    (loss, learning.method)
}

#[test]
fn a_draft_of_all_blocks_learns_to_the_last_bit_what_an_adapter_does() {
    let path = golden(MODEL);
    let trainer = trainer(&path, 3);
    let start = begun(trainer.model());
    let mut learning = TrainState::new(trainer.into(), LoraPrecision::Exact, start).unwrap();
    let all: Vec<DistillationSample> = (0..3).map(|seed| said(seed, 9, 17)).collect();
    let examples: Vec<&Example> = all.iter().map(|said| &said.example).collect();
    let hyper = Hyperparameters { learning_rate: 1e-2, ..Hyperparameters::default() };
    let mut loss = 0.0;
    for _ in 0..3 {
        loss = learning.learn(&examples, &hyper, 1.0).unwrap().loss;
    }
    let (distilled, method) = learned(&path, 3, 3);
    assert_eq!(distilled.to_bits(), loss.to_bits());
    assert_eq!(method, learning.method);
}

#[test]
fn the_first_blocks_learn_what_a_model_without_the_others_would() {
    let short = tempfile::tempdir().unwrap();
    let weights = fs::read(golden(MODEL).join("model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&weights).unwrap();
    let mut config: Value =
        serde_json::from_slice(&fs::read(golden(MODEL).join("config.json")).unwrap()).unwrap();
    for layers in [1, 2] {
        config["num_hidden_layers"] = layers.into();
        fs::write(short.path().join("config.json"), config.to_string()).unwrap();
        let is_there =
            |(name, _): &(&str, _)| !(layers..3).any(|layer| name.contains(&format!("layers.{layer}.")));
        let kept: Vec<_> = weights.iter().filter(is_there).collect();
        fs::write(short.path().join("model.safetensors"), safetensors::serialize(kept, None).unwrap())
            .unwrap();
        let (loss, method) = learned(&golden(MODEL), layers, 3);
        let (wanted_loss, wanted) = learned(short.path(), layers, 3);
        assert_eq!((loss.to_bits(), method), (wanted_loss.to_bits(), wanted), "{layers} of 3");
        assert_ne!(loss.to_bits(), learned(&golden(MODEL), layers + 1, 3).0.to_bits());
    }
}

/// Loss with one gradient per target, and optionally for other tokens.
struct PerTargetLoss {
    own: Vec<f32>,
    others: Vec<Vec<(u32, f32)>>,
}

impl Loss for PerTargetLoss {
    fn gradients(&mut self, targets: Range<usize>, _: &[f32], gradients: &mut [f32]) {
        gradients.copy_from_slice(&self.own[targets]);
    }

    fn others(&self, target: usize) -> &[(u32, f32)] {
        self.others.get(target).map_or(&[], Vec::as_slice)
    }
}

fn gradients(
    trainer: &mut Trainer<ResidentLayers>,
    method: &MethodWeights,
    targets: &[u32],
    mut loss: PerTargetLoss,
) -> Vec<f32> {
    let learner = TrainableAdapter::new(method, &trainer.model().config, LoraPrecision::Exact).unwrap();
    let tokens: Vec<u32> = (0..targets.len() as u32).map(|at| at * 11 % VOCABULARY).collect();
    let targets: Vec<Option<u32>> = targets.iter().copied().map(Some).collect();
    let mut sums = Gradients::zero(method);
    let example = backward::Example { tokens: &tokens, targets: &targets, dropout: None };
    let tape = trainer.forward(&learner, &[example]).unwrap();
    trainer.reverse(&learner, tape, &mut loss, sums.single_turn()).unwrap();
    sums.tensors().concat()
}

#[test]
fn a_distribution_has_the_gradients_of_all_the_tokens_it_is_made_of() {
    let mut trainer = trainer(&golden(MODEL), 2);
    let method = begun(trainer.model());
    let count = 21;
    // Up to three tokens at each position, each with its own share.
    let of = |which: u32| -> (Vec<u32>, Vec<f32>) {
        let token = |at: u32| (at * 13 + which * 101 + 5) % VOCABULARY;
        let share = |at: u32| ((at + which) % 4) as f32 * -0.1;
        ((0..count).map(token).collect(), (0..count).map(share).collect())
    };
    let alone: Vec<Vec<f32>> = (0..3)
        .map(|which| {
            let (tokens, own) = of(which);
            gradients(&mut trainer, &method, &tokens, PerTargetLoss { own, others: Vec::new() })
        })
        .collect();
    let (tokens, own) = of(0);
    let others = (0..count as usize)
        .map(|at| [1, 2].map(|which| (of(which).0[at], of(which).1[at])).to_vec())
        .collect();
    let together = gradients(&mut trainer, &method, &tokens, PerTargetLoss { own, others });
    let largest = together.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    assert!(largest > 0.0);
    for (at, value) in together.iter().enumerate() {
        let wanted: f32 = alone.iter().map(|gradients| gradients[at]).sum();
        assert!((value - wanted).abs() <= 1e-4 * largest, "{at}: {value}, not {wanted}");
    }
}

#[test]
fn a_draft_becomes_right_about_what_it_learns_and_guesses_only_what_is_on_its_list() {
    let trainer = trainer(&golden(MODEL), 1);
    let start = shape().start(&trainer.model().config, 1);
    let mut learning = TrainState::new(trainer.into(), LoraPrecision::Exact, start).unwrap();
    let mut all: Vec<DistillationSample> = (0..2).map(|seed| said(seed, 4, 12)).collect();
    // The generated tokens differ from the most likely ones, which are to be learned.
    for said in &mut all {
        let answer = said.example.tokens[4..].to_vec();
        said.likely =
            answer.iter().map(|&token| vec![((token + 1) % VOCABULARY, 0.7), (token, 0.2)]).collect();
    }
    let all: Vec<&DistillationSample> = all.iter().collect();
    let hyper = Hyperparameters { learning_rate: 2e-2, weight_decay: 0.0, ..Hyperparameters::default() };
    for _ in 0..60 {
        learning.distil(&all, &hyper, 1.0).unwrap();
    }
    let met = learning.meet(&all, &[]).unwrap();
    assert_eq!(met.iter().map(|met| met.tokens).collect::<Vec<_>>(), [12, 12]);
    assert!(met.iter().all(|met| met.right <= 2), "the likeliest is another: {met:?}");
    // Without the other tokens, the generated ones remain.
    let mut answers: Vec<u32> = all.iter().flat_map(|said| said.example.tokens[4..].to_vec()).collect();
    let more: Vec<u32> = answers.iter().map(|token| (token + 1) % VOCABULARY).collect();
    answers.retain(|token| !more.contains(token));
    answers.sort_unstable();
    answers.dedup();
    let listed = learning.meet(&all, &answers).unwrap();
    let right: u64 = listed.iter().map(|met| met.right).sum();
    assert!(right >= 18, "{right} of 24 with the list {answers:?}");
    assert_eq!(met[0].loss.to_bits(), listed[0].loss.to_bits(), "a list changes no loss");
}

#[test]
fn a_shortlist_has_what_every_text_needs_then_what_is_expected_then_what_comes_first() {
    let tokenizer = crate::support::tokenizer();
    let vocabulary = 400;
    let mut one = said(0, 2, 2);
    one.example.tokens = vec![0, 1, 390, 391];
    one.likely = vec![vec![(390, 0.9), (395, 0.05)], vec![(391, 0.5), (399, 0.4)]];
    let list = shortlist(&[one.clone()], &tokenizer, vocabulary, 262);
    // 256 bytes and three special tokens; then 390 and 391 with the largest expected shares; then 399.
    let mut wanted: Vec<u32> = (0..256).chain([257, 258, 259, 390, 391, 399]).collect();
    assert_eq!(list, wanted);
    // Token 395 is expected least. Unexpected tokens follow by number: 256 is two line ends, 260 is unused.
    wanted.extend([256, 395, 260]);
    wanted.sort_unstable();
    assert_eq!(shortlist(&[one.clone()], &tokenizer, vocabulary, 265), wanted);
    assert_eq!(shortlist(&[one.clone()], &tokenizer, vocabulary, 0), Vec::<u32>::new());
    assert_eq!(shortlist(&[one], &tokenizer, vocabulary, 400), Vec::<u32>::new());
}

#[test]
fn a_draft_is_written_with_its_blocks_and_its_list_and_the_same_bytes_each_time() {
    let frame = ClientBase::open(&golden(MODEL)).unwrap().frame.first_layers(2);
    let (config, list) = (&frame.config, [3u32, 17, 300]);
    let method = shape().start(config, 7);
    let directory = tempfile::tempdir().unwrap();
    let files = ["one", "two"].map(|name| {
        let path = directory.path().join(name);
        let options = peft::draft_options(&shape(), 0.0, config);
        peft::write(&path, &options, &method, config, SaveDtype::Bf16, &list).unwrap();
        ["adapter_config.json", "adapter_model.safetensors"].map(|file| fs::read(path.join(file)).unwrap())
    });
    assert_eq!(files[0], files[1]);
    let [options, weights] = &files[0];
    let options: Value = serde_json::from_slice(options).unwrap();
    assert_eq!(options["holobiont_draft"]["layers"], 2);
    assert_eq!(options["target_modules"], r".*\.layers\.(0|1)\..*\.(q_proj|v_proj|down_proj)|lm_head");
    let tensors = SafeTensors::deserialize(weights).unwrap();
    let stored = tensors.tensor("draft.shortlist").unwrap();
    assert_eq!((stored.dtype(), stored.shape()), (safetensors::Dtype::I64, &[3][..]));
    let tokens: Vec<i64> =
        stored.data().chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(tokens, [3, 17, 300]);
    let named = |part: &str| tensors.names().iter().filter(|name| name.contains(part)).count();
    // A and B of three linear layers in each block.
    assert_eq!((named("layers.0."), named("layers.1."), named("layers.2."), named("lm_head")), (6, 6, 0, 2));
}
