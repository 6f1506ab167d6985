//! Names of checkpoints: `tinker://RUN/weights/NAME` is a state, `tinker://RUN/sampler_weights/NAME` an
//! adapter that requests may name, and `tinker://RUN/external_weights/NAME` an adapter for download.

use control_protocol::training::session::CommandRefusal;

/// Maximum length of a name in bytes.
const MAX_NAME_BYTES: usize = 128;
/// Separator between run and sampler name in an adapter name.
const SAMPLER: char = '-';
/// Separator between run and snapshot number; names cannot contain it.
const SNAPSHOT: char = '~';
/// Separator between run and the name of an adapter for download; names cannot contain it.
const EXPORT: char = '@';

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CheckpointPath {
    /// A state from which training continues.
    State { run: String, name: String },
    /// An adapter for sampling.
    Sampler {
        /// Name in the registry.
        adapter: String,
    },
    /// An adapter for download.
    External {
        /// Name in the registry.
        adapter: String,
    },
}

impl CheckpointPath {
    /// Parses a checkpoint path.
    ///
    /// # Errors
    /// If `path` is malformed.
    pub(crate) fn parse(path: &str) -> Result<Self, CommandRefusal> {
        let wrong = || {
            CommandRefusal::user(format!(
                "'{}' is not a path; use tinker://RUN/weights/NAME of save_state, or \
                 tinker://RUN/sampler_weights/NAME of save_weights_for_sampler",
                path.chars().take(MAX_NAME_BYTES).collect::<String>()
            ))
        };
        let parts: Vec<&str> = path.strip_prefix("tinker://").ok_or_else(wrong)?.split('/').collect();
        let [run, kind, name] = parts[..] else { return Err(wrong()) };
        let (run, name) = (checked(run)?, checked(name)?);
        match kind {
            "weights" => Ok(Self::State { run: run.to_owned(), name: name.to_owned() }),
            "sampler_weights" => Ok(Self::Sampler { adapter: adapter(run, name) }),
            "external_weights" => Ok(Self::External { adapter: export(run, name) }),
            _ => Err(wrong()),
        }
    }
}

/// Returns the run and the name of the state that `path` names.
///
/// # Errors
/// If `path` does not name a state.
pub(crate) fn state(path: &str) -> Result<(String, String), CommandRefusal> {
    match CheckpointPath::parse(path)? {
        CheckpointPath::State { run, name } => Ok((run, name)),
        CheckpointPath::Sampler { .. } | CheckpointPath::External { .. } => Err(CommandRefusal::user(
            "weights for samplers or download cannot be trained; load a state of save_state",
        )),
    }
}

/// Returns `name` if it is valid as part of a path and of an adapter's name.
///
/// # Errors
/// If `name` is invalid.
pub(crate) fn checked(name: &str) -> Result<&str, CommandRefusal> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.starts_with('.') && name.chars().all(plain) {
        return Ok(name);
    }
    Err(CommandRefusal::user(format!(
        "'{}' is not a valid name; use 1 to {MAX_NAME_BYTES} letters, digits, '.', '_' and '-', without \
         '.' at the start",
        name.chars().take(MAX_NAME_BYTES).collect::<String>()
    )))
}

/// Returns the adapter name of a run's sampler.
#[must_use]
pub fn adapter(run: &str, name: &str) -> String {
    format!("tinker-{run}-{name}")
}

/// Returns the adapter name of a sampler without a name.
#[must_use]
pub fn snapshot(run: &str, number: u64) -> String {
    format!("tinker-{run}{SNAPSHOT}{number}")
}

/// Returns the run of a snapshot, if `adapter` is one.
#[must_use]
pub(crate) fn run_of_snapshot(adapter: &str) -> Option<&str> {
    adapter.strip_prefix("tinker-")?.split_once(SNAPSHOT).map(|(run, _)| run)
}

/// Returns the adapter name of a run's adapter for download.
#[must_use]
pub(crate) fn export(run: &str, name: &str) -> String {
    format!("tinker-{run}{EXPORT}{name}")
}

/// Returns run and name of an adapter for sampling, unless the client gave it no name.
#[must_use]
pub(crate) fn sampler_of(adapter: &str) -> Option<(&str, &str)> {
    split(adapter).filter(|(_, mark, _)| *mark == SAMPLER).map(|(run, _, name)| (run, name))
}

/// Returns run and name of an adapter for download.
#[must_use]
pub(crate) fn export_of(adapter: &str) -> Option<(&str, &str)> {
    split(adapter).filter(|(_, mark, _)| *mark == EXPORT).map(|(run, _, name)| (run, name))
}

