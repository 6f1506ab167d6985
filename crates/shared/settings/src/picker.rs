//! Settings of `endpoint-picker`, which no deployment starts: flags and variables only.

use crate::{
    Preset::{self, Is},
    ProcessKind, Setting,
};

const fn picker(
    field: &'static str,
    flag: &'static str,
    value: &'static str,
    preset: Preset,
    help: &'static str,
) -> Setting {
    Setting { section: "picker", field, flag, value, preset, help, process: ProcessKind::Picker, old: None }
}

/// All settings of `endpoint-picker` except `routing` and `log_format`, which it shares with other programs.
pub static PICKER: &[Setting] = &[
    picker(
        "listen",
        "picker-listen",
        "ADDR:PORT",
        Is("127.0.0.1:9002"),
        "Address and port for Envoy (gRPC), probes and Prometheus (HTTP); each client that reaches it \
         may ask for endpoints",
    ),
    picker(
        "endpoints",
        "picker-endpoints",
        "HOST:PORT,...",
        Preset::None,
        "Gateways; a host name stands for all its addresses and is resolved repeatedly",
    ),
    picker(
        "key_file",
        "picker-key-file",
        "FILE",
        Preset::None,
        "File with the API key (role metrics) for requests to gateways, as `holobiont key add` printed it",
    ),
    picker(
        "cert",
        "picker-cert",
        "FILE",
        Preset::None,
        "PEM file of the port's TLS certificate with its chain; a replaced file is read again",
    ),
    picker("cert_key", "picker-cert-key", "FILE", Preset::None, "PEM file of the certificate's private key"),
    picker(
        "interval_ms",
        "picker-interval-ms",
        "MS",
        Is("100"),
        "Time between two status requests to each gateway",
    ),
    picker(
        "stale_ms",
        "picker-stale-ms",
        "MS",
        Is("1000"),
        "Age of a gateway's last status after which the gateway gets no requests",
    ),
    picker(
        "ttft_ms",
        "picker-ttft-ms",
        "MS",
        Preset::None,
        "SLO target of the time to first token; if no gateway can meet it, the answer is 429 with a \
         forecast in `Retry-After`",
    ),
    picker("tpot_ms", "picker-tpot-ms", "MS", Preset::None, "SLO target of the time per output token"),
    picker(
        "fallbacks",
        "picker-fallbacks",
        "N",
        Is("2"),
        "Number of further endpoints that Envoy tries if the first one fails",
    ),
    picker(
        "max_body_bytes",
        "picker-max-body-bytes",
        "BYTES",
        Is("8MiB"),
        "Maximum size of a request's body",
    ),
];
