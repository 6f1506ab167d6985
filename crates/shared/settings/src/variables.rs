//! Lists every environment variable of Holobiont, and refuses unknown variables with its prefix.
//!
//! A setting's variable follows from its declaration. All other variables are listed here with the program
//! that reads them.

use std::collections::BTreeSet;

use crate::{PICKER, Setting, all};

/// Prefix of every environment variable of Holobiont.
pub const PREFIX: &str = "HOLOBIONT_";

/// Prefix of `HOLOBIONT_ADAPTERS_<NAME>`, the directory of the adapter `<NAME>`, whose case is kept.
pub const ADAPTERS: &str = "HOLOBIONT_ADAPTERS_";

/// Variables that are not settings of a deployment, without their prefix, by the programs that read them.
const OTHERS: &[(&str, &[&str])] = &[
    (
        "`holobiont`: where models and state live, the gateway to talk to, and the key to show it",
        &["HOME", "URL", "API_KEY"],
    ),
    ("`holobiont-client` and the Python package: the executor to rent layers of", &["EXECUTOR"]),
    (
        "base-executor, lora-worker, gateway and holobiont-trainer: where they find each other, and what `up` decides for them",
        &[
            "SOCKET",
            "EXECUTORS",
            "WORKER_SOCKET",
            "TRAINER_SOCKET",
            "WORKER_INVOCATION",
            "MAX_WORKERS",
            "EXPECTED_WORKERS",
            "ENGINE",
            "LAYERS",
            "WEIGHT_READS",
            "WEIGHT_DISK_GBPS",
        ],
    ),
    ("`holobiont up --detach`: the process behind", &["DETACHED"]),
    (
        "deploy/launch and the scripts: the folder of the programs, and tools to use",
        &[
            "PROGRAMS",
            "BASE_EXECUTOR",
            "LLAMA_CPP",
            "ENVOY",
            "TORCH_PYTHON",
            "PEER_SDIST",
            "PUBLISHED_TEMPLATES",
            "PEER_JOBS",
            "LOAD_VENV",
            "EVAL_VENV",
            "CUDA_LIBRARIES",
            "CHECK_INSIDE",
            "FUZZ_SEED",
            "FUZZ_SECONDS",
            "FUZZ_TARGET",
        ],
    ),
    (
        "tests and benchmarks",
        &[
            "TEST_MODEL",
            "TEST_ROOT",
            "HOSTS",
            "REQUIRE_AMX",
            "REQUIRE_CUDA",
            "FAILPOINTS",
            "SEED",
            "LEDGER",
            "PROMPTS",
            "SPECULATION",
            "DRAFTED_DEATHS",
            "KILLS",
            "EXECUTOR_KILLS",
            "FLEET_FAULTS",
            "TUNE_KILLS",
            "TENANTS",
            "RECEIPTS",
            "PLACES",
            "WRITE_GUIDE",
            "WORKER_FAULTS",
            "SPLIT_FAULTS",
            "SCREENSHOTS",
            "CHURN",
            "STOPS_MS",
            "STORM_S",
            "SOAK_S",
            "ANSWER",
            "CONTEXT",
        ],
    ),
];

/// Error for a variable with our prefix that no program reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("nothing reads the environment variable {name}; did you mean {nearest}?")]
pub struct UnknownVariable {
    /// Name of the variable in the environment.
    pub name: String,
    /// Known variable with the most similar name.
    pub nearest: String,
}

/// Meaning of an environment variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Variable {
    /// Value of a setting of the deployment.
    Setting(&'static Setting),
    /// Directory of the adapter with this name.
    Adapter(String),
    /// Variable without our prefix, or one that is not part of a deployment's configuration.
    Other,
}

impl Variable {
    /// Returns the meaning of the variable `name`.
    ///
    /// # Errors
    /// Fails if `name` has the prefix [`PREFIX`] and is unknown.
    pub fn named(name: &str) -> Result<Self, UnknownVariable> {
        let Some(own) = name.strip_prefix(PREFIX) else { return Ok(Self::Other) };
        let is_its = |setting: &&Setting| {
            setting.variable() == name || setting.old_variable().as_deref() == Some(name)
        };
        if let Some(setting) = all().find(is_its) {
            return Ok(Self::Setting(setting));
        }
        if PICKER.iter().any(|setting| setting.variable() == name) {
            return Ok(Self::Other);
        }
        if OTHERS.iter().any(|(_, names)| names.contains(&own)) {
            return Ok(Self::Other);
        }
        match name.strip_prefix(ADAPTERS).filter(|adapter| !adapter.is_empty()) {
            Some(adapter) => Ok(Self::Adapter(adapter.to_owned())),
            None => Err(UnknownVariable { name: name.to_owned(), nearest: nearest(name) }),
        }
    }
}

/// Refuses an environment with a variable that has our prefix and that no program reads.
///
/// # Errors
/// Returns the first such variable in alphabetical order.
pub fn check_environment() -> Result<(), UnknownVariable> {
    let names: BTreeSet<String> =
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    names.iter().try_for_each(|name| Variable::named(name).map(|_| ()))
}

/// Returns the known variable most similar to `name`, which may also consist of a section and a field.
fn nearest(name: &str) -> String {
    let in_file = |setting: &Setting| {
        format!("{PREFIX}{}_{}", setting.section.to_ascii_uppercase(), setting.field.to_ascii_uppercase())
    };
    let settings = all().chain(PICKER).flat_map(|setting| {
        [(setting.variable(), setting.variable()), (in_file(setting), setting.variable())]
    });
    let others = OTHERS.iter().flat_map(|(_, names)| names.iter()).map(|own| format!("{PREFIX}{own}"));
    let known = settings.chain(others.map(|name| (name.clone(), name)));
    let nearest = known.min_by_key(|(like, _)| strsim::damerau_levenshtein(like, name));
    nearest.map(|(_, variable)| variable).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_nobody_reads_is_answered_with_the_nearest_one() {
        for (name, nearest) in [
            ("HOLOBIONT_API_KEYFILE", "HOLOBIONT_API_KEY_FILE"),
            ("HOLOBIONT_GATEWAY_API_KEY_FILE", "HOLOBIONT_API_KEY_FILE"),
            ("HOLOBIONT_EXECUTOR_CORES", "HOLOBIONT_CORES"),
            ("HOLOBIONT_EXECUTOR_KV_BYTE", "HOLOBIONT_KV_BYTES"),
            ("HOLOBIONT_WORKERS_COUNT", "HOLOBIONT_WORKERS"),
            ("HOLOBIONT_MODEL_SERVED_NAME", "HOLOBIONT_SERVED_MODEL_NAME"),
            ("HOLOBIONT_URLL", "HOLOBIONT_URL"),
        ] {
            assert_eq!(Variable::named(name).unwrap_err().nearest, nearest, "{name}");
        }
    }

    #[test]
    fn every_setting_has_a_variable_of_its_own() {
        let variables: BTreeSet<String> = all().map(Setting::variable).collect();
        assert_eq!(variables.len(), all().count());
        for setting in all() {
            assert_eq!(Variable::named(&setting.variable()), Ok(Variable::Setting(setting)));
        }
        assert_eq!(Variable::named("HOLOBIONT_ADAPTERS_a-b"), Ok(Variable::Adapter("a-b".into())));
        assert_eq!(Variable::named("PATH"), Ok(Variable::Other));
    }
}
