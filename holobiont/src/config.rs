//! One TOML file describes a deployment.
//!
//! Every field may be left out. Three layers say what a field is, the higher wins: flags, the environment
//! (`HOLOBIONT_<SECTION>_<FIELD>`), the file. A key nobody knows is refused by name, never skipped. Limits that
//! nobody set are not passed on: their defaults live in the process that owns them.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use serde::{Deserialize, Deserializer, de};

use crate::exit::{Exit, Explain};

/// Where the gateway listens unless told otherwise.
pub(crate) const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// How long running requests get at a stop unless told otherwise.
const DEFAULT_GRACE_MS: u64 = 10_000;

const PREFIX: &str = "HOLOBIONT_";

/// Why a deployment's configuration was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the deployment file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not a deployment; the source names key and line.
    #[error("the deployment file {path} is not valid")]
    File {
        /// The file.
        path: PathBuf,
        /// Key, line and what was expected there.
        source: Box<toml::de::Error>,
    },
    /// An environment variable is not a setting, or its value is wrong.
    #[error("the environment variable {name} is not valid")]
    Environment {
        /// The variable.
        name: String,
        /// What was expected.
        source: Box<toml::de::Error>,
    },
}

impl Explain for ConfigError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Exit::NotFound,
            Self::Read { .. } => Exit::Failed,
            Self::File { .. } | Self::Environment { .. } => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Read { .. } => None,
            Self::File { .. } => Some("correct or remove that line (the README lists every field)".into()),
            Self::Environment { name, .. } => Some(format!("unset {name}")),
        }
    }
}

