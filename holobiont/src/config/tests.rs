//! What configurations are taken, refused, and laid over each other.

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
        ("workers", WorkersSection::FIELDS),
        ("layers", LayersSection::FIELDS),
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
fn a_process_may_die_five_times_unless_the_file_says_otherwise() {
    let policy = |max_deaths, ms| RestartPolicy { max_deaths, first_delay: Duration::from_millis(ms) };
    assert_eq!(Config::default().restarts(), policy(5, 100));
    let config = file("[deployment]\nmax_deaths = 3\nrestart_delay_ms = 7").unwrap();
    assert_eq!(config.restarts(), policy(3, 7));
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
        ("[deployment]\nmax_deaths = 0", "zero"),
        ("[executor]\ncold_start = \"warm\"", "on-demand"),
        ("[executor]\nlink_gbps = 0", "gigabits"),
        ("[executor]\nlink_gbps = nan", "gigabits"),
        ("[workers]\ncores = \"3-1\"", "0-3,8"),
        ("[workers]\ncount = 65", "64"),
    ] {
        let why = why(&file(text).unwrap_err()).unwrap();
        assert!(why.contains("line 2") && why.contains(word), "{text}: {why}");
    }
}

#[test]
fn the_environment_overrides_the_file_and_flags_override_both() {
    let below = file("[executor]\ncores = \"0\"\nmax_running = 4\nmax_waiting = 9").unwrap();
    let environment =
        environment(&[("HOLOBIONT_EXECUTOR_CORES", "1"), ("HOLOBIONT_EXECUTOR_MAX_RUNNING", "5")]).unwrap();
    let mut flags = Config::default();
    flags.executor.cores = Some("2".into());
    let config = flags.or(environment).or(below);
    assert_eq!(config.executor.cores.as_deref(), Some("2"));
    assert_eq!(config.executor.max_running, Some(5));
    assert_eq!(config.executor.max_waiting, Some(9));
}

#[test]
fn workers_and_the_device_are_set_in_every_layer() {
    let below = "[executor]\ncold_start = \"on-demand\"\nlink_gbps = 0.5\ndevice_adapter_bytes = \"1 MiB\"\n\
        [workers]\ncores = \"2-3\"\ncount = 2\nspin_us = 7";
    let below = file(below).unwrap();
    assert_eq!(below.workers.cores.as_ref().unwrap().to_string(), "2-3");
    assert_eq!(below.executor.link_gbps.unwrap().to_string(), "0.5");
    let above = environment(&[("HOLOBIONT_WORKERS_COUNT", "1"), ("HOLOBIONT_EXECUTOR_COLD_START", "cached")]);
    let mut flags = Config::default();
    flags.workers.count = Some(WorkerCount(0));
    let config = flags.or(above.unwrap()).or(below);
    assert_eq!((config.workers.count, config.workers.spin_us), (Some(WorkerCount(0)), Some(7)));
    assert_eq!(config.executor.cold_start, Some(ColdStart::Cached));
    assert_eq!(config.executor.device_adapter_bytes, Some(ByteCount(1 << 20)));
}

#[test]
fn a_device_is_named_by_its_kind_and_number() {
    for (text, device) in [("cpu", Device::Cpu), ("cuda:0", Device::Cuda(0)), ("cuda:3", Device::Cuda(3))] {
        assert_eq!((text.parse(), device.to_string().as_str()), (Ok(device), text));
    }
    assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
    for wrong in ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:+1", "cuda:99999999999"] {
        assert!(wrong.parse::<Device>().is_err(), "{wrong:?}");
    }
    let error = file("[executor]\ndevice = \"gpu\"").unwrap_err();
    assert!(why(&error).unwrap().contains("cuda:1"), "{error:?}");
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

#[test]
fn a_file_that_no_deployment_needs_is_not_read_to_its_end() {
    let error = file(&"# and so on\n".repeat(1 << 17)).unwrap_err();
    let why = why(&error).unwrap();
    assert!(why.contains("longer than 1 MiB"), "{why}");
    assert!(matches!(Config::from_file(Path::new("/dev/zero")), Err(ConfigError::Read { .. })));
}

#[test]
fn lists_of_cores_are_read_like_the_executor_reads_them_and_written_back() {
    for (text, written) in [("0-2,5", "0-2,5"), ("3, 1 ,2", "1-3"), ("7", "7")] {
        assert_eq!(text.parse::<CoreList>().unwrap().to_string(), written);
    }
    for wrong in ["", "x", "3-1", "0-", "0-99999999999", "0-4000000000"] {
        assert!(wrong.parse::<CoreList>().is_err(), "{wrong:?}");
    }
}
