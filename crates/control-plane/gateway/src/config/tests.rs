//! Tests of valid and refused command lines.

use clap::Parser as _;

use super::*;
use crate::{executor::Endpoint, executors::ONLY};

fn config(extra: &[&str]) -> Result<GatewayConfig, GatewayConfigError> {
    let base = ["gateway", "--socket", "s", "--state", "d"];
    Args::try_parse_from(base.iter().chain(extra)).unwrap().try_into()
}

#[test]
fn an_open_port_without_keys_is_refused_unless_said_to_be_meant() {
    assert!(matches!(config(&["--listen", "0.0.0.0:80"]), Err(GatewayConfigError::OpenPort(_))));
    config(&["--listen", "0.0.0.0:80", "--insecure"]).unwrap();
    config(&["--listen", "[::1]:80"]).unwrap();
}

#[test]
fn several_executors_are_given_by_name_and_socket() {
    let only = config(&[]).unwrap().executors.remove(0);
    assert!(
        only.name == ONLY && matches!(&only.endpoint, Endpoint::Socket(path) if path == Path::new("s")),
        "{only:?}"
    );
    let several = config(&["--executor", "a=x", "--executor", "b=y"]).unwrap().executors;
    let names: Vec<_> = several.iter().map(|address| address.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    for other in ["a=y", "b=x"] {
        let error = config(&["--executor", "a=x", "--executor", other]).unwrap_err();
        assert!(matches!(error, GatewayConfigError::SameExecutor(_)), "{error}");
    }
    assert!(Args::try_parse_from(["gateway", "--state", "d", "--executor", "A b=x"]).is_err());
}

#[test]
fn an_executor_on_another_host_takes_a_certificate_and_a_model() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let made = rcgen::generate_simple_self_signed(["front".to_owned()]).unwrap();
    let (cert, key) = (file("c", made.cert.pem()), file("k", made.signing_key.serialize_pem()));
    let identity = ["--executor-cert", &cert, "--executor-cert-key", &key, "--executor-ca", &cert];
    let far = ["--executor", "far=tls://gpu.example:7443"];
    let within = |state: &str, parts: &[&[&str]]| -> Result<GatewayConfig, GatewayConfigError> {
        let base: &[&str] = &["gateway", "--state", state];
        Args::try_parse_from([&[base], parts].concat().concat()).unwrap().try_into()
    };
    let given = |parts: &[&[&str]]| within("d", parts);
    let both = given(&[&far, &identity, &["--model", "m", "--executor", "near=x"]]).unwrap().executors;
    assert!(
        matches!(&both[0].endpoint, Endpoint::Far(far) if far.address().to_string() == "gpu.example:7443"),
        "{both:?}"
    );
    for (wrong, named) in [
        (given(&[&far, &["--model", "m"]]), "--executor-cert"),
        (given(&[&far, &identity]), "--model"),
        (given(&[&far, &identity, &["--model", "m", "--executor", "b=tls://gpu.example:7443"]]), "b"),
        (within(&"s".repeat(100), &[&far, &identity, &["--model", "m"]]), "--state"),
    ] {
        let error = wrong.unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    for wrong in ["far=tls://", "far=tls://host", "far=tls://host:0"] {
        assert!(Args::try_parse_from(["gateway", "--state", "d", "--executor", wrong]).is_err(), "{wrong}");
    }
}

#[test]
fn adapters_are_given_by_name_and_directory() {
    let config = config(&["--adapter", "a=dir/a", "--adapter", "b=dir=b"]).unwrap();
    let b = StartAdapter { name: "b".to_owned(), path: PathBuf::from("dir=b") };
    assert_eq!((config.adapters.len(), &config.adapters[1]), (2, &b));
}

#[test]
fn where_there_are_to_be_no_trainers_nobody_asks_for_any() {
    let socket = |extra: &[&str]| {
        config(&[&["--trainer-socket", "t"], extra].concat()).unwrap().training.trainer_socket
    };
    assert_eq!(socket(&[]), Some(PathBuf::from("t")));
    assert_eq!(socket(&["--max-trainers", "2"]), Some(PathBuf::from("t")));
    assert_eq!(socket(&["--max-trainers", "0"]), None);
}

#[test]
fn a_model_name_with_a_colon_is_refused() {
    assert!(matches!(config(&["--served-model-name", "a:b"]), Err(GatewayConfigError::ModelName(_))));
}

#[test]
fn what_nobody_set_has_the_documented_default() {
    let config = config(&[]).unwrap();
    assert_eq!(config.connections, ConnectionLimits::default());
    assert_eq!((config.rates, config.telemetry), (RateLimits::default(), TelemetryConfig::default()));
    assert_eq!((config.grace, config.executor.silence), (Duration::from_secs(10), Duration::from_secs(30)));
    assert_eq!(config.admission.delays, DelayLimits::default());
    assert_eq!((config.max_adapters, config.max_adapter_file_bytes), (10_000, 2 << 30));
    assert_eq!(config.training, TrainingLimits::default());
}

#[test]
fn a_limit_of_nothing_is_refused_by_name() {
    for name in [
        "max-connections",
        "body-timeout-ms",
        "max-adapters",
        "codel-target-ms",
        "tenant-jobs",
        "checkpoint-steps",
    ] {
        let error = config(&[&format!("--{name}"), "0"]).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn an_origin_is_a_scheme_and_a_host() {
    let config = config(&["--cors-origins", "https://A.example,http://localhost:3000"]).unwrap();
    assert_eq!(config.cors_origins, ["https://a.example", "http://localhost:3000"]);
    for wrong in ["*", "a.example", "https://", "https://a.example/", "null"] {
        assert!(
            matches!(self::config(&["--cors-origins", wrong]), Err(GatewayConfigError::Origin(_))),
            "{wrong}"
        );
    }
}

#[test]
fn the_key_file_that_systemd_hands_over_is_found() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(credential(Some(directory.path().into())), None);
    std::fs::write(directory.path().join("api-keys"), "").unwrap();
    assert_eq!(credential(Some(directory.path().into())), Some(directory.path().join("api-keys")));
    assert_eq!(credential(None), None);
}
