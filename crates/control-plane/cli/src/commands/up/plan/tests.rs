//! Tests of the command lines of all processes.

use settings::BaseOption;

use super::*;
use crate::commands::doctor::host_ledger::LedgerBase;

fn text(arguments: &[OsString]) -> String {
    arguments.iter().map(|argument| argument.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Returns a state directory and the prefix of its run paths.
fn state() -> (tempfile::TempDir, StateDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::claim(directory.path(), std::time::Duration::ZERO).unwrap();
    let run = state.socket(Instance::default()).parent().unwrap().display().to_string();
    (directory, state, run)
}

fn split(config: &DeploymentConfig, cores: &str) -> CoreSplit {
    CoreSplit::new(config, &cores.parse().unwrap())
}

#[test]
fn limits_nobody_set_are_left_to_the_process_that_owns_them() {
    let ((_directory, state, run), config) = (state(), DeploymentConfig::default());
    let split = split(&config, "0");
    let arguments =
        executor_arguments(&config, &split, Path::new("/m"), (&state, Instance::default()), LogFormat::Human);
    let expected = format!(
        "--exit-with-stdin --model /m --precision-file {state} --socket {run}/executor.sock \
         --worker-socket {run}/workers.sock --max-workers 0 --log-format human --grace-ms 10000 --layers {run}/layers.sock",
        state = state.precision().display()
    );
    assert_eq!(text(&arguments), expected);
    assert!(split.workers.is_empty());
}

#[test]
fn the_devices_of_a_group_are_passed_in_place_of_cores() {
    let text_of_file = "executor.devices = ['cpu:0-1', 'cpu:2-3']\nworkers.count = 0";
    let ((_directory, state, _), config) = (state(), toml::from_str(text_of_file).unwrap());
    let split = split(&config, "0-7");
    assert_eq!(split.executor, Some("0-3".parse().unwrap()));
    let place = (&state, Instance::default());
    let arguments = text(&executor_arguments(&config, &split, Path::new("/m"), place, LogFormat::Human));
    assert!(arguments.contains("--devices cpu:0-1 cpu:2-3"), "{arguments}");
    assert!(!arguments.contains("--cores"), "{arguments}");
}

#[test]
fn a_worker_is_told_its_core_and_the_executor_and_the_gateway_how_many_there_are() {
    let ((_directory, state, run), config) = (state(), DeploymentConfig::default());
    let split = split(&config, "0-7");
    let executor = text(&executor_arguments(
        &config,
        &split,
        Path::new("/m"),
        (&state, Instance::default()),
        LogFormat::Json,
    ));
    assert!(executor.contains("--max-workers 2 ") && executor.ends_with(" --cores 0-5"), "{executor}");
    let worker =
        text(&worker_arguments(&config, split.workers[1], (&state, Instance::default()), LogFormat::Json));
    let expected = format!("--exit-with-stdin --executor {run}/workers.sock --core 7 --log-format json");
    assert_eq!(worker, expected);
    assert_eq!(text(&with_helpers(Vec::new(), &[2], None)), "--expected-workers 2");
    assert_eq!(text(&with_helpers(Vec::new(), &[2, 0], None)), "--expected-workers 2,0");
}

#[test]
fn a_trainer_rents_from_the_executor_and_the_gateway_is_told_where_it_is() {
    let (_directory, state, run) = state();
    let arguments = |file: &str| text(&trainer_arguments(&toml::from_str(file).unwrap(), &state));
    let start = format!("serve --exit-with-stdin --socket {run}/trainers.sock --max-trainers");
    assert_eq!(arguments(""), format!("{start} 4 -- --executor {run}/layers.sock"));
    let cores = format!("{start} 2 -- --executor {run}/layers.sock --cores 2,3,5");
    assert_eq!(arguments("training = { trainers = 2, cores = '2-3,5' }"), cores);
    let told = text(&with_helpers(Vec::new(), &[0], Some(state.trainer_socket())));
    assert_eq!(told, format!("--trainer-socket {run}/trainers.sock"));
}

#[test]
fn nobody_trains_who_was_not_asked_for_or_could_not_rent() {
    for file in ["training.trainers = 0", "layers.local = false"] {
        assert_eq!(trainer_program(&toml::from_str(file).unwrap()), (None, Vec::new()), "{file}");
    }
    assert_eq!(text(&with_helpers(Vec::new(), &[0], None)), "");
}

#[test]
fn layers_are_served_unless_they_are_off_or_the_weights_are_random() {
    let serves = |file: &str| toml::from_str::<DeploymentConfig>(file).unwrap().serves_layers();
    assert!(serves("") && serves("layers.local = true"));
    assert!(!serves("layers.local = false") && !serves("lab.random_weights = 1"));
}

#[test]
fn each_of_several_executors_has_sockets_a_store_and_settings_of_its_own_and_the_gateway_knows_them_all() {
    let file = r#"
        memory = { disk = "1MiB" }
        layers = { listen = "127.0.0.1:7" }
        [[executor]]
        name = "left"
        device = "cuda:0"
        [[executor]]
        name = "right"
        cores = "3"
        max_running = 8
        memory.device = "2KiB"
    "#;
    let config: DeploymentConfig = toml::from_str(file).unwrap();
    let (_directory, state, run) = state();
    let members = config.members();
    let splits = CoreSplit::each(&members, &"0-3".parse().unwrap());
    let told: Vec<String> = [0, 1]
        .map(|index| {
            let (member, instance) = (&members[index], Instance::new(index, members[index].name.as_deref()));
            text(&executor_arguments(
                &member.config,
                &splits[index],
                Path::new("/m"),
                (&state, instance),
                LogFormat::Json,
            ))
        })
        .into();
    let left = format!("--socket {run}/executor-left.sock --worker-socket {run}/workers-left.sock");
    for part in
        [left.as_str(), "/layers.sock", "--layer-listen 127.0.0.1:7", "--device cuda:0", "/history/left"]
    {
        assert!(told[0].contains(part), "{part} is not in {}", told[0]);
    }
    for part in ["--layers off", "--cores 3", "--max-running 8", "--device-bytes 2048", "/history/right"] {
        assert!(told[1].contains(part), "{part} is not in {}", told[1]);
    }
    assert!(!told[1].contains("--layer-listen"), "an address can be had once: {}", told[1]);
    let instances = ["left", "right"].map(|name| Instance::new(0, Some(name)));
    let gateway = text(&gateway_arguments(&config, "base", &state, &instances, LogFormat::Json));
    let sockets =
        format!("--executor left={run}/executor-left.sock --executor right={run}/executor-right.sock");
    assert!(gateway.contains(&sockets) && !gateway.contains("--socket"), "{gateway}");
}

#[test]
fn the_gateway_is_told_of_each_base_and_which_of_them_sleep() {
    let file = "[[base]]\nname = 'a'\nmodel = 'm'\n[[base]]\nname = 'b'\nmodel = 'n'\nserved_name = 'B'\nsleep_after_s = 9";
    let config: DeploymentConfig = toml::from_str(file).unwrap();
    let ((_directory, state, run), members) = (state(), config.members());
    let splits = CoreSplit::each(&members, &"0-3".parse().unwrap());
    let planned = |(name, config): (Option<String>, DeploymentConfig)| PlannedBase {
        served_name: config.model.served_name.clone().unwrap(),
        model: "/m".into(),
        name,
        config,
    };
    let bases: Vec<PlannedBase> = config.bases().into_iter().map(planned).collect();
    let row = |name: &str, bytes, is_awake: bool| LedgerBase {
        name: name.to_owned(),
        bytes,
        executors: 1,
        sleeps: !is_awake,
        is_awake,
    };
    let ledger = HostLedger { limit_bytes: 10, bases: vec![row("a", 6, true), row("b", 5, false)] };
    let mut processes = bases::processes(&bases, Some(&ledger));
    for (index, name) in ["a", "b"].into_iter().enumerate() {
        processes[index].executors.push(Instance::new(index, Some(name)));
    }
    assert_eq!([processes[0].is_awake, processes[1].is_awake], [true, false]);
    let told = text(&bases::gateway_options(&bases, &processes, &splits, Some(&ledger), &state));
    let first = "--supervised --asleep b --base-name a --base-host-bytes 6 --bases-host-bytes 10 --base ";
    assert!(told.starts_with(first), "{told}");
    let other: BaseOption = told.trim_start_matches(first).parse().unwrap();
    assert_eq!((&*other.name, &*other.served_name, other.sleep_after_s), ("b", "B", 9));
    assert_eq!(other.executors["b"], PathBuf::from(format!("{run}/executor-b.sock")));
    let one: DeploymentConfig = toml::from_str("").unwrap();
    let alone = [planned((None, DeploymentConfig { model: served("x"), ..one }))];
    assert!(bases::gateway_options(&alone, &processes[..1], &splits, None, &state).is_empty());
}

fn served(name: &str) -> settings::ModelSection {
    settings::ModelSection { served_name: Some(name.to_owned()), ..settings::ModelSection::default() }
}

#[test]
fn classes_reach_the_gateway_whole_and_executors_as_parts_of_memory() {
    let file = r#"
        [[class]]
        name = "gold"
        tenants = ["alice", "bob"]
        weight = 3
        cache_weight = 2
        [[class]]
        name = "default"
        tokens_per_min = 1000
    "#;
    let config: DeploymentConfig = toml::from_str(file).unwrap();
    let (_directory, state, _) = state();
    let instance = Instance::new(0, None);
    let gateway = gateway_arguments(&config, "base", &state, &[instance], LogFormat::Json);
    let told = gateway.iter().zip(&gateway[1..]).filter(|(flag, _)| *flag == "--class");
    let told: Vec<ServiceClass> = told.map(|(_, class)| class.to_str().unwrap().parse().unwrap()).collect();
    assert_eq!(told, config.class);
    let split = &CoreSplit::each(&config.members(), &"0-1".parse().unwrap())[0];
    let executor = executor_arguments(&config, split, Path::new("/m"), (&state, instance), LogFormat::Json);
    assert!(text(&executor).contains("--cache-weight alice=2 --cache-weight bob=2"), "{}", text(&executor));
}

#[test]
fn every_setting_reaches_its_process() {
    let file = r#"
        model = { context_length = 7, resident_weight_bytes = "1 MiB", sleep_after_s = 33 }
        executor = { device = "cuda:1", cores = "0-1", precision = "int15", kv_bytes = "1 KiB", kv_dtype = "f16", adapter_bytes = 2, adapter_dtype = "bf16", device_adapter_bytes = "3 KiB", max_running = 3, max_waiting = 4, max_waiting_tokens = 25, chunk_tokens = 5 }
        gateway = { listen = "127.0.0.1:6", adapter_root = "/r", api_key_file = "/k", max_body_bytes = "2 KiB", memory_bytes = "3 KiB", tenant_memory_bytes = "4 KiB", max_sequences = 10, codel_target_ms = 26, codel_interval_ms = 27, burst_share = 0.5, background_share = 0.25, background_beside = 3, tenant_batches = 9, threads = 8, insecure = true, requests_per_min_per_key = 11, requests_per_min_per_adapter = 12, max_connections = 13, header_timeout_ms = 14, body_timeout_ms = 15, client_write_timeout_ms = 16, cors_origins = "http://a,http://b", vllm_metrics = true, tool_call_parser = "hermes", reasoning_parser = "think", classifier_from_token = "no,yes", score_template = "/st", max_adapter_labels = 17, max_adapters = 18, max_adapter_file_bytes = "1 KiB", ephemeral_adapter_bytes = "2 KiB", ephemeral_adapter_dir = "/shm", allowed_adapter_uris = "hf://a,s3://b/c", tenant_fetched_bytes = "3 KiB", fetch_timeout_ms = 28, fetch_failure_ms = 29, executor_timeout_ms = 19, wake_timeout_ms = 34, executor_ca = "/eca", executor_cert = "/ec", executor_cert_key = "/eck", otlp_endpoint = "http://o", kv_events_endpoint = "tcp://127.0.0.1:1", kv_events_replay_endpoint = "tcp://127.0.0.1:2", kv_events_topic = "t" }
        training = { tenant_jobs = 28, checkpoint_steps = 32, max_training_file_bytes = "3 KiB", tenant_training_bytes = "4 KiB", tenant_state_bytes = "5 KiB" }
        memory = { device = "4 KiB", host = "1 KiB", disk = "2 KiB", directory = "/h", decay_ms = 29, process = "1/2" }
        speculation = { draft = "ngram", draft_tokens = 30, draft_bytes = "2 KiB" }
        workers = { cores = "2", count = 1, spin_us = 20 }
        layers = { local = false, listen = "127.0.0.1:20", cert = "/c", cert_key = "/ck", client_ca = "/ca", gateways = "front,spare", key_file = "/lk", training_share = 0.25, max_sessions = 21, tenant_sessions = 22, tenant_rows = 23, tenant_bytes = "1 KiB", rows_per_s = 24, exact = true }
        lab = { random_weights = 25, link_gbps = 2.5, cold_start = "on-demand", cache_policy = "lru", layer_batching = "lockstep", layer_batch_wait_factor = 1.5, routing = "most-idle" }
        deployment = { grace_ms = 9 }
        adapters = { a = "/x", b = "y" }
    "#;
    let config: DeploymentConfig = toml::from_str(file).unwrap();
    let ((_directory, state, _), split) = (state(), split(&config, "0-3"));
    let executor = text(&executor_arguments(
        &config,
        &split,
        Path::new("/m"),
        (&state, Instance::default()),
        LogFormat::Json,
    ));
    let expected = "--max-workers 1 --log-format json --grace-ms 9 --layers off --cores 0-1 --max-adapter-file-bytes 1024 --context-length 7 --resident-weight-bytes 1048576 \
        --device cuda:1 --precision int15 --kv-bytes 1024 --kv-dtype f16 --adapter-bytes 2 --adapter-dtype bf16 --device-adapter-bytes 3072 \
        --max-running 3 --max-waiting 4 --max-waiting-tokens 25 --chunk-tokens 5 \
        --device-bytes 4096 --host-bytes 1024 --disk-bytes 2048 --disk-directory /h --cache-decay-ms 29 --process-memory 1/2 --draft ngram --draft-tokens 30 --draft-bytes 2048 \
        --layer-listen 127.0.0.1:20 --layer-cert /c --layer-cert-key /ck --layer-client-ca /ca --layer-key-file /lk --layer-gateways front,spare \
        --layer-training-share 0.25 --layer-max-sessions 21 --layer-tenant-sessions 22 --layer-tenant-rows 23 \
        --layer-tenant-bytes 1024 --layer-rows-per-s 24 --layer-exact --random-weights 25 --link-gbps 2.5 --cold-start on-demand --cache-policy lru \
        --layer-batching lockstep --layer-batch-wait-factor 1.5";
    assert!(executor.ends_with(expected), "{executor}");

    let worker =
        text(&worker_arguments(&config, split.workers[0], (&state, Instance::default()), LogFormat::Human));
    assert!(worker.ends_with("--core 2 --log-format human --spin-us 20"), "{worker}");
    let gateway = text(&gateway_arguments(&config, "base", &state, &[Instance::default()], LogFormat::Json));
    let expected = "--served-model-name base --grace-ms 9 --log-format json --adapter a=/x --adapter b=y --sleep-after-s 33 --adapter-root /r \
        --api-key-file /k --max-body-bytes 2048 --memory-bytes 3072 --tenant-memory-bytes 4096 --max-sequences 10 --codel-target-ms 26 --codel-interval-ms 27 --burst-share 0.5 --background-share 0.25 --background-beside 3 --tenant-batches 9 --threads 8 --insecure --requests-per-min-per-key 11 \
        --requests-per-min-per-adapter 12 --max-connections 13 --header-timeout-ms 14 --body-timeout-ms 15 --client-write-timeout-ms 16 \
        --cors-origins http://a,http://b --vllm-metrics --max-adapter-labels 17 --max-adapters 18 --max-adapter-file-bytes 1024 \
        --ephemeral-adapter-bytes 2048 --ephemeral-adapter-dir /shm --allowed-adapter-uris hf://a,s3://b/c --tenant-fetched-bytes 3072 --fetch-timeout-ms 28 --fetch-failure-ms 29 --executor-timeout-ms 19 --wake-timeout-ms 34 --executor-ca /eca --executor-cert /ec --executor-cert-key /eck --tool-call-parser hermes --reasoning-parser think --classifier-from-token no,yes --score-template /st --otlp-endpoint http://o --kv-events-endpoint tcp://127.0.0.1:1 --kv-events-replay-endpoint tcp://127.0.0.1:2 --kv-events-topic t --tenant-jobs 28 --checkpoint-steps 32 --max-training-file-bytes 3072 --tenant-training-bytes 4096 \
        --tenant-state-bytes 5120 --routing most-idle";
    assert!(gateway.ends_with(expected), "{gateway}");
}

#[test]
fn the_gateway_is_told_of_executors_on_other_hosts_and_where_their_text_is() {
    let told =
        |file: &str| text(&with_elsewhere(Vec::new(), &toml::from_str(file).unwrap(), Path::new("/m")));
    let file = "[[executor]]\nname = 'far'\naddress = '[::1]:7443'\n[[executor]]\nname = 'near'";
    assert_eq!(told(file), "--executor far=tls://[::1]:7443 --model /m");
    assert_eq!(told("[[executor]]\nname = 'near'"), "--model /m");
    let config: DeploymentConfig = toml::from_str(&format!("[workers]\ncount = 2\n{file}")).unwrap();
    let splits = CoreSplit::each(&config.members(), &"0-7".parse().unwrap());
    assert_eq!(expected_workers(&config, &splits), [2, 0], "nobody misses workers of another host");
}

#[test]
fn a_directory_without_an_adapter_is_not_found_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let adapters = BTreeMap::from([("pirate".to_owned(), directory.path().to_owned())]);
    let error = check_adapters(&adapters).unwrap_err();
    assert!(error.to_string().contains("pirate"), "{error}");
    std::fs::write(directory.path().join("adapter_config.json"), "{}").unwrap();
    check_adapters(&adapters).unwrap();
}

#[test]
fn a_model_is_served_under_its_files_name_or_its_hub_name() {
    let mut config = DeploymentConfig::default();
    assert_eq!(default_served_name(&config, Path::new("/m/SmolLM2.Q4_1.gguf")), "SmolLM2.Q4_1");
    config.model.name = Some("org/name@main".into());
    assert_eq!(default_served_name(&config, Path::new("/cache/snapshots/abc")), "org/name");
}
