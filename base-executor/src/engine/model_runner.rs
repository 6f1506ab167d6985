//! The forward pass, the layer service that shares it, and the output of the latest step.

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

/// Payload of a caught panic.
pub(super) type Panic = Box<dyn Any + Send>;

/// The reason why a step failed.
#[derive(Debug)]
pub(super) enum StepFailed {
    /// An error or panic, which the log contains.
    Fault,
    /// Weights could not be read; the log says which, and why.
    NoWeights,
    /// The device lacked memory, with its message.
    NoMemory(String),
}

/// Place where tokens that need only their logits are sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SamplingLocation {
    /// The pass samples on its device.
    ByThePass,
    /// The engine samples from the logits.
    ByTheEngine,
}

impl SamplingLocation {
    fn of(pass: &impl ForwardPass) -> Self {
        if pass.draws() { Self::ByThePass } else { Self::ByTheEngine }
    }
}

/// Output of a step: rows of `vocab_size` logits, sampled tokens, and rows of `hidden_size` states.
#[derive(Debug)]
pub(super) struct StepOutput<'a> {
    pub(super) logits: &'a mut [f32],
    pub(super) vocab_size: usize,
    pub(super) drawn: &'a [Option<Drawn>],
    pub(super) states: &'a [f32],
    pub(super) hidden_size: usize,
}

/// The layer service, and its access to the base of the pass.
pub struct LayerService<P> {
    pub dispatcher: Dispatcher,
    /// Returns the base of the pass.
    pub base: fn(&mut P) -> &mut dyn EvaluateSites,
    /// Servers of the clients, which end with the engine. `None` in tests.
    pub servers: Option<RunningServers>,
}

impl<P> std::fmt::Debug for LayerService<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerService").field("dispatcher", &self.dispatcher).finish_non_exhaustive()
    }
}

/// The forward pass with the layer service.
pub(super) struct ModelRunner<P: ForwardPass> {
    pub(super) pass: P,
    /// Layer service for split clients, if it is on.
    pub(super) layers: Option<LayerService<P>>,
    /// Path of the latest step.
    pub(super) path: SitePath,
    /// Logits of a step; the buffer is reused.
    logits: Vec<f32>,
}

impl<P: ForwardPass> ModelRunner<P> {
    pub(super) fn new(pass: P) -> Self {
        Self { pass, layers: None, path: SitePath::Fast, logits: Vec::new() }
    }

    /// Sets the path of later steps.
    pub(super) fn set_path(&mut self, path: SitePath) {
        self.path = path;
        self.pass.set_path(path);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.pass.is_lost()
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.pass.vocab_size()
    }

    /// Returns the statistics of streamed weights.
    pub(super) fn weight_stats(&self) -> WeightStats {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let stats = |stats: Arc<WeightStreamStats>| WeightStats {
            read_bytes: stats.read_bytes(),
            read_us: micros(stats.read_time()),
            waited_us: micros(stats.waited()),
        };
        self.pass.sweep_figures().map_or_else(WeightStats::default, stats)
    }

    pub(super) fn drawing(&self) -> SamplingLocation {
        SamplingLocation::of(&self.pass)
    }

    /// Runs the pass over `batch`, with co-batched calls; `meanwhile` drafts while it waits for weights.
    pub(super) fn run(
        &mut self,
        batch: &[SequenceSlice<'_, P::Adapter>],
        meanwhile: (&mut OverlappedDrafters, &mut SpeculationStats),
        clock: &dyn Clock,
    ) -> Result<(), StepFailed> {
        let (drafters, stats) = meanwhile;
        let computed = catch_unwind(AssertUnwindSafe(|| {
            assert_eq!(
                failpoint::hit("executor.before_step"),
                FailpointOutcome::Pass,
                "a test wants the step to fail"
            );
            let hooks: &mut dyn PassHooks = match &mut self.layers {
                Some(layers) => &mut layers.dispatcher,
                None => &mut NoHooks,
            };
            let mut hooks = DraftingHooks { hooks, drafters, stats, clock };
            self.pass.forward_with_hooks(batch, &mut self.logits, &mut hooks)
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
                tracing::error!("a step panicked");
                Err(StepFailed::Fault)
            }
        }
    }

    /// Returns the output of the latest step.
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