/// Whether an adapter belongs to a run; lists of models omit such adapters.
#[must_use]
pub(crate) fn is_of_run(adapter: &str) -> bool {
    split(adapter).is_some_and(|(_, mark, _)| [SAMPLER, SNAPSHOT, EXPORT].contains(&mark))
}

/// Splits an adapter name into its run, the separator, and the rest.
fn split(adapter: &str) -> Option<(&str, char, &str)> {
    const SESSION_DIGITS: usize = 32;
    let of_run = adapter.strip_prefix("tinker-")?;
    let (session, rest) = of_run.split_at_checked(SESSION_DIGITS)?;
    let number = rest.strip_prefix('-')?;
    let digits = number.find(|c: char| !c.is_ascii_digit())?;
    let (run, rest) = of_run.split_at(SESSION_DIGITS + 1 + digits);
    let mut name = rest.chars();
    let mark = name.next()?;
    let is_run = digits > 0 && session.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_run.then_some((run, mark, name.as_str()))
}

/// Checks a time to live in seconds; Tinker allows 1 hour to 10 years, or none.
///
/// # Errors
/// If the time is out of range.
pub(crate) fn checked_ttl(ttl_s: Option<u64>) -> Result<Option<u64>, CommandRefusal> {
    const TTL_S: std::ops::RangeInclusive<u64> = 3600..=10 * 366 * 86_400;
    match ttl_s {
        Some(ttl_s) if !TTL_S.contains(&ttl_s) => Err(CommandRefusal::user(format!(
            "'ttl_seconds' must be {} (1 hour) to {} (10 years); without it, the checkpoint is kept \
             until deleted",
            TTL_S.start(),
            TTL_S.end()
        ))),
        ttl_s => Ok(ttl_s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_states_and_samplers_and_nothing_else() {
        let state = CheckpointPath::State { run: "r-0".to_owned(), name: "last".to_owned() };
        assert_eq!(CheckpointPath::parse("tinker://r-0/weights/last").unwrap(), state);
        let sampler = CheckpointPath::Sampler { adapter: "tinker-r-0-last".to_owned() };
        assert_eq!(CheckpointPath::parse("tinker://r-0/sampler_weights/last").unwrap(), sampler);
        for path in ["", "r/weights/a", "tinker://r/weights", "tinker://r/weights/a/b", "tinker://r/other/a"]
        {
            CheckpointPath::parse(path).unwrap_err();
        }
        for name in ["..", ".a", "", "a/b", "a~1", "a:b", "ä", &"a".repeat(129)] {
            CheckpointPath::parse(&format!("tinker://r/weights/{name}")).unwrap_err();
        }
    }

    #[test]
    fn no_name_is_that_of_a_snapshot() {
        assert_eq!(run_of_snapshot(&snapshot("r-0", 7)), Some("r-0"));
        assert_eq!(run_of_snapshot(&adapter("r-0", checked("a-7").unwrap())), None);
        assert_eq!(run_of_snapshot("pirate~1"), None);
    }

    #[test]
    fn adapters_of_runs_are_known_by_their_names() {
        let session = "0123456789abcdef0123456789abcdef";
        let run = format!("{session}-7");
        assert_eq!(sampler_of(&adapter(&run, "a-1")), Some((run.as_str(), "a-1")));
        let others =
            [snapshot(&run, 3), format!("tinker-{session}-a"), "tinker-7-a".to_owned(), "pirate".to_owned()];
        assert!(others.iter().all(|name| sampler_of(name).is_none()), "{others:?}");
        assert_eq!(export_of(&export(&run, "a-1")), Some((run.as_str(), "a-1")));
        assert!(
            [export(&run, "a"), adapter(&run, "a"), snapshot(&run, 1)].iter().all(|name| is_of_run(name))
        );
        let peoples = ["tinker-x~y", "tinker-toy", "pirate", &format!("tinker-{session}-7")];
        assert!(!peoples.iter().any(|name| is_of_run(name)));
    }

    #[test]
    fn what_is_kept_for_a_time_is_kept_an_hour_to_ten_years() {
        assert_eq!(checked_ttl(None).unwrap(), None);
        assert_eq!(checked_ttl(Some(3600)).unwrap(), Some(3600));
        for ttl_s in [0, 3599, u64::MAX] {
            assert!(checked_ttl(Some(ttl_s)).unwrap_err().message.contains("1 hour"));
        }
    }
}
