//! KTO: rated lines, the loss compared with TRL's, and jobs that learn from ratings or search a learning rate.

use std::path::Path;

use control_protocol::training::TrainingEvent;
use model::{adapter::MethodWeights, weights::ResidentLayers};
use serde_json::{Value, json};
use trainer::{
    checkpoint::{Checkpoint, CheckpointOrigin},
    data::{DataItems, Example, RatedAnswer},
    job::{DatasetSplit, JobEnd, JobListener, TrainingJob},
    loss::{self, AnswerLogprobs, KtoLoss},
    plan::JobPlan,
    step::TrainState,
};

use crate::{
    course,
    golden::{assert_all_near, assert_near, floats, golden, number},
    steps::{config, learning, shapes},
    support::{CHATML, TemplateTokenizer, file},
};

const HI: &str = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn rated(model: &TemplateTokenizer, lines: &[Value]) -> Vec<(String, bool)> {
    match model.read(&file(lines)).unwrap_or_else(|error| panic!("{error}")).items {
        DataItems::Rated(all) => all.iter().map(|it| (model.shown(&it.example), it.is_desirable)).collect(),
        other => panic!("these are no ratings: {other:?}"),
    }
}

#[test]
fn an_answer_is_rated_in_the_forms_of_trl_and_llama_factory() {
    let model = TemplateTokenizer::new(CHATML);
    let (user, no) = (message("user", "Hi"), message("assistant", "No"));
    let expected = [HI, "[No<|im_end|>]"].concat();
    for (value, is_desirable) in
        [(json!(false), false), (json!(true), true), (json!(0), false), (json!(1.0), true)]
    {
        for line in [
            json!({"prompt": [user], "completion": [no], "label": value}),
            json!({"messages": [user, no], "label": value}),
            json!({"messages": [user, no], "kto_tag": value}),
            json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "No"}], "kto_tag": value}),
            json!({"instruction": "Hi", "output": "No", "kto_tag": value, "label": value}),
        ] {
            assert_eq!(
                rated(&model, std::slice::from_ref(&line)),
                [(expected.clone(), is_desirable)],
                "{line}"
            );
        }
        let text = json!({"prompt": "Capital of Japan?", "completion": " Osaka.", "label": value});
        let expected = "Capital of Japan?[ Osaka.<|im_end|>]".to_owned();
        assert_eq!(rated(&model, &[text]), [(expected, is_desirable)]);
    }
    // Only the last answer is rated.
    let line = json!({"messages": [user, message("assistant", "Yes"), user, no], "label": false});
    let expected = [HI, "Yes<|im_end|>\n", HI, "[No<|im_end|>]"].concat();
    assert_eq!(rated(&model, &[line]), [(expected, false)]);
    let named = json!({"prompt": "Hi ", "completion": "Yes", "label": "greeting"});
    assert_eq!(model.examples(&[named]), ["Hi [Yes<|im_end|>]"]);
}

#[test]
fn ratings_that_cannot_be_honoured_are_refused_by_name() {
    let model = TemplateTokenizer::new(CHATML);
    let (user, no) = (message("user", "Hi"), message("assistant", "No"));
    for (line, expected) in [
        (json!({"question": "Hi", "response": "No", "label": false}), "'label' rates the answer"),
        (json!({"text": "abc", "kto_tag": true}), "'kto_tag' is not supported"),
        (json!({"messages": [user, no, user], "label": false}), "one assistant message at the end"),
        (
            json!({"prompt": [user], "completion": [no, user, no], "label": true}),
            "one assistant message at the end",
        ),
        (json!({"messages": [user, no], "label": true, "kto_tag": false}), "'kto_tag' contradicts 'label'"),
        (json!({"messages": [user, no], "label": true, "weight": 2}), "'weight' is not supported"),
    ] {
        let fault = model.fault(&line);
        assert!(fault.contains(expected), "{line}: {fault}");
    }
    let line = |label: Value| json!({"prompt": "Hi ", "completion": "Yes", "label": label});
    let mixed = |lines: &[Value]| model.read(&file(lines)).unwrap_err().to_string();
    let unrated = mixed(&[line(json!(true)), line(json!("good"))]);
    assert!(unrated.contains("line 2: 'label' must be true or false, not a string"), "{unrated}");
    let null = mixed(&[line(json!(true)), line(Value::Null)]);
    assert!(null.contains("line 2: 'label' is missing"), "{null}");
    let late = mixed(&[line(json!("good")), line(json!(true))]);
    assert!(late.contains("line 2: the previous lines have 'prompt' and 'completion', but"), "{late}");
}

