//! Names of what is kept of models: `tinker://RUN/weights/NAME` is a state, and `tinker://RUN/sampler_weights/NAME` an adapter
//! like any other.

use training_protocol::session::Refusal;

/// Longest name, in bytes.
const MAX_NAME_BYTES: usize = 128;
/// What stands between the name of a run and the number of a snapshot; no name holds it.
const SNAPSHOT: char = '~';

/// What a path names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// A state to go on from.
    State {
        /// Of which model.
        run: String,
        /// By its name.
        name: String,
    },
    /// An adapter of this name.
    Sampler {
        /// In the registry.
        adapter: String,
    },
}

impl Kept {
    /// What `path` names.
    ///
    /// # Errors
    /// It is no path.
    pub fn parse(path: &str) -> Result<Self, Refusal> {
        let wrong = || {
            Refusal::user(format!(
                "'{}' is no path; use tinker://RUN/weights/NAME, as save_state gives it, or \
                 tinker://RUN/sampler_weights/NAME, as save_weights_for_sampler does",
                path.chars().take(MAX_NAME_BYTES).collect::<String>()
            ))
        };
        let parts: Vec<&str> = path.strip_prefix("tinker://").ok_or_else(wrong)?.split('/').collect();
        let [run, kind, name] = parts[..] else { return Err(wrong()) };
        let (run, name) = (checked(run)?, checked(name)?);
        match kind {
            "weights" => Ok(Self::State { run: run.to_owned(), name: name.to_owned() }),
            "sampler_weights" => Ok(Self::Sampler { adapter: adapter(run, name) }),
            _ => Err(wrong()),
        }
    }
}

/// The run and the name of the state that `path` names.
///
/// # Errors
/// It names none.
pub fn state(path: &str) -> Result<(String, String), Refusal> {
    match Kept::parse(path)? {
        Kept::State { run, name } => Ok((run, name)),
        Kept::Sampler { .. } => {
            Err(Refusal::user("weights for samplers cannot be trained on: load what save_state kept"))
        }
    }
}

/// The name if it can be one: it becomes part of a path and of an adapter's name.
///
/// # Errors
/// It cannot.
pub fn checked(name: &str) -> Result<&str, Refusal> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.starts_with('.') && name.chars().all(plain) {
        return Ok(name);
    }
    Err(Refusal::user(format!(
        "'{}' cannot be a name: use 1 to {MAX_NAME_BYTES} letters, digits, '.', '_' and '-', and no '.' at the beginning",
        name.chars().take(MAX_NAME_BYTES).collect::<String>()
    )))
}

/// What the adapter of a run's sampler is called.
#[must_use]
pub fn adapter(run: &str, name: &str) -> String {
    format!("tinker-{run}-{name}")
}

/// What the adapter of a sampler without a name is called.
#[must_use]
pub fn snapshot(run: &str, number: u64) -> String {
    format!("tinker-{run}{SNAPSHOT}{number}")
}

/// Which run a snapshot is of, if that is what the adapter is.
#[must_use]
pub fn run_of_snapshot(adapter: &str) -> Option<&str> {
    adapter.strip_prefix("tinker-")?.split_once(SNAPSHOT).map(|(run, _)| run)
}

/// Which run an adapter is served of, and under which name, if one of a tenant's choice.
#[must_use]
pub fn sampler_of(adapter: &str) -> Option<(&str, &str)> {
    const SESSION_DIGITS: usize = 32;
    let of_run = adapter.strip_prefix("tinker-")?;
    let (session, rest) = of_run.split_at_checked(SESSION_DIGITS)?;
    let (number, name) = rest.strip_prefix('-')?.split_once('-')?;
    let is_run = session.bytes().all(|byte| byte.is_ascii_hexdigit()) && number.parse::<u64>().is_ok();
    is_run.then(|| (&of_run[..SESSION_DIGITS + 1 + number.len()], name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_states_and_samplers_and_nothing_else() {
        let state = Kept::State { run: "r-0".to_owned(), name: "last".to_owned() };
        assert_eq!(Kept::parse("tinker://r-0/weights/last").unwrap(), state);
        let sampler = Kept::Sampler { adapter: "tinker-r-0-last".to_owned() };
        assert_eq!(Kept::parse("tinker://r-0/sampler_weights/last").unwrap(), sampler);
        for path in ["", "r/weights/a", "tinker://r/weights", "tinker://r/weights/a/b", "tinker://r/other/a"]
        {
            Kept::parse(path).unwrap_err();
        }
        for name in ["..", ".a", "", "a/b", "a~1", "a:b", "ä", &"a".repeat(129)] {
            Kept::parse(&format!("tinker://r/weights/{name}")).unwrap_err();
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
    }
}
