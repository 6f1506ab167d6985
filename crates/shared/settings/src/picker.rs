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
        "Address and port for Envoy (gRPC) and for probes and Prometheus (HTTP); whoever reaches it may ask where requests go",
    ),
    picker(
        "endpoints",
        "picker-endpoints",
        "HOST:PORT,...",
        Preset::None,
        "The gateways; a name stands for all its addresses, and is resolved again and again",
    ),
    picker(
        "key_file",
        "picker-key-file",
        "FILE",
        Preset::None,
        "File of the key of the role metrics that gateways are shown, as `holobiont key add` printed it",
    ),
    picker(
        "cert",
        "picker-cert",
        "FILE",
        Preset::None,
        "PEM file of the certificate, with its chain, that the port shows whoever connects: TLS, for gateways that insist on it. A file that is replaced is read again",
    ),
    picker("cert_key", "picker-cert-key", "FILE", Preset::None, "PEM file of its private key"),
    picker(
        "interval_ms",
        "picker-interval-ms",
        "MS",
        Is("100"),
        "How often each gateway is asked what it has to do",
    ),
    picker(
        "stale_ms",
        "picker-stale-ms",
        "MS",
        Is("1000"),
        "A gateway that was not heard of for so long gets no requests",
    ),
    picker(
        "ttft_ms",
        "picker-ttft-ms",
        "MS",
        Preset::None,
        "Time to the first token that is promised: if no gateway can keep it, the answer is 429 with a forecast in `Retry-After`",
    ),
    picker("tpot_ms", "picker-tpot-ms", "MS", Preset::None, "The same for each token after it"),
    picker(
        "fallbacks",
        "picker-fallbacks",
        "N",
        Is("2"),
        "Endpoints that are named beside the first, for Envoy to try if that one fails",
    ),
    picker("max_body_bytes", "picker-max-body-bytes", "BYTES", Is("8MiB"), "Longest body of a request"),
];