#[test]
fn a_mismatched_answer_is_that_of_another_line_cut_at_the_limit() {
    let answer = |tokens: &[u32], prompt: usize| RatedAnswer {
        example: Example {
            line: 1,
            tokens: tokens.to_vec(),
            weights: (1..tokens.len()).map(|at| if at < prompt { 0.0 } else { 1.0 }).collect(),
        },
        is_desirable: true,
    };
    let (own, other) = (answer(&[1, 2, 3, 4], 2), answer(&[5, 6, 7, 8, 9], 3));
    let mismatched = own.with_answer_of(&other, 64);
    assert_eq!((mismatched.tokens, mismatched.weights), (vec![1, 2, 8, 9], vec![0.0, 1.0, 1.0]));
    assert_eq!(own.with_answer_of(&other, 3).tokens, [1, 2, 8]);
    assert_eq!(own.with_answer_of(&own, 64), own.example);
}

#[test]
fn the_loss_and_its_gradients_are_those_of_trl() {
    let cases = golden(include_str!("../../../../../tests/golden/training/kto.json"));
    let cases = cases.as_array().unwrap();
    for (at, case) in cases.iter().enumerate() {
        let what = format!("case {at}");
        let of = |name: &str| number(&case["config"][name]);
        let kto = KtoLoss {
            beta: of("beta"),
            desirable_weight: of("desirable_weight"),
            undesirable_weight: of("undesirable_weight"),
        };
        let rows =
            |answer: &Value| ["logprobs", "reference_logprobs", "weights"].map(|name| floats(&answer[name]));
        let gain = |answer: &Value| {
            let [logprobs, reference_logprobs, weights] = rows(answer);
            AnswerLogprobs { logprobs: &logprobs, reference_logprobs: &reference_logprobs, weights: &weights }
                .gain()
        };
        let kl = loss::kto_kl(&case["mismatched"].as_array().unwrap().iter().map(gain).collect::<Vec<_>>());
        assert_near(kl, number(&case["kl"]), &what);
        let (answers, mut sum) = (case["answers"].as_array().unwrap(), 0.0);
        for answer in answers {
            let [logprobs, reference_logprobs, weights] = rows(answer);
            let row = AnswerLogprobs {
                logprobs: &logprobs,
                reference_logprobs: &reference_logprobs,
                weights: &weights,
            };
            let is_desirable = answer["label"].as_bool().unwrap();
            let evaluated = kto.of(row, is_desirable, kl);
            assert_eq!(evaluated.loss, kto.value(row.gain(), is_desirable, kl), "{what}");
            sum += evaluated.loss;
            let mean: Vec<f32> = evaluated.gradients.iter().map(|it| it / answers.len() as f32).collect();
            assert_all_near(&mean, &answer["gradients"], &what);
        }
        assert_near(sum / answers.len() as f64, number(&case["value"]), &what);
    }
    assert_eq!(cases.len(), 7, "the cases were read");
}

#[test]
fn a_gain_that_is_not_a_number_is_no_divergence_of_zero() {
    assert!(loss::kto_kl(&[1.0, f64::NAN]).is_nan());
    assert_eq!(loss::kto_kl(&[-3.0, 1.0]), 0.0);
}

/// Listener that stops the job after a number of steps, and keeps the losses.
#[derive(Default)]
struct StoppingListener {
    losses: Vec<f64>,
    evaluated: Vec<f64>,
    stops_after: Option<usize>,
}

impl JobListener for StoppingListener {
    fn hear(&mut self, event: &TrainingEvent) -> std::io::Result<()> {
        match event {
            TrainingEvent::Step(step) => self.losses.push(step.loss),
            TrainingEvent::Evaluation { loss, .. } => self.evaluated.push(*loss),
            _ => {}
        }
        Ok(())
    }

    fn wants_stop(&self) -> bool {
        self.stops_after.is_some_and(|steps| self.losses.len() >= steps)
    }
}