/// Declares sections whose fields are all optional, with the rule that lays one layer over another.
macro_rules! sections {
    ($( $(#[$doc:meta])* $section:ident { $( $(#[$field_doc:meta])* $field:ident: $type:ty, )* } )*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub(crate) struct $section {
            $( $(#[$field_doc])* #[serde(deserialize_with = "setting")] pub(crate) $field: Option<$type>, )*
        }

        impl $section {
            /// The names of the fields, for the test that finds them in the README.
            #[cfg(test)]
            const FIELDS: &[&str] = &[$( stringify!($field) ),*];

            /// Keeps what is set here and takes the rest from `lower`.
            fn or(self, lower: Self) -> Self {
                Self { $( $field: self.$field.or(lower.$field), )* }
            }
        }
    )* };
}

sections! {
    /// `[model]`: what is served.
    ModelSection {
        /// A path, a name in the models directory, or a hub name.
        name: String,
        /// What clients call the base model; by default its file's name.
        served_name: String,
        /// Longest sequence in tokens; by default the model's own limit.
        context_length: u32,
    }

    /// `[executor]`: the process that owns the weights.
    ExecutorSection {
        /// Cores it computes on, as `0-3,8`.
        cores: String,
        /// Memory for keys and values.
        kv_bytes: ByteCount,
        /// How keys and values are stored.
        kv_dtype: String,
        /// Memory for adapters.
        adapter_bytes: ByteCount,
        /// Most sequences that run at once.
        max_running: u32,
        /// Most requests that wait.
        max_waiting: u32,
        /// Most prompt tokens of one step.
        chunk_tokens: u32,
    }

    /// `[gateway]`: the process that speaks HTTP.
    GatewaySection {
        /// Address and port; port 0 takes any free one.
        listen: SocketAddr,
        /// Adapters are loaded over HTTP only from below this directory.
        adapter_root: PathBuf,
        /// File with the API keys.
        api_key_file: PathBuf,
        /// Longest body of a request.
        max_body_bytes: ByteCount,
        /// Most sequences under way at once.
        max_sequences: u32,
        /// Threads for HTTP.
        threads: u32,
        /// Listens beyond loopback without keys.
        insecure: bool,
    }

    /// `[deployment]`: the processes together.
    DeploymentSection {
        /// Directory for state; one deployment each.
        state: PathBuf,
        /// `human` or `json`.
        log_format: LogFormat,
        /// How long running requests get at a stop.
        grace_ms: u64,
    }
}

/// A deployment, or one layer of its description.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// `[model]`.
    pub(crate) model: ModelSection,
    /// `[executor]`.
    pub(crate) executor: ExecutorSection,
    /// `[gateway]`.
    pub(crate) gateway: GatewaySection,
    /// `[deployment]`.
    pub(crate) deployment: DeploymentSection,
    /// `[adapters]`: directories by name.
    pub(crate) adapters: BTreeMap<String, PathBuf>,
}

impl Config {
    /// Reads a deployment file. Its relative paths are relative to its directory.
    pub(crate) fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let mut layer: Self = toml::from_str(&text)
            .map_err(|source| ConfigError::File { path: path.to_owned(), source: Box::new(source) })?;
        layer.resolve_paths(path.parent().unwrap_or(Path::new("")));
        Ok(layer)
    }

    /// Reads the layer that environment variables make. Variables without a section's name are somebody else's.
    pub(crate) fn from_environment(
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let mut layer = Self::default();
        for (name, value) in variables {
            let Some((section, field)) = section_and_field(&name) else {
                continue;
            };
            let entry = toml::Table::from_iter([(field, toml::Value::String(value))]);
            let document = toml::Table::from_iter([(section, toml::Value::Table(entry))]);
            let one = Self::deserialize(document)
                .map_err(|source| ConfigError::Environment { name, source: Box::new(source) })?;
            layer = layer.or(one);
        }
        Ok(layer)
    }

    /// Keeps what is set here and takes the rest from `lower`.
    pub(crate) fn or(self, lower: Self) -> Self {
        let mut adapters = lower.adapters;
        adapters.extend(self.adapters);
        Self {
            model: self.model.or(lower.model),
            executor: self.executor.or(lower.executor),
            gateway: self.gateway.or(lower.gateway),
            deployment: self.deployment.or(lower.deployment),
            adapters,
        }
    }

    /// Where the gateway listens.
    pub(crate) fn listen(&self) -> SocketAddr {
        let default = || SocketAddr::from(([127, 0, 0, 1], 8080));
        self.gateway.listen.unwrap_or_else(default)
    }

    /// How long running requests get at a stop.
    pub(crate) fn grace(&self) -> Duration {
        Duration::from_millis(self.deployment.grace_ms.unwrap_or(DEFAULT_GRACE_MS))
    }

    fn resolve_paths(&mut self, base: &Path) {
        let paths =
            [&mut self.gateway.adapter_root, &mut self.gateway.api_key_file, &mut self.deployment.state];
        let adapters = self.adapters.values_mut();
        for path in paths.into_iter().flatten().chain(adapters) {
            *path = base.join(&*path);
        }
        // A model's name may be a name and not a path: it is a path only if something is there.
        if let Some(name) = &mut self.model.name
            && base.join(&*name).exists()
        {
            *name = base.join(&*name).to_string_lossy().into_owned();
        }
    }
}

/// `HOLOBIONT_EXECUTOR_CORES` is field `cores` of section `executor`; adapters keep their names as written.
fn section_and_field(variable: &str) -> Option<(String, String)> {
    let (section, field) = variable.strip_prefix(PREFIX)?.split_once('_')?;
    match section {
        "MODEL" | "EXECUTOR" | "GATEWAY" | "DEPLOYMENT" => {
            Some((section.to_ascii_lowercase(), field.to_ascii_lowercase()))
        }
        "ADAPTERS" => Some(("adapters".into(), field.into())),
        _ => None,
    }
}

/// A number of bytes: `1048576`, `1 MiB` or `1 MB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteCount(pub(crate) u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let factor: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "kB" => 1_000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            other => {
                return Err(format!("`{other}` is no unit of bytes; write B, KiB, MiB, GiB, kB, MB or GB"));
            }
        };
        let number: u64 = number.parse().map_err(|_| format!("`{text}` is no number of bytes"))?;
        number
            .checked_mul(factor)
            .map(Self)
            .ok_or_else(|| format!("`{text}` is more bytes than can be counted"))
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The form of the processes' logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            other => Err(format!("`{other}` is no log format; write human or json")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Human => "human",
            Self::Json => "json",
        })
    }
}

