//! The compiler process: reads sources from its standard input and writes verdicts to its standard output.

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

/// Added to the process's niceness, because processes that serve requests have priority.
const NICENESS: i32 = 19;

/// Interval at which the CPU time of a compilation is checked.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Why the process ends before its parent closes the pipe.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The operating system refused a limit.
    #[error("the limits of the process that compiles grammars cannot be set: {0}")]
    Limits(#[from] io::Error),
    /// A pipe cannot be read or written.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Runs the process until its parent closes the pipe or a compilation exceeds a limit.
///
/// # Errors
/// If the limits cannot be set, or a pipe fails.
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
            // The compilation continues in its thread, which only the end of the process stops.
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

/// Compiles `source` in a thread and checks the CPU time of the process meanwhile.
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

/// Returns the CPU time that the process has used.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let (seconds, nanoseconds) = (time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0));
    Duration::new(seconds, nanoseconds)
}
