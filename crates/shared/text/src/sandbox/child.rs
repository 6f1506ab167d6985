//! The process that compiles: reads sources from its standard input, writes verdicts to its standard output.

use std::{
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
    frame::{self, FrameError, Ready, Verdict},
};
use crate::grammar::{COMPILER_STACK_BYTES, GrammarError, Grammars, Tokens};

/// Added to the niceness: whoever serves others comes first.
const NICENESS: i32 = 19;

/// How often the CPU time of a compilation is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Why the process ends before it is told to.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The system refused a limit.
    #[error("the limits of the process that compiles grammars cannot be set: {0}")]
    Limits(#[from] io::Error),
    /// The pipes cannot be used.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Runs the process until its parent closes the pipe or a compilation takes too much.
///
/// # Errors
/// The limits cannot be set, or the pipes cannot be used.
pub fn serve() -> Result<(), ChildError> {
    run(&mut BufReader::new(stdin().lock()), &mut stdout().lock())
}

fn run(input: &mut impl Read, output: &mut impl Write) -> Result<(), ChildError> {
    set_name(c"grammars").map_err(io::Error::from)?;
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)?;
    nice(NICENESS).map_err(io::Error::from)?;
    let Some(tokens) = frame::read::<Tokens>(input)? else { return Ok(()) };
    let grammars = Arc::new(Grammars::over(&tokens));
    drop(tokens);
    limit_memory()?;
    frame::write(output, &Ready)?;
    while let Some(source) = frame::read::<String>(input)? {
        let verdict = judge(&grammars, source);
        frame::write(output, &verdict)?;
        if matches!(verdict, Verdict::TooMuchTime) {
            // The compilation goes on in its thread, which only the end of the process ends.
            std::process::exit(0);
        }
    }
    Ok(())
}

/// Limits what the process may take from now on. What is beyond ends it, without a dump of its memory.
fn limit_memory() -> Result<(), io::Error> {
    let limit = |resource, bytes| {
        let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
        setrlimit(resource, limit).map_err(io::Error::from)
    };
    limit(Resource::Core, 0)?;
    limit(Resource::Data, data_bytes()? + MEMORY_BYTES + COMPILER_STACK_BYTES as u64)
}

/// Bytes that the process may write to, which is what the limit counts.
fn data_bytes() -> Result<u64, io::Error> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kilobytes
        .map(|kilobytes| kilobytes << 10)
        .ok_or_else(|| io::Error::other("/proc/self/status has no VmData"))
}

/// Compiles `source` in a thread and watches how much CPU time the process takes meanwhile.
fn judge(grammars: &Arc<Result<Grammars, GrammarError>>, source: String) -> Verdict {
    let (done, compiled) = channel();
    let (begin, grammars) = (cpu_time(), Arc::clone(grammars));
    thread::spawn(move || {
        let compiled = grammars.as_ref().as_ref().map(|grammars| grammars.compile(&source));
        let verdict = match compiled {
            Ok(Ok(_)) => Verdict::Good,
            Ok(Err(error)) => Verdict::Refused(error.to_string()),
            Err(error) => Verdict::Refused(error.to_string()),
        };
        let _ = done.send(verdict);
    });
    loop {
        match compiled.recv_timeout(LOOK_EVERY) {
            Ok(verdict) => return verdict,
            Err(RecvTimeoutError::Timeout) if cpu_time() - begin > Duration::from_millis(CPU_MS) => {
                return Verdict::TooMuchTime;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Verdict::Refused("the compiler failed on it; simplify the grammar".to_owned());
            }
        }
    }
}

/// CPU time that the process has taken.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let (seconds, nanoseconds) = (time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0));
    Duration::new(seconds, nanoseconds)
}
