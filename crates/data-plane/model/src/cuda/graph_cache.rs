//! CUDA graphs of decode steps. Steps of one shape have the same launches, captured once and replayed.
//!
//! A graph is captured when a shape occurs for the second time. The first time allocates the memory for the
//! step, which a capture must not do. Graphs become stale when memory is freed, and are then captured again.

use std::collections::HashMap;

use kernels::cuda::{CudaError, CudaStream, Graph, Replay, attention::TableShape, lora::PlanShape};

/// Maximum number of graphs; beyond it all are dropped and captured again as needed.
const MAX_RECORDS: usize = 128;

/// Properties that determine the launches of a step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct StepShape {
    pub(super) rows: usize,
    pub(super) table: TableShape,
    /// Shape of the adapter plan, or `None` without adapters.
    pub(super) plan: Option<PlanShape>,
}

#[derive(Debug)]
enum GraphState {
    Met,
    Recorded(Graph),
    /// The driver cannot capture the step.
    Unrecordable,
}

#[derive(Debug, Default)]
pub(super) struct GraphCache {
    shapes: HashMap<StepShape, GraphState>,
}

impl GraphCache {
    /// Enqueues a step by replaying its graph, or by calling `enqueue`, possibly under capture.
    pub(super) fn step(
        &mut self,
        stream: &CudaStream,
        shape: StepShape,
        mut enqueue: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if self.shapes.len() >= MAX_RECORDS && !self.shapes.contains_key(&shape) {
            self.shapes.clear();
        }
        match self.shapes.get_mut(&shape) {
            None => {
                self.shapes.insert(shape, GraphState::Met);
                enqueue()
            }
            Some(GraphState::Unrecordable) => enqueue(),
            Some(known @ GraphState::Met) => {
                *known = record(stream, &mut enqueue)?;
                if is_replayed(known, stream)? { Ok(()) } else { enqueue() }
            }
            Some(known @ GraphState::Recorded(_)) => {
                if is_replayed(known, stream)? {
                    return Ok(());
                }
                // The step may have to allocate memory again.
                *known = GraphState::Met;
                enqueue()
            }
        }
    }
}

/// Launches the graph. Returns false if there is no valid graph or no memory for the launch.
fn is_replayed(known: &mut GraphState, stream: &CudaStream) -> Result<bool, CudaError> {
    let GraphState::Recorded(graph) = known else { return Ok(false) };
    match graph.launch(stream) {
        Err(error) if error.is_out_of_memory() => Ok(false),
        replay => Ok(replay? == Replay::Enqueued),
    }
}

fn record(
    stream: &CudaStream,
    enqueue: &mut impl FnMut() -> Result<(), CudaError>,
) -> Result<GraphState, CudaError> {
    match Graph::capture(stream, enqueue) {
        Ok(graph) => Ok(GraphState::Recorded(graph)),
        Err(error) if error.is_device_lost() => Err(error),
        Err(error) if error.is_out_of_memory() => {
            tracing::debug!(%error, "no memory to record a decode step; trying again later");
            Ok(GraphState::Met)
        }
        Err(error) => {
            tracing::warn!(%error, "cannot record a decode step; its kernels are launched one by one");
            Ok(GraphState::Unrecordable)
        }
    }
}
