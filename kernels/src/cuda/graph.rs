//! CUDA graphs: recorded sequences of launches, replayed at once to save the host the cost of each launch.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::Arc,
};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};

use super::{Cuda, CudaError, error::check, stream::CudaStream};

/// A recorded sequence of launches. Any later free of device memory makes its recorded addresses stale.
pub struct Graph {
    cuda: Arc<Cuda>,
    exec: CUgraphExec,
    /// Number of frees when the graph was recorded.
    frees: u64,
}

/// Whether a replay is enqueued, or needs a new recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replay {
    /// The replay is enqueued on the stream.
    Enqueued,
    /// Memory was freed since the recording: the caller must record again.
    Stale,
}

// SAFETY: a graph is launched from one thread at a time, which `&mut self` ensures.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

impl Graph {
    /// Records the work of `enqueue` on `stream` without running it. `enqueue` must neither wait nor
    /// allocate.
    ///
    /// # Errors
    /// Fails if `enqueue` fails or does something that cannot be recorded.
    pub fn capture(
        stream: &CudaStream,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        stream.cuda().bind()?;
        stream.cuda().recording(|| Self::capture_alone(stream, enqueue))
    }

    fn capture_alone(
        stream: &CudaStream,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let cuda = stream.cuda();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; the capture ends below even after a panic.
        check("record", unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) })?;
        // A panic must not leave the stream in capture mode, in which it would run nothing.
        let enqueued = catch_unwind(AssertUnwindSafe(enqueue));
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is capturing; the call writes the graph.
        let ended = check("end a record", unsafe { sys::cuStreamEndCapture(stream.raw(), &mut graph) });
        let made = enqueued.map(|enqueued| enqueued.and(ended).and_then(|()| instantiate(graph)));
        if !graph.is_null() {
            // SAFETY: the executable graph is independent of `graph`, which is not used again.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        let exec = made.unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(Self { cuda: Arc::clone(cuda), exec, frees: cuda.frees() })
    }

    /// Enqueues the whole sequence on `stream`, the stream of the recording, after all earlier work.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn launch(&mut self, stream: &CudaStream) -> Result<Replay, CudaError> {
        if self.cuda.frees() != self.frees {
            return Ok(Replay::Stale);
        }
        self.cuda.bind()?;
        // SAFETY: the recording is complete, and no memory was freed since.
        check("replay a record", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })?;
        Ok(Replay::Enqueued)
    }
}

fn instantiate(graph: CUgraph) -> Result<CUgraphExec, CudaError> {
    let mut exec = ptr::null_mut();
    // SAFETY: the graph was just recorded; the call writes the executable graph.
    check("prepare a record", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) })?;
    Ok(exec)
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // SAFETY: this object owns the graph and does not use it again; the driver finishes pending work.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