/// Reads a field through its `FromStr`, whether TOML or the environment wrote it: `8`, `"8"` and `true` all work.
fn setting<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr,
    T::Err: fmt::Display,
{
    struct Scalar;

    impl de::Visitor<'_> for Scalar {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string, a number or a boolean")
        }
        fn visit_str<E>(self, text: &str) -> Result<String, E> {
            Ok(text.to_owned())
        }
        fn visit_i64<E>(self, number: i64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_bool<E>(self, flag: bool) -> Result<String, E> {
            Ok(flag.to_string())
        }
    }

    let text = deserializer.deserialize_any(Scalar)?;
    text.parse().map(Some).map_err(|cause: T::Err| de::Error::custom(format!("`{text}`: {cause}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::why;

    fn file(text: &str) -> Result<Config, ConfigError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deployment.toml");
        std::fs::write(&path, text).unwrap();
        Config::from_file(&path)
    }

    fn environment(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_environment(variables.iter().map(|(name, value)| (name.to_string(), value.to_string())))
    }

    #[test]
    fn an_empty_file_is_a_deployment_of_defaults() {
        let config = file("").unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.listen().to_string(), DEFAULT_LISTEN);
    }

    #[test]
    fn the_readme_lists_every_setting_of_every_section() {
        let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).unwrap();
        let sections = [
            ("model", ModelSection::FIELDS),
            ("executor", ExecutorSection::FIELDS),
            ("gateway", GatewaySection::FIELDS),
            ("deployment", DeploymentSection::FIELDS),
        ];
        for (section, fields) in sections {
            let start = readme.find(&format!("| `[{section}]` |")).unwrap();
            let rows = readme[start..].lines().enumerate();
            let rows = rows.take_while(|(row, line)| *row == 0 || line.starts_with("| |"));
            let listed: Vec<_> = rows.map(|(_, line)| line.split('|').nth(2).unwrap().trim()).collect();
            let expected: Vec<_> = fields.iter().map(|field| format!("`{field}`")).collect();
            assert_eq!(listed, expected, "[{section}]");
        }
    }

    #[test]
    fn a_file_may_set_every_section() {
        let text = r#"
            [model]
            name = "smollm2"
            context_length = 2048
            [executor]
            cores = "0-1"
            kv_bytes = "64 MiB"
            max_running = 8
            [gateway]
            listen = "0.0.0.0:9000"
            insecure = true
            [deployment]
            log_format = "json"
            grace_ms = 500
            [adapters]
            pirate = "/adapters/pirate"
        "#;
        let config = file(text).unwrap();
        assert_eq!(config.model.context_length, Some(2048));
        assert_eq!(config.executor.kv_bytes, Some(ByteCount(64 << 20)));
        assert_eq!(config.listen().port(), 9000);
        assert_eq!(config.gateway.insecure, Some(true));
        assert_eq!(config.deployment.log_format, Some(LogFormat::Json));
        assert_eq!(config.adapters["pirate"], PathBuf::from("/adapters/pirate"));
    }

    #[test]
    fn an_unknown_key_is_refused_by_name_and_line() {
        let error = file("[executor]\ncores = \"0\"\nkv_byte = 3\n").unwrap_err();
        let why = why(&error).unwrap();
        assert!(why.contains("line 3") && why.contains("kv_byte") && why.contains("kv_bytes"), "{why}");
        assert_eq!(error.exit(), Exit::Usage);
    }

    #[test]
    fn an_unknown_section_is_refused_by_name_and_line() {
        let why = why(&file("\n[executer]\n").unwrap_err()).unwrap();
        assert!(why.contains("line 2") && why.contains("executer"), "{why}");
    }

    #[test]
    fn a_value_that_cannot_be_is_refused_by_line() {
        for (text, word) in [
            ("[executor]\nkv_bytes = \"3 parsecs\"", "parsecs"),
            ("[executor]\nmax_running = -1", "-1"),
            ("[gateway]\nlisten = \"nowhere\"", "nowhere"),
            ("[deployment]\nlog_format = \"xml\"", "xml"),
            ("[executor]\nmax_running = [1]", "sequence"),
        ] {
            let why = why(&file(text).unwrap_err()).unwrap();
            assert!(why.contains("line 2") && why.contains(word), "{text}: {why}");
        }
    }

    #[test]
    fn the_environment_overrides_the_file_and_flags_override_both() {
        let below = file("[executor]\ncores = \"0\"\nmax_running = 4\nmax_waiting = 9").unwrap();
        let environment =
            environment(&[("HOLOBIONT_EXECUTOR_CORES", "1"), ("HOLOBIONT_EXECUTOR_MAX_RUNNING", "5")])
                .unwrap();
        let mut flags = Config::default();
        flags.executor.cores = Some("2".into());
        let config = flags.or(environment).or(below);
        assert_eq!(config.executor.cores.as_deref(), Some("2"));
        assert_eq!(config.executor.max_running, Some(5));
        assert_eq!(config.executor.max_waiting, Some(9));
    }

    #[test]
    fn adapters_of_all_layers_are_joined_and_the_higher_layer_wins_a_name() {
        let below = file("[adapters]\na = \"/low/a\"\nb = \"/low/b\"").unwrap();
        let above = environment(&[("HOLOBIONT_ADAPTERS_b", "/high/b"), ("HOLOBIONT_ADAPTERS_c", "/high/c")]);
        let adapters = above.unwrap().or(below).adapters;
        let paths: Vec<_> = adapters.values().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/low/a", "/high/b", "/high/c"]);
    }

    #[test]
    fn an_environment_variable_that_is_no_setting_is_refused_by_name() {
        let error = environment(&[("HOLOBIONT_EXECUTOR_KV_BYTE", "3")]).unwrap_err();
        assert!(error.to_string().contains("HOLOBIONT_EXECUTOR_KV_BYTE"));
        assert!(why(&error).unwrap().contains("kv_bytes"));
        let error = environment(&[("HOLOBIONT_DEPLOYMENT_GRACE_MS", "soon")]).unwrap_err();
        assert!(why(&error).unwrap().contains("soon"));
    }

    #[test]
    fn variables_of_no_section_are_left_alone() {
        let variables =
            [("HOLOBIONT_HOME", "/h"), ("HOLOBIONT_URL", "u"), ("HOLOBIONT_API_KEY", "k"), ("PATH", "")];
        assert_eq!(environment(&variables).unwrap(), Config::default());
    }

    #[test]
    fn paths_in_a_file_are_relative_to_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deployment.toml");
        let text = "[model]\nname = \"org/name\"\n[deployment]\nstate = \"s\"\n[adapters]\na = \"x/a\"";
        std::fs::write(&path, text).unwrap();
        let config = Config::from_file(&path).unwrap();
        assert_eq!(config.deployment.state, Some(directory.path().join("s")));
        assert_eq!(config.adapters["a"], directory.path().join("x/a"));
        assert_eq!(config.model.name.as_deref(), Some("org/name"));
    }

    #[test]
    fn byte_counts_are_read_with_and_without_units_and_never_wrap() {
        assert_eq!("12".parse(), Ok(ByteCount(12)));
        assert_eq!("2GiB".parse(), Ok(ByteCount(2 << 30)));
        assert_eq!(" 3 kB ".parse(), Ok(ByteCount(3000)));
        for wrong in ["", "MiB", "1.5 GiB", "-3", "99999999999 GiB"] {
            assert!(wrong.parse::<ByteCount>().is_err(), "{wrong:?}");
        }
    }
}
