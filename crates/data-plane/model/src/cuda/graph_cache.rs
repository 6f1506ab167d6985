//! Decode steps of a shape are the same launches, so they are recorded once and replayed.
//!
//! A record is made when a shape is met for the second time: the first time takes the memory that the step needs, which
//! a record must not. Records become stale when memory is given back, and are made anew.

use std::collections::HashMap;

use kernels::cuda::{CudaError, CudaStream, Graph, Replay, attention::TableShape, lora::PlanShape};

/// Most records that are kept; beyond them all are forgotten and made anew as they are needed.
const MAX_RECORDS: usize = 128;

/// What two steps share that are the same launches.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct StepShape {
    pub(super) rows: usize,
    pub(super) table: TableShape,
    /// `None`: no adapters.
    pub(super) plan: Option<PlanShape>,
}

/// What is known of a shape.
#[derive(Debug)]
enum GraphState {
    /// It was met once.
    Met,
    /// Its record.
    Recorded(Graph),
    /// The driver does not record it.
    Unrecordable,
}

/// Records of decode steps.
#[derive(Debug, Default)]
pub(super) struct GraphCache {
    shapes: HashMap<StepShape, GraphState>,
}

impl GraphCache {
    /// Enqueues a step of this shape by replaying its record, or by calling `enqueue`, which may be recorded.
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
                // The step may need memory again.
                *known = GraphState::Met;
                enqueue()
            }
        }
    }
}

/// Enqueues the record, if there is one that is worth something, and the memory that the driver needs for it.
fn is_replayed(known: &mut GraphState, stream: &CudaStream) -> Result<bool, CudaError> {
    let GraphState::Recorded(graph) = known else { return Ok(false) };
    match graph.launch(stream) {
        Err(error) if error.is_out_of_memory() => Ok(false),
        replay => Ok(replay? == Replay::Enqueued),
    }
}

/// The record of what `enqueue` enqueues, if the driver makes one.
fn record(
    stream: &CudaStream,
    enqueue: &mut impl FnMut() -> Result<(), CudaError>,
) -> Result<GraphState, CudaError> {
    match Graph::capture(stream, enqueue) {
        Ok(graph) => Ok(GraphState::Recorded(graph)),
        Err(error) if error.is_device_lost() => Err(error),
        Err(error) if error.is_out_of_memory() => {
            tracing::debug!(%error, "a decode step is recorded when there is memory again");
            Ok(GraphState::Met)
        }
        Err(error) => {
            tracing::warn!(%error, "a decode step is not recorded; it is enqueued launch by launch");
            Ok(GraphState::Unrecordable)
        }
    }
}
