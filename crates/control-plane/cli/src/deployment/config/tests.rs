//! Tests which configurations are accepted and refused, and how layers are combined.

use settings::{ByteCount, ColdStart, LogFormat, WorkerCount};

use super::*;
use crate::exit::why;

fn file(text: &str) -> Result<DeploymentConfig, DeploymentConfigError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("deployment.toml");
    std::fs::write(&path, text).unwrap();
    DeploymentConfig::from_file(&path)
}

fn environment(variables: &[(&str, &str)]) -> Result<DeploymentConfig, DeploymentConfigError> {
    DeploymentConfig::from_environment(
        variables.iter().map(|(name, value)| (name.to_string(), value.to_string())),
    )
}

#[test]
fn an_empty_file_is_a_deployment_of_defaults() {
    let config = file("").unwrap();
    assert_eq!(config, DeploymentConfig::default());
    assert_eq!(config.listen().to_string(), "127.0.0.1:8080");
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
fn each_base_has_its_model_and_overrides_the_common_sections() {
    let text = r#"
        [executor]
        max_running = 8
        [memory]
        device = "1GiB"
        [adapters]
        pirate = "/adapters/pirate"
        [[base]]
        name = "small"
        model = "smollm2"
        sleep_after_s = 60
        [[base]]
        name = "coder"
        model = "org/coder"
        served_name = "Coder"
        max_running = 4
        memory.device = "2GiB"
        tool_call_parser = "hermes"
        adapters = { sql = "/adapters/sql" }
        [[base.executor]]
        name = "left"
        [[base.executor]]
        name = "right"
    "#;
    let config = file(text).unwrap();
    let members = config.members();
    let names: Vec<_> = members.iter().map(|member| member.name.as_deref().unwrap()).collect();
    assert_eq!(names, ["small", "coder-left", "coder-right"]);
    let of = |index: usize| &members[index].config;
    assert_eq!((of(0).executor.max_running, of(1).executor.max_running), (Some(8), Some(4)));
    assert_eq!(of(1).memory.device, Some(ByteCount(2 << 30)));
    assert_eq!((of(0).layers.local, of(1).layers.local), (None, Some(false)));
    let bases = config.bases();
    let served: Vec<_> =
        bases.iter().map(|(_, config)| config.model.served_name.as_deref().unwrap()).collect();
    assert_eq!(served, ["small", "Coder"]);
    let adapters: Vec<_> = bases.iter().flat_map(|(_, config)| config.adapters.keys()).collect();
    assert_eq!(adapters, ["pirate", "sql"]);
    assert_eq!(bases[1].1.gateway.tool_call_parser, Some("hermes".parse().unwrap()));
}

#[test]
fn bases_without_a_name_of_their_own_or_beside_another_model_are_refused_by_name() {
    let base = |name: &str| format!("[[base]]\nname = '{name}'\nmodel = 'm-{name}'\n");
    for (text, part) in [
        (base("a") + &base("a"), "two bases are called `a`"),
        (base("A"), "not `A`"),
        ("[[base]]\nname = 'a'".to_owned(), "`model` is missing"),
        (base("a") + "colour = 1", "colour"),
        (base("a") + "[[base.executor]]\nname = 'x'\naddress = 'h:1'", "not possible"),
    ] {
        let why = why(&file(&text).unwrap_err()).unwrap();
        assert!(why.contains(part), "{part} is not in {why}");
    }
    for (text, part) in [
        (base("a") + "[model]\nname = 'm'", "set beside [[base]]"),
        (base("a") + "[[executor]]\nname = 'x'", "[[base.executor]]"),
        (base("a") + "[gateway]\nregistry = 'postgres://h/d'", "registry"),
    ] {
        let why = file(&text).unwrap().check_bases().unwrap_err().to_string();
        assert!(why.contains(part), "{part} is not in {why}");
    }
}

#[test]
fn a_process_may_die_five_times_unless_the_file_says_otherwise() {
    let policy = |max_crashes_per_min, ms| RestartPolicy {
        max_crashes_per_min,
        first_delay: Duration::from_millis(ms),
    };
    assert_eq!(DeploymentConfig::default().restarts(), policy(5, 100));
    let config = file("[deployment]\nmax_crashes_per_min = 3\nrestart_delay_ms = 7").unwrap();
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
        ("[executor]\nmax_running = [1]", "expected a string"),
        ("[executor]\nmax_running = [\"1\", \"2\"]", "1 2"),
        ("[executor]\ndevices = [\"cpu:0\", \"cuda:1\"]", "one executor for each GPU"),
        ("[deployment]\nmax_crashes_per_min = 0", "zero"),
        ("[lab]\ncold_start = \"warm\"", "on-demand"),
        ("[lab]\nlink_gbps = 0", "gigabits"),
        ("[lab]\nlink_gbps = nan", "gigabits"),
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
    let environment = environment(&[("HOLOBIONT_CORES", "1"), ("HOLOBIONT_MAX_RUNNING", "5")]).unwrap();
    let mut flags = DeploymentConfig::default();
    flags.executor.common.cores = Some("2".parse().unwrap());
    let config = flags.or(environment).or(below);
    assert_eq!(config.executor.cores.as_ref().unwrap().to_string(), "2");
    assert_eq!(config.executor.max_running, Some(5));
    assert_eq!(config.executor.max_waiting, Some(9));
}

#[test]
fn workers_and_the_device_are_set_in_every_layer() {
    let below = "[lab]\ncold_start = \"on-demand\"\nlink_gbps = 0.5\n[executor]\ndevice_adapter_bytes = \"1 MiB\"\n\
        [workers]\ncores = \"2-3\"\ncount = 2\nspin_us = 7";
    let below = file(below).unwrap();
    assert_eq!(below.workers.cores.as_ref().unwrap().to_string(), "2-3");
    assert_eq!(below.lab.link_gbps.unwrap().to_string(), "0.5");
    let above = environment(&[("HOLOBIONT_WORKERS", "1"), ("HOLOBIONT_COLD_START", "cached")]);
    let mut flags = DeploymentConfig::default();
    flags.workers.count = Some(WorkerCount(0));
    let config = flags.or(above.unwrap()).or(below);
    assert_eq!((config.workers.count, config.workers.spin_us), (Some(WorkerCount(0)), Some(7)));
    assert_eq!(config.lab.cold_start, Some(ColdStart::Cached));
    assert_eq!(config.executor.device_adapter_bytes, Some(ByteCount(1 << 20)));
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
fn a_variable_that_nobody_reads_is_refused_with_the_nearest_one() {
    let error = environment(&[("HOLOBIONT_KV_BYTE", "3")]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("HOLOBIONT_KV_BYTE;") && text.contains("HOLOBIONT_KV_BYTES?"), "{text}");
    assert_eq!(error.exit(), Exit::Usage);
    let error = environment(&[("HOLOBIONT_GRACE_MS", "soon")]).unwrap_err();
    assert!(error.to_string().contains("HOLOBIONT_GRACE_MS") && why(&error).unwrap().contains("soon"));
}

#[test]
fn a_variable_of_the_services_means_the_same_here() {
    let config =
        environment(&[("HOLOBIONT_API_KEY_FILE", "/k"), ("HOLOBIONT_URL", "u"), ("PATH", "")]).unwrap();
    assert_eq!(config.gateway.api_key_file, Some(PathBuf::from("/k")));
}

#[test]
fn paths_in_a_file_are_relative_to_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("deployment.toml");
    let text = "[model]\nname = \"org/name\"\n[deployment]\nstate = \"s\"\n[adapters]\na = \"x/a\"";
    std::fs::write(&path, text).unwrap();
    let config = DeploymentConfig::from_file(&path).unwrap();
    assert_eq!(config.deployment.state, Some(directory.path().join("s")));
    assert_eq!(config.adapters["a"], directory.path().join("x/a"));
    assert_eq!(config.model.name.as_deref(), Some("org/name"));
}

#[test]
fn a_file_that_no_deployment_needs_is_not_read_to_its_end() {
    let error = file(&"# and so on\n".repeat(1 << 17)).unwrap_err();
    let why = why(&error).unwrap();
    assert!(why.contains("longer than 1 MiB"), "{why}");
    assert!(matches!(
        DeploymentConfig::from_file(Path::new("/dev/zero")),
        Err(DeploymentConfigError::Read { .. })
    ));
}

#[test]
fn several_executors_each_have_a_name_and_what_they_say_goes_before_what_holds_for_all() {
    let text = r#"
        memory = { disk = "1MiB", directory = "/h" }
        workers = { count = 2 }
        [[executor]]
        name = "left"
        cores = "0-1"
        workers.count = 0
        [[executor]]
        name = "right"
        memory.directory = "own"
    "#;
    let config = file(text).unwrap();
    let [left, right] = &config.members()[..] else { panic!("there are two") };
    assert_eq!((left.name.as_deref(), right.name.as_deref()), (Some("left"), Some("right")));
    assert_eq!(left.config.executor.cores.as_ref().unwrap().to_string(), "0-1");
    assert_eq!(
        (left.config.workers.count, right.config.workers.count),
        (Some(WorkerCount(0)), Some(WorkerCount(2)))
    );
    assert_eq!(left.config.memory.directory, Some("/h/left".into()));
    assert_eq!(right.config.memory.process.unwrap().to_string(), "1/2", "neither knows of the other's");
    assert!(right.config.memory.directory.as_ref().unwrap().is_absolute(), "relative to the file");
    let flags = environment(&[("HOLOBIONT_MAX_RUNNING", "3")]).unwrap();
    let over = flags.or(config);
    assert!(over.members().iter().all(|member| member.config.executor.max_running == Some(3)));
    assert_eq!(file("").unwrap().members()[0].name, None);
}

#[test]
fn an_executor_of_another_host_is_driven_and_not_started() {
    let text = "[[executor]]\nname = 'far'\naddress = 'gpu.example:7443'\n[[executor]]\nname = 'near'\n\
                [layers]\nlisten = '127.0.0.1:1'";
    let config = file(text).unwrap();
    let [near] = &config.members()[..] else { panic!("one is started here") };
    assert_eq!(near.config.memory.process, None, "it has this host to itself");
    assert_eq!((near.name.as_deref(), near.config.layers.listen.is_some()), (Some("near"), true));
    let elsewhere: Vec<_> = config.elsewhere().map(|(name, address)| (name, address.to_string())).collect();
    assert_eq!(elsewhere, [("far", "gpu.example:7443".to_owned())]);
    let alone = file("[[executor]]\nname = 'far'\naddress = 'gpu.example:7443'").unwrap();
    assert!(alone.members().is_empty() && alone.max_trainers() == 0);
}

#[test]
fn executors_and_classes_that_cannot_be_told_apart_or_say_what_nobody_knows_are_refused_by_name() {
    for (text, part) in [
        ("[[executor]]\ncores = '0'", "needs a `name`"),
        ("[[executor]]\nname = 'A b'", "needs a `name`"),
        ("[[executor]]\nname = 'a'\n[[executor]]\nname = 'a'", "two executors are called `a`"),
        ("[[executor]]\nname = 'a'\ncoers = '0'", "coers"),
        ("[[executor]]\nname = 'a'\nworkers.coers = '0'", "coers"),
        ("[[class]]\nname = 'a'", "`a` has no members"),
        (
            "[[class]]\nname = 'a'\ntenants = ['x']\n[[class]]\nname = 'b'\ntenants = ['x']",
            "`x` is in more than one",
        ),
        ("[[class]]\nname = 'a'\ntenants = ['x']\nwieght = 2", "wieght"),
        ("[[executor]]\nname = 'a'\naddress = 'host'", "not HOST:PORT"),
        ("[[executor]]\nname = 'a'\naddress = 7443", "`address` must be a string"),
        ("[[executor]]\nname = 'a'\naddress = 'h:1'\ncores = '0'", "`cores` cannot be set beside `address`"),
        (
            "[[executor]]\nname = 'a'\naddress = 'h:1'\n[[executor]]\nname = 'b'\naddress = 'h:1'",
            "two executors are at `h:1`",
        ),
    ] {
        let error = why(&file(text).unwrap_err()).unwrap();
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
}
