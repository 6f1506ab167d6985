//! A job that keeps its best adapter, and ends when the held-out loss no longer falls.

use std::path::Path;

use control_protocol::training::TrainingEvent;
use model::adapter::MethodWeights;
use trainer::{
    checkpoint::{Checkpoint, CheckpointOrigin},
    data::{DataItems, Example},
    job::{DatasetSplit, JobEnd, JobListener, TrainingJob},
    plan::JobPlan,
    step::TrainState,
};

use crate::{
    course,
    steps::{config, learning, shapes},
};

/// Listener that collects the held-out losses, and stops the job after a number of steps.
#[derive(Default)]
struct Evaluations {
    found: Vec<(u64, f64)>,
    steps: u64,
    stops_after: Option<u64>,
}

impl JobListener for Evaluations {
    fn hear(&mut self, event: &TrainingEvent) -> std::io::Result<()> {
        match event {
            TrainingEvent::Evaluation { step, loss } => self.found.push((*step, *loss)),
            TrainingEvent::Step(_) => self.steps += 1,
            _ => {}
        }
        Ok(())
    }

    fn wants_stop(&self) -> bool {
        self.stops_after.is_some_and(|steps| self.steps >= steps)
    }
}

/// Texts whose next token follows from the last by another rule in the data than in the held-out data, so
/// that learning one unlearns the other.
fn texts(step: u32) -> DataItems {
    let text = |line: usize| Example {
        line,
        tokens: (0..16).map(|at| (1 + line as u32 + at * step) % 60).collect(),
        weights: vec![1.0; 15],
    };
    DataItems::Examples((1..=4).map(text).collect())
}

fn job(patience: Option<u64>, keep_best: bool, checkpoints: Option<&Path>) -> TrainingJob {
    let plan = JobPlan { epochs: 40, learning_rate: 2e-2, keep_best, patience, ..course::plan(0) };
    let course = DatasetSplit::new(texts(7), Some(texts(11)), &plan);
    let origin = CheckpointOrigin { plan: String::new(), data: String::new(), base: String::new() };
    TrainingJob {
        plan,
        course,
        draft: None,
        sampling: None,
        origin,
        checkpoints: checkpoints.map(Path::to_owned),
        checkpoint_steps: 3,
    }
}

fn start() -> MethodWeights {
    shapes()[0].start(&config("llama-tied"), 0)
}

fn run(
    job: &TrainingJob,
    learning: &mut TrainState<model::weights::ResidentLayers>,
    listener: &mut Evaluations,
) -> JobEnd {
    job.run(learning, listener).unwrap()
}

#[test]
fn a_job_ends_when_the_held_out_loss_no_longer_falls_with_the_adapter_of_its_lowest() {
    let method = start();
    let mut whole = Evaluations::default();
    let mut last = learning("llama-tied", method.clone());
    let end = run(&job(None, false, None), &mut last, &mut whole);
    assert!(matches!(end, JobEnd::Done { best_step: None, .. }), "{end:?}");
    let best_at = |found: &[(u64, f64)]| found.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let lowest = best_at(&whole.found);
    assert!(lowest.0 < 150, "the held-out loss rises in the end: {:?}", whole.found);

    let mut kept = learning("llama-tied", method.clone());
    let end = run(&job(None, true, None), &mut kept, &mut Evaluations::default());
    let JobEnd::Done { held_out_loss: Some(loss), best_step: Some(step), .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!((step, loss), lowest);
    assert_ne!(kept.method, last.method);

    let mut early = Evaluations::default();
    let mut stopped = learning("llama-tied", method.clone());
    let end = run(&job(Some(2), true, None), &mut stopped, &mut early);
    let JobEnd::Done { best_step: Some(step), .. } = end else { panic!("{end:?}") };
    assert_eq!(early.found, whole.found[..early.found.len()], "the same losses up to the end");
    assert_eq!(step, best_at(&early.found).0);
    let [.., before, after, end] = early.found.as_slice() else { panic!("{:?}", early.found) };
    assert!(
        early.found.len() < whole.found.len() && before.0 == step && after.1 >= before.1 && end.1 >= before.1
    );
}

#[test]
fn a_job_that_was_stopped_keeps_the_same_adapter_as_one_that_ran_through() {
    let method = start();
    let mut whole = learning("llama-tied", method.clone());
    let expected = run(&job(Some(2), true, None), &mut whole, &mut Evaluations::default());
    for stops_after in [1, 3, 4, 7] {
        let directory = tempfile::tempdir().unwrap();
        let job = job(Some(2), true, Some(directory.path()));
        let mut end = JobEnd::Stopped { step: 0 };
        while let JobEnd::Stopped { .. } = end {
            let mut again = learning("llama-tied", method.clone());
            if let Some(Checkpoint { method, state, best, .. }) =
                Checkpoint::read(directory.path(), &job.origin, &method).unwrap()
            {
                (again.method, again.state, again.best) = (method, state, best);
            }
            end = run(
                &job,
                &mut again,
                &mut Evaluations { stops_after: Some(stops_after), ..Evaluations::default() },
            );
            if let (JobEnd::Done { best_step, .. }, JobEnd::Done { best_step: wanted, .. }) = (end, expected)
            {
                assert_eq!(best_step, wanted);
                assert_eq!(again.method, whole.method, "{stops_after} steps at a time");
            }
        }
    }
}
