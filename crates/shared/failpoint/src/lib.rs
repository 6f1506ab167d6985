//! Failpoints: named places where a test may kill, stop, delay or fail a process.
//!
//! [`hit`] marks a failpoint by name: `failpoint::hit("gateway.after_commit")`. In release builds the call
//! compiles to nothing. In debug builds, and only if `HOLOBIONT_FAILPOINTS` names a directory, `hit` looks
//! there for a file with the failpoint's name:
//!
//! ```text
//! echo "kill"     > $HOLOBIONT_FAILPOINTS/gateway.after_commit     die by SIGKILL at the next hit
//! echo "kill 3"   > ...                                            at the third hit from now on
//! echo "stop"     > ...                                            stop by SIGSTOP; the test sends SIGCONT
//! echo "wait 250" > ...                                            wait so many milliseconds
//! echo "fail"     > ...                                            the place reports an error of its own
//! echo "slow 4"   > ...                                            wait so many milliseconds at every hit
//! ```
//!
//! The process that hits the failpoint first renames the file to `NAME.fired`. So a failpoint armed once
//! fires once, in one process; the test sees that it fired, and a restarted process is not killed again. A
//! `slow` failpoint keeps its file and stays armed.

#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use rustix::process::{Signal, getpid, kill_process};

/// Environment variable that names the directory with the armed failpoints.
pub const DIRECTORY: &str = "HOLOBIONT_FAILPOINTS";

/// How the code around a failpoint must behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a place that cannot fail says so with `let _ =`"]
pub enum FailpointOutcome {
    /// Continue as without the failpoint.
    Pass,
    /// Behave as if the next operation had failed.
    Fail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Kill,
    Stop,
    Wait(Duration),
    Slow(Duration),
    Fail,
}

/// Marks a failpoint by name, as the crate's description explains.
#[inline]
pub fn hit(name: &str) -> FailpointOutcome {
    #[cfg(debug_assertions)]
    if let Some(directory) = directory() {
        return reached(directory, name);
    }
    let _ = name;
    FailpointOutcome::Pass
}

/// Marks a failpoint that may kill, stop or delay the process but cannot fail.
#[inline]
pub fn pass(name: &str) {
    let _ = hit(name);
}

#[cfg_attr(not(debug_assertions), expect(dead_code, reason = "release builds have no failpoints"))]
fn directory() -> Option<&'static Path> {
    static DIRECTORY_IN_USE: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIRECTORY_IN_USE.get_or_init(|| std::env::var_os(DIRECTORY).map(PathBuf::from)).as_deref()
}

#[cfg_attr(not(debug_assertions), allow(dead_code, reason = "release builds have no failpoints"))]
fn reached(directory: &Path, name: &str) -> FailpointOutcome {
    let file = directory.join(name);
    let Some((action, at)) = fs::read_to_string(&file).ok().as_deref().and_then(parse) else {
        return FailpointOutcome::Pass;
    };
    if let Action::Slow(time) = action {
        thread::sleep(time);
        return FailpointOutcome::Pass;
    }
    if count(name) < at {
        return FailpointOutcome::Pass;
    }
    // The rename succeeds in only one of several processes or threads that get here together.
    if fs::rename(&file, directory.join(format!("{name}.fired"))).is_err() {
        return FailpointOutcome::Pass;
    }
    forget(name);
    match action {
        Action::Kill => send(Signal::KILL),
        Action::Stop => send(Signal::STOP),
        Action::Wait(time) | Action::Slow(time) => thread::sleep(time),
        Action::Fail => return FailpointOutcome::Fail,
    }
    FailpointOutcome::Pass
}

fn send(signal: Signal) {
    // A process may always signal itself.
    let _ = kill_process(getpid(), signal);
}

fn parse(text: &str) -> Option<(Action, u32)> {
    let mut words = text.split_whitespace();
    let action = words.next()?;
    let number = words.next().and_then(|word| word.parse::<u32>().ok());
    match action {
        "kill" => Some((Action::Kill, number.unwrap_or(1))),
        "stop" => Some((Action::Stop, number.unwrap_or(1))),
        "fail" => Some((Action::Fail, number.unwrap_or(1))),
        "wait" => Some((Action::Wait(Duration::from_millis(number?.into())), 1)),
        "slow" => Some((Action::Slow(Duration::from_millis(number?.into())), 1)),
        _ => None,
    }
}

fn hits() -> &'static Mutex<HashMap<String, u32>> {
    static HITS: OnceLock<Mutex<HashMap<String, u32>>> = OnceLock::new();
    HITS.get_or_init(Mutex::default)
}

/// Counts a hit of an armed failpoint and returns the number of its hits, this one included.
fn count(name: &str) -> u32 {
    let mut hits = hits().lock().unwrap_or_else(PoisonError::into_inner);
    let count = hits.entry(name.to_owned()).or_default();
    *count += 1;
    *count
}

fn forget(name: &str) {
    hits().lock().unwrap_or_else(PoisonError::into_inner).remove(name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_not_armed_passes() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(reached(directory.path(), "test.quiet"), FailpointOutcome::Pass);
    }

    #[test]
    fn an_armed_place_fires_once_and_says_so() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("test.once"), "fail").unwrap();
        assert_eq!(reached(directory.path(), "test.once"), FailpointOutcome::Fail);
        assert!(directory.path().join("test.once.fired").exists());
        assert_eq!(reached(directory.path(), "test.once"), FailpointOutcome::Pass);
    }

    #[test]
    fn a_place_may_be_armed_for_a_later_hit() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("test.third"), "fail 3").unwrap();
        let outcomes: Vec<_> = (0..4).map(|_| reached(directory.path(), "test.third")).collect();
        assert_eq!(
            outcomes,
            [FailpointOutcome::Pass, FailpointOutcome::Pass, FailpointOutcome::Fail, FailpointOutcome::Pass]
        );
    }

    #[test]
    fn a_place_that_is_slow_stays_so() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("test.slow"), "slow 1").unwrap();
        for _ in 0..3 {
            assert_eq!(reached(directory.path(), "test.slow"), FailpointOutcome::Pass);
            assert!(directory.path().join("test.slow").exists());
        }
    }

    #[test]
    fn a_file_that_says_nothing_known_arms_nothing() {
        for text in ["", "explode", "wait", "wait soon"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse("kill 2\n"), Some((Action::Kill, 2)));
        assert_eq!(parse("wait 250"), Some((Action::Wait(Duration::from_millis(250)), 1)));
    }
}
