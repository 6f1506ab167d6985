//! A recorded sequence of launches that is started as a whole: no launch costs the host anything then.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::Arc,
};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};

use super::{Cuda, CudaError, error::check, stream::CudaStream};

/// A recorded sequence. It reads and writes the memory it was recorded with, so it is worth nothing once any of the
/// device's memory was given back.
pub struct Graph {
    cuda: Arc<Cuda>,
    exec: CUgraphExec,
    /// How often memory had been given back when it was recorded.
    frees: u64,
}

/// What became of starting a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replay {
    /// It is enqueued.
    Enqueued,
    /// Memory was given back since it was recorded: record it anew.
    Stale,
}

// SAFETY: a graph is launched from one thread at a time, which `&mut self` sees to.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

impl Graph {
    /// Records what `enqueue` enqueues on `stream`, without running it. It must neither wait nor take memory.
    ///
    /// # Errors
    ///
    /// `enqueue` fails, or did something that cannot be recorded.
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
        // SAFETY: the stream is alive; the capture ends below whatever happens between.
        check("record", unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) })?;
        // A panic must not leave the stream recording: from then on it would run nothing.
        let enqueued = catch_unwind(AssertUnwindSafe(enqueue));
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is capturing; the graph is written by the call.
        let ended = check("end a record", unsafe { sys::cuStreamEndCapture(stream.raw(), &mut graph) });
        let made = enqueued.map(|enqueued| enqueued.and(ended).and_then(|()| instantiate(graph)));
        if !graph.is_null() {
            // SAFETY: what was made of it stands for itself.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        let exec = made.unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(Self { cuda: Arc::clone(cuda), exec, frees: cuda.frees() })
    }

    /// Enqueues the whole sequence on `stream`, on which it was recorded: it sees what was enqueued there before.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn launch(&mut self, stream: &CudaStream) -> Result<Replay, CudaError> {
        if self.cuda.frees() != self.frees {
            return Ok(Replay::Stale);
        }
        self.cuda.bind()?;
        // SAFETY: the record is complete, and all memory there was when it was made is still there.
        check("replay a record", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })?;
        Ok(Replay::Enqueued)
    }
}

/// Prepares a recorded sequence for being started.
fn instantiate(graph: CUgraph) -> Result<CUgraphExec, CudaError> {
    let mut exec = ptr::null_mut();
    // SAFETY: the graph was just recorded; what is made of it is written by the call.
    check("prepare a record", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) })?;
    Ok(exec)
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // SAFETY: ours, and not used again; what is under way is finished by the driver.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
