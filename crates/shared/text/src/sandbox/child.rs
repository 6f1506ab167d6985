//! The helper process: reads questions from its standard input and writes replies to its standard output.

use std::{
    ffi::OsStr,
    io::{self, BufReader, Read, Write, stdin, stdout},
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::Duration,
};

use rustix::{
    process::{Resource, Rlimit, Signal, nice, set_parent_process_death_signal, setrlimit},
    thread::set_name,
    time::{ClockId, clock_gettime},
};

use super::{
    CPU_MS, MEMORY_BYTES,
    frame::{self, FrameError, Ready, Reply},
    grammars::Compile,
    templates::Render,
    work::Work,
};
use crate::grammar::COMPILER_STACK_BYTES;

/// Interval at which the CPU time of an answer is checked.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Why the process ends before its parent closes the pipe.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The operating system refused a limit.
    #[error("the limits of a helper process cannot be set: {0}")]
    Limits(#[from] io::Error),
    /// A pipe cannot be read or written.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Runs a helper process if the program's first argument asks for one, until its parent closes the pipe or
/// an answer exceeds a limit. Returns `None` if the argument asks for none.
#[must_use]
pub fn serve(argument: Option<&OsStr>) -> Option<Result<(), ChildError>> {
    match argument?.to_str()? {
        Compile::ARGUMENT => Some(run::<Compile>()),
        Render::ARGUMENT => Some(run::<Render>()),
        _ => None,
    }
}

fn run<W: Work>() -> Result<(), ChildError> {
    let (mut input, mut output) = (BufReader::new(stdin().lock()), stdout().lock());
    set_name(W::NAME).map_err(io::Error::from)?;
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)?;
    nice(W::NICENESS).map_err(io::Error::from)?;
    let Some(setup) = frame::read::<W::Setup>(&mut input)? else { return Ok(()) };
    let work = Arc::new(W::new(&setup));
    drop(setup);
    limit_memory()?;
    frame::write(&mut output, &Ready)?;
    answer_all(&work, &mut input, &mut output)
}

fn answer_all<W: Work>(
    work: &Arc<W>,
    input: &mut impl Read,
    output: &mut impl Write,
) -> Result<(), ChildError> {
    while let Some(question) = frame::read(input)? {
        let reply = answer(work, question);
        frame::write(output, &reply)?;
        if matches!(reply, Reply::TooMuchTime) {
            // The work continues in its thread, which only the end of the process stops.
            std::process::exit(0);
        }
    }
    Ok(())
}

/// Limits the memory that the process may take from now on. Exceeding the limit ends the process without a
/// core dump.
fn limit_memory() -> Result<(), io::Error> {
    let limit = |resource, bytes| {
        let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
        setrlimit(resource, limit).map_err(io::Error::from)
    };
    limit(Resource::Core, 0)?;
    limit(Resource::Data, data_bytes()? + MEMORY_BYTES + COMPILER_STACK_BYTES as u64)
}

/// Returns the writable bytes of the process, which the limit counts.
fn data_bytes() -> Result<u64, io::Error> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kilobytes
        .map(|kilobytes| kilobytes << 10)
        .ok_or_else(|| io::Error::other("/proc/self/status has no VmData"))
}

/// Answers `question` in a thread and checks the CPU time of the process meanwhile.
fn answer<W: Work>(work: &Arc<W>, question: W::Question) -> Reply<W::Answer> {
    let (done, answered) = channel();
    let (begin, work) = (cpu_time(), Arc::clone(work));
    thread::spawn(move || {
        let _ = done.send(work.answer(question));
    });
    loop {
        match answered.recv_timeout(LOOK_EVERY) {
            Ok(answer) => return Reply::Answer(answer),
            Err(RecvTimeoutError::Timeout) if cpu_time() - begin > Duration::from_millis(CPU_MS) => {
                return Reply::TooMuchTime;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Reply::Failed,
        }
    }
}

/// Returns the CPU time that the process has used.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let (seconds, nanoseconds) = (time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0));
    Duration::new(seconds, nanoseconds)
}