/// Answers to several prompts: rising tokens are good, falling ones are bad.
fn ratings() -> DataItems {
    let answer = |line: u32| {
        let (is_desirable, first) = (line.is_multiple_of(2), 5 * line);
        let answer = (0..5).map(|at| if is_desirable { first + at } else { first + 50 - at });
        let tokens: Vec<u32> =
            [first, first + 7, first + 1].into_iter().chain(answer).map(|it| it % 60).collect();
        let example =
            Example { line: line as usize, tokens, weights: vec![0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0] };
        RatedAnswer { example, is_desirable }
    };
    DataItems::Rated((1..=9).map(answer).collect())
}

fn job(checkpoints: Option<&Path>) -> TrainingJob {
    // The last batch of an epoch has one answer.
    let plan = JobPlan { epochs: 4, learning_rate: 2e-2, batch_size: 2, ..course::plan(0) };
    let course = DatasetSplit::new(ratings(), Some(ratings()), &plan);
    let origin = CheckpointOrigin { plan: String::new(), data: String::new(), base: String::new() };
    TrainingJob {
        plan,
        course,
        draft: None,
        sampling: None,
        origin,
        checkpoints: checkpoints.map(Path::to_owned),
        checkpoint_steps: 5,
    }
}

fn start() -> MethodWeights {
    shapes()[0].start(&config("llama-tied"), 0)
}

/// Sum of the log-probabilities of the answers with this rating.
fn likelihood(learning: &mut TrainState<ResidentLayers>, is_desirable: bool) -> f64 {
    let DataItems::Rated(all) = ratings() else { unreachable!() };
    let examples: Vec<Example> =
        all.into_iter().filter(|it| it.is_desirable == is_desirable).map(|it| it.example).collect();
    -learning.evaluate(&examples.iter().collect::<Vec<_>>()).unwrap().unwrap()
}

#[test]
fn good_answers_become_likelier_and_bad_ones_less_likely_however_often_the_job_is_stopped() {
    let mut whole = learning("llama-tied", start());
    let before = [true, false].map(|rating| likelihood(&mut whole, rating));
    let mut heard = StoppingListener::default();
    job(None).run(&mut whole, &mut heard).unwrap();
    assert_eq!(heard.losses[0], 0.5, "the first step's policy is the reference");
    assert_eq!(heard.losses.len(), 20);
    let after = [true, false].map(|rating| likelihood(&mut whole, rating));
    assert!(after[0] > before[0] && after[1] < before[1], "{before:?}, then {after:?}");
    assert!(heard.evaluated.last() < heard.evaluated.first(), "{:?}", heard.evaluated);
    for stops_after in [1, 3, 7] {
        let directory = tempfile::tempdir().unwrap();
        let job = job(Some(directory.path()));
        loop {
            let mut again = learning("llama-tied", start());
            let read = Checkpoint::read(directory.path(), &job.origin, &start()).unwrap();
            if let Some(Checkpoint { method, state, best, .. }) = read {
                (again.method, again.state, again.best) = (method, state, best);
            }
            let mut listener =
                StoppingListener { stops_after: Some(stops_after), ..StoppingListener::default() };
            if let JobEnd::Done { .. } = job.run(&mut again, &mut listener).unwrap() {
                assert_eq!(again.method, whole.method, "{stops_after} steps at a time");
                break;
            }
        }
    }
}

#[test]
fn a_search_for_a_learning_rate_gives_one_curve_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let job = job(Some(directory.path()));
    let search = || {
        let mut heard = StoppingListener::default();
        let curve =
            job.find_learning_rate(&mut learning("llama-tied", start()), &mut heard).unwrap().unwrap();
        assert_eq!(heard.losses, curve.points.iter().map(|point| point.loss).collect::<Vec<_>>());
        assert!(heard.evaluated.is_empty());
        curve
    };
    let curve = search();
    assert_eq!(search(), curve);
    assert!((2..=60).contains(&curve.points.len()), "{curve:?}");
    assert!(curve.points.is_sorted_by(|one, next| one.learning_rate < next.learning_rate));
    let steepest = curve.steepest.expect("the loss falls");
    assert!((1e-6..=1e-1).contains(&steepest), "{curve:?}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    let mut stopped = StoppingListener { stops_after: Some(3), ..StoppingListener::default() };
    assert_eq!(job.find_learning_rate(&mut learning("llama-tied", start()), &mut stopped).unwrap(), None);
}
