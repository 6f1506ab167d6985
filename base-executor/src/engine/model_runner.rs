//! The pass, who shares it, and what its last step gave.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use failpoint::FailpointOutcome;
use layer_service::{dispatcher::Dispatcher, start::RunningServers};
use model::{
    forward::{ForwardPass, SequenceSlice},
    linear_sites::{EvaluateSites, NoHooks, PassHooks, SitePath},
    sampling::Drawn,
    weight_stream_stats::WeightStreamStats,
};
use scheduling::clock::Clock;
use shmproto::message::{SpeculationStats, WeightStats};

use super::overlapped_drafting::{DraftingHooks, OverlappedDrafters};

/// What a panic leaves behind.
pub(super) type Panic = Box<dyn Any + Send>;

/// A step that came to nothing.
#[derive(Debug)]
pub(super) enum StepFailed {
    /// By a fault, which is in the log.
    Fault,
    /// Weights could not be read; the log says which, and why.
    NoWeights,
    /// The device had no memory for it, in these words.
    NoMemory(String),
}

/// Who draws tokens that need nothing but their logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SamplingLocation {
    /// The pass, where its logits are.
    ByThePass,
    /// The engine, from the logits.
    ByTheEngine,
}

impl SamplingLocation {
    /// Who draws for this pass.
    fn of(pass: &impl ForwardPass) -> Self {
        if pass.draws() { Self::ByThePass } else { Self::ByTheEngine }
    }
}

/// What a step gave: rows of logits, of which each has so many, drawn tokens, and rows of hidden states.
#[derive(Debug)]
pub(super) struct StepOutput<'a> {
    pub(super) logits: &'a mut [f32],
    pub(super) vocab_size: usize,
    pub(super) drawn: &'a [Option<Drawn>],
    pub(super) states: &'a [f32],
    pub(super) hidden_size: usize,
}

/// Split clients, and how the pass lends them its base.
pub struct LayerService<P> {
    /// Their calls.
    pub hub: Dispatcher,
    /// The base in the pass.
    pub base: fn(&mut P) -> &mut dyn EvaluateSites,
    /// Where they come in; closed with the engine. `None` in tests.
    pub doors: Option<RunningServers>,
}

impl<P> std::fmt::Debug for LayerService<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerService").field("hub", &self.hub).finish_non_exhaustive()
    }
}

/// See the module's description.
pub(super) struct ModelRunner<P: ForwardPass> {
    pub(super) pass: P,
    /// Split clients that the base is lent to.
    pub(super) layers: Option<LayerService<P>>,
    /// Which path the last step took.
    pub(super) path: SitePath,
    /// The logits of a step, kept for the next.
    logits: Vec<f32>,
}

impl<P: ForwardPass> ModelRunner<P> {
    pub(super) fn new(pass: P) -> Self {
        Self { pass, layers: None, path: SitePath::Fast, logits: Vec::new() }
    }

    /// Has steps take `path` from now on.
    pub(super) fn set_path(&mut self, path: SitePath) {
        self.path = path;
        self.pass.set_path(path);
    }

    /// Nothing can be computed any more.
    pub(super) fn is_lost(&self) -> bool {
        self.pass.is_lost()
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.pass.vocab_size()
    }

    /// What reading weights has cost.
    pub(super) fn weight_stats(&self) -> WeightStats {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let stats = |figures: Arc<WeightStreamStats>| WeightStats {
            read_bytes: figures.read_bytes(),
            read_us: micros(figures.read_time()),
            waited_us: micros(figures.waited()),
        };
        self.pass.sweep_figures().map_or_else(WeightStats::default, stats)
    }

    /// Who draws tokens that need nothing but their logits.
    pub(super) fn drawing(&self) -> SamplingLocation {
        SamplingLocation::of(&self.pass)
    }

    /// Runs the pass over `batch`, in company where there is some; where it waits, those of `meanwhile` go on drafting.
    pub(super) fn run(
        &mut self,
        batch: &[SequenceSlice<'_, P::Adapter>],
        meanwhile: (&mut OverlappedDrafters, &mut SpeculationStats),
        clock: &dyn Clock,
    ) -> Result<(), StepFailed> {
        let (writers, stats) = meanwhile;
        let computed = catch_unwind(AssertUnwindSafe(|| {
            assert_eq!(
                failpoint::hit("executor.before_step"),
                FailpointOutcome::Pass,
                "a test wants the step to fail"
            );
            let company: &mut dyn PassHooks = match &mut self.layers {
                Some(layers) => &mut layers.hub,
                None => &mut NoHooks,
            };
            let mut company = DraftingHooks { company, writers, stats, clock };
            self.pass.forward_in_company(batch, &mut self.logits, &mut company)
        }));
        match computed {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if P::lacked_memory(&error) => Err(StepFailed::NoMemory(error.to_string())),
            Ok(Err(error)) => {
                let lacked_weights = P::lacked_weights(&error);
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, "a step failed");
                Err(if lacked_weights { StepFailed::NoWeights } else { StepFailed::Fault })
            }
            Err(_) => {
                tracing::error!("a panic was caught in a step");
                Err(StepFailed::Fault)
            }
        }
    }

    /// What the last step gave.
    pub(super) fn gave(&mut self) -> StepOutput<'_> {
        let Self { pass, logits, .. } = self;
        StepOutput {
            logits,
            vocab_size: pass.vocab_size(),
            drawn: pass.drawn(),
            states: pass.states(),
            hidden_size: pass.hidden_size(),
        }
    }
}
