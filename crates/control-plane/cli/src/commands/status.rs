//! `holobiont status`: shows a deployment's load, where it computes adapters, the cost of waits, split
//! clients and training.

mod executors;
mod fleet;
mod layers;
mod memory;
mod speculation;
mod training;

use control_protocol::status::{
    DeploymentStatus, DeviceStatus, ExecutorStats, WorkerPoolStatus, WorkerStatus,
};
use serde_json::Value;

use crate::{
    client::{ClientError, GatewayClient, LoadedAdapter, list_in},
    terminal::{
        PrintFormat, Terminal, TextStyle, printable,
        table::{pairs, percent, size, table},
    },
};

pub(crate) fn run(url: &str, terminal: Terminal) -> Result<(), ClientError> {
    let client = GatewayClient::new(url, terminal);
    let body = client.get_text("/v1/status")?;
    if terminal.format == PrintFormat::Json {
        terminal.print(body);
        return Ok(());
    }
    let status: DeploymentStatus = serde_json::from_str(&body).map_err(ClientError::Garbled)?;
    let adapters: Value = client.get("/v1/lora_adapters")?;
    let adapters: Vec<LoadedAdapter> = list_in(adapters)?;
    terminal.print(text(terminal.ink(), &status, &adapters));
    Ok(())
}

fn text(ink: TextStyle, status: &DeploymentStatus, adapters: &[LoadedAdapter]) -> String {
    let ExecutorStats { workers, layers, .. } = &status.stats;
    let workers: Vec<_> = workers.iter().flat_map(|workers| &workers.seated).map(worker_row).collect();
    let used: Vec<_> = adapters.iter().filter_map(adapter_row).collect();
    let mut parts = vec![pairs(ink, &rows(status))];
    parts.extend(executors::all(ink, &status.executors));
    if !workers.is_empty() {
        parts.push(table(ink, ["CORE", "PID", "SLICES", "SHARE", "TAKEN BACK"], &workers));
    }
    if !used.is_empty() {
        let head = ["ADAPTER", "ON DEVICE", "DEVICE", "WORKERS", "EXECUTOR", "COLD", "WAITED"];
        parts.push(table(ink, head, &used));
    }
    parts.extend(layers.as_ref().and_then(|layers| layers::sessions(ink, layers)));
    parts.extend(training::under_way(ink, &status.training));
    parts.join("\n\n")
}

fn rows(status: &DeploymentStatus) -> Vec<(String, String)> {
    let requests = status.stats.requests;
    let state = if status.ready { "serving" } else { "not ready" };
    let model = status.model.as_deref().map_or_else(|| "no model yet".into(), printable);
    let head = [
        (
            "model",
            format!("{model}, {state} for {} s, version {}", status.uptime_s, printable(&status.version)),
        ),
        ("requests", format!("{} running, {} waiting", requests.running, requests.waiting)),
    ];
    let of_one = status.executors.is_empty().then(|| executor_rows(&status.stats));
    let shared = [("registry", fleet::registry(&status.registry)), ("store", fleet::store(&status.store))];
    let shared = shared.into_iter().filter_map(|(name, text)| Some((name, text?)));
    let training = ("training", training::text(&status.training));
    let rows = head.into_iter().chain(of_one.into_iter().flatten()).chain([training]).chain(shared);
    rows.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Returns the facts about a single executor; of several, a table shows the main facts.
fn executor_rows(stats: &ExecutorStats) -> [(&'static str, String); 17] {
    let ExecutorStats { adapters, memory, device, cold_starts, speculation, workers, layers, .. } =
        stats.clone();
    let (memory, device) = (memory.unwrap_or_default(), device.unwrap_or_default());
    let cold_starts = cold_starts.unwrap_or_default();
    [
        ("device", device_text(&device)),
        ("numbers", device.numbers.as_deref().map_or_else(|| "-".into(), printable)),
        ("blocks", memory::device(&memory)),
        ("kept below", memory::below(&memory)),
        ("host memory", memory::held(&memory.held)),
        ("weights", memory::weights(memory.weights)),
        ("host tier", tier(adapters.bytes, adapters.budget_bytes)),
        (
            "adapters",
            format!("{} in memory of {}", adapters.resident, adapters.registered.unwrap_or_default()),
        ),
        ("device tier", tier(device.bytes, device.budget_bytes)),
        ("cold start", device.cold_start.as_deref().map_or_else(|| "-".into(), printable)),
        ("link", link(&device)),
        ("copied", format!("{} in {:.1} ms", size(device.copied_bytes), device.copy_ms)),
        ("cold starts", cold_starts.count.to_string()),
        (
            "load waits",
            format!(
                "{:.1} ms in all, {:.1} ms each",
                cold_starts.load_wait_ms, cold_starts.mean_load_wait_ms
            ),
        ),
        ("drafted", speculation::text(&speculation.unwrap_or_default())),
        ("workers", workers_text(&workers.unwrap_or_default())),
        ("split clients", layers::text(&layers.unwrap_or_default())),
    ]
}

fn tier(bytes: u64, budget_bytes: Option<u64>) -> String {
    format!("{} of {}", size(bytes), budget_bytes.map_or_else(|| "-".into(), size))
}

/// Formats kind, name and free memory of the device.
fn device_text(device: &DeviceStatus) -> String {
    let Some(kind) = device.kind.as_deref().map(printable) else { return "-".into() };
    let name = device.name.as_deref().filter(|name| !name.is_empty());
    let name = name.map(|name| format!(", {}", printable(name))).unwrap_or_default();
    let group = match &device.group_weight_bytes[..] {
        [] => String::new(),
        parts => {
            let sizes: Vec<_> = parts.iter().map(|&bytes| size(bytes)).collect();
            format!(", a group of {} with weights of {}", parts.len(), sizes.join(" and "))
        }
    };
    match device.memory_bytes.filter(|&bytes| bytes > 0) {
        Some(bytes) => {
            format!("{kind}{name}{group}, {} free of {}", size(device.memory_free_bytes), size(bytes))
        }
        None => format!("{kind}{name}{group}"),
    }
}

/// Marks measurements over an emulated link.
fn link(device: &DeviceStatus) -> String {
    match device.emulated_link_bytes_per_s {
        Some(bytes_per_s) => format!("emulated link of {}/s", size(bytes_per_s)),
        None => "real".into(),
    }
}

/// Returns a warning about missing workers.
pub(crate) fn missing_workers(workers: &WorkerPoolStatus) -> Option<String> {
    let expected = workers.expected as usize;
    let missing = expected.saturating_sub(workers.seated.len());
    (missing > 0)
        .then(|| format!("{missing} of {expected} workers missing; holobiont logs lora-worker says why"))
}

fn workers_text(workers: &WorkerPoolStatus) -> String {
    let there = match workers.seated.len() {
        0 => "none".to_owned(),
        there => format!("{there}, waited for {:.1} ms in all", workers.wait_ms),
    };
    let lost = (workers.lost > 0).then(|| format!("{} lost", workers.lost));
    [Some(there), lost, missing_workers(workers)].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

fn worker_row(worker: &WorkerStatus) -> [String; 5] {
    [
        worker.core.to_string(),
        worker.pid.to_string(),
        worker.slices.to_string(),
        percent(worker.share),
        worker.taken_back.to_string(),
    ]
}

/// Returns the table row of an adapter in memory, with the share of rank rows computed at each place since
/// loading.
fn adapter_row(adapter: &LoadedAdapter) -> Option<[String; 7]> {
    let rows = adapter.rank_rows?;
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    let part = |rows_there: u64| match rows.all() {
        0 => "-".to_owned(),
        all => percent(rows_there as f64 / all as f64),
    };
    (adapter.tier.as_deref() != Some("disk")).then(|| {
        [
            printable(&adapter.name),
            adapter.on_device().unwrap_or_else(|| "-".to_owned()),
            part(rows.device),
            part(rows.workers),
            part(rows.executor),
            adapter.cold_starts.unwrap_or_default().to_string(),
            format!("{:.1} ms", adapter.load_wait_ms.unwrap_or_default()),
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status() -> Value {
        json!({
            "model": "smol", "version": "1", "uptime_s": 9, "ready": true, "requests": {"running": 2, "waiting": 1},
            "adapters": {"registered": 3, "resident": 2, "bytes": 2048, "budget_bytes": 4096},
            "device": {"kind": "cuda", "name": "A GPU", "memory_bytes": 4096, "memory_free_bytes": 3072, "numbers": "activations bf16",
                "bytes": 1024, "budget_bytes": 2048, "cold_start": "cpu-assist",
                "emulated_link_bytes_per_s": 1024, "copied_bytes": 1024, "copy_ms": 2.5},
            "cold_starts": {"count": 4, "load_wait_ms": 6.0, "mean_load_wait_ms": 1.5},
            "speculation": {"verifications": 5, "drafted_tokens": 20, "accepted_tokens": 15, "mean_accepted_tokens": 3.0,
                "by": "self", "model_drafted_tokens": 8, "model_accepted_tokens": 6, "drafting_ms": 1.5, "least_confidence": 0.25,
                "ahead_tokens": 8, "kept_tokens": 6},
            "workers": {"expected": 3, "lost": 1, "wait_ms": 7.0, "seated": [
                {"core": 2, "pid": 102, "slices": 6, "rank_rows": 30, "share": 0.75, "taken_back": 1},
                {"core": 3, "pid": 103, "slices": 2, "rank_rows": 10, "share": 0.25, "taken_back": 0},
            ]},
            "layers": {"open": 1, "refused": 2, "broken": 0, "joined_rows": 3, "used": {"rows": {"decode": 9, "prefill": 1}},
                "sessions": [{"session": 1, "tenant": "acme", "name": "trainer", "masking": "off", "route": "tls",
                    "waiting_rows": 4, "used": {"calls": 5, "refused": 1, "rows": {"decode": 9, "prefill": 1},
                    "bytes_in": 1024, "bytes_out": 2048, "wait_ms": 1.5, "mean_batch_rows": 2.0}}]},
            "training": {"trains": true,
                "jobs": [{"id": "ftjob-1", "name": "acme/support", "tenant": "acme", "status": "running", "step": 3,
                    "steps": 20, "loss": 2.25, "tokens_per_s": 480.4}, {"id": "ftjob-2", "name": "acme/next",
                    "tenant": "acme", "status": "queued", "step": 0, "steps": null, "loss": null, "tokens_per_s": null}],
                "runs": [{"name": "0123-0", "tenant": "other", "status": "running", "step": 7, "loss_sum": 31.5}]},
        })
    }

    fn adapter(name: &str, tier: &str) -> Value {
        json!({
            "name": name, "generation": "0123", "rank": 16, "bytes": 1000, "tier": tier, "state": "ready",
            "device_bytes": 250, "cold_starts": 2, "load_wait_ms": 3.0,
            "rank_rows": {"device": 500, "workers": 499, "executor": 1},
        })
    }

    fn shown(status: Value, adapters: &[Value]) -> String {
        let adapters: Vec<_> = adapters.iter().map(|a| serde_json::from_value(a.clone()).unwrap()).collect();
        text(TextStyle::None, &serde_json::from_value(status).unwrap(), &adapters)
    }

    #[test]
    fn a_device_group_is_shown_with_the_weights_of_each_device() {
        let mut status = status();
        status["device"]["group_weight_bytes"] = json!([2048, 1024]);
        let text = shown(status, &[]);
        assert!(text.contains("cuda, A GPU, a group of 2 with weights of 2.00 KiB and 1.00 KiB, "), "{text}");
    }

    #[test]
    fn everything_about_device_workers_and_waits_is_shown() {
        let text = shown(status(), &[adapter("pirate", "host"), adapter("asleep", "disk")]);
        for part in [
            "smol, serving for 9 s",
            "cuda, A GPU, 3.00 KiB free of 4.00 KiB",
            "activations bf16",
            "1.00 KiB of 2.00 KiB",
            "cpu-assist",
            "emulated link of 1.00 KiB/s",
            "6.0 ms in all, 1.5 ms each",
            "by self; 15 of 20 tokens accepted, 3.0 a step; 6 of 8 by the model in 1.5 ms; while weights were read 8, of which 6 were kept; worth it from 0.25 on",
            "2, waited for 7.0 ms in all; 1 lost; 1 of 3 workers missing",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        let words = |start: &str| -> Vec<&str> {
            text.lines().find(|line| line.starts_with(start)).unwrap().split_whitespace().collect()
        };
        assert_eq!(words("2 "), ["2", "102", "6", "75", "%", "1"]);
        assert_eq!(words("pirate"), ["pirate", "25", "%", "50", "%", "50", "%", "<1", "%", "2", "3.0", "ms"]);
        let acme = [
            "acme", "trainer", "tls", "off", "5", "1", "10", "2.0", "1.00", "KiB", "2.00", "KiB", "1.5",
            "ms", "4",
        ];
        assert_eq!(words("acme"), acme);
        assert!(text.contains("1; 10 rows, 3 of them in resident passes; 2 refused"), "{text}");
        assert!(text.contains("2 jobs, 1 model step by step"), "{text}");
        assert_eq!(
            words("acme/support"),
            ["acme/support", "acme", "running", "3", "of", "20", "480", "2.250"]
        );
        assert_eq!(words("acme/next"), ["acme/next", "acme", "queued", "-", "-", "-"]);
        assert_eq!(words("0123-0"), ["0123-0", "other", "running", "7", "-", "31.500", "in", "all"]);
        assert!(!text.contains("asleep"), "it is nowhere near the device: {text}");
    }

    #[test]
    fn an_adapter_without_matrices_is_never_on_its_way_to_the_device() {
        let mut factors = adapter("factors", "host");
        for (field, value) in [("rank", 0), ("device_bytes", 0), ("cold_starts", 0)] {
            factors[field] = value.into();
        }
        let text = shown(status(), &[factors]);
        let line = text.lines().find(|line| line.starts_with("factors")).unwrap();
        assert_eq!(line.split_whitespace().nth(1), Some("-"), "{text}");
    }

    #[test]
    fn several_executors_have_a_line_each_and_one_that_is_not_used_says_why() {
        let mut several = json!({"model": "smol", "ready": true, "requests": {"running": 5, "waiting": 1}});
        several["executors"] = json!([
            {"name": "left", "state": "ready", "requests": {"running": 5, "waiting": 1}, "adapters": {"resident": 2},
                "device": {"kind": "cpu"}, "sequences": {"sent": 9, "taken_over": 3}},
            {"name": "right", "address": "gpu:7443", "state": "refused", "detail": "it serves another base model"},
        ]);
        let text = shown(several, &[]);
        let line = text.lines().find(|line| line.starts_with("left")).unwrap();
        assert!(line.contains("ready") && line.contains("5 (+1 waiting)") && line.ends_with('3'), "{text}");
        assert!(text.contains("right (gpu:7443): it serves another base model"), "{text}");
        assert!(!text.contains("cold starts"), "what is not the same of all is not said of all: {text}");
    }

    #[test]
    fn a_registry_that_many_hosts_share_is_shown_and_one_that_is_cut_off_stands_out() {
        let shown_as = |registry: Value| {
            let store = json!({"kind": "s3", "address": "s3://fleet/a", "cached_bytes": 2048, "fetched": 3, "failed": 1});
            shown(json!({"model": "smol", "registry": registry, "store": store}), &[])
        };
        let text =
            shown_as(json!({"kind": "postgres", "address": "db:5432/f", "reachable": true, "age_ms": 300}));
        assert!(text.contains("db:5432/f, read 0.3 s ago"), "{text}");
        assert!(text.contains("s3://fleet/a, 2.00 KiB of it here; 3 fetched, 1 failed"), "{text}");
        let cut = json!({"address": "db:5432/f", "reachable": false, "age_ms": 9000, "error": "it does not answer"});
        let text = shown_as(cut);
        assert!(text.contains("CANNOT BE REACHED (it does not answer); the local copy is 9 s old"), "{text}");
        assert!(!shown(json!({"registry": {"kind": "sqlite"}}), &[]).contains("registry"));
    }

    #[test]
    fn a_gateway_that_says_less_and_a_deployment_without_workers_are_shown_too() {
        let text = shown(json!({"model": null}), &[]);
        for part in [
            "no model yet, not ready",
            "device         -",
            "workers        none",
            "link           real",
            "split clients  none",
            "training       not here",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(!text.contains("missing") && !text.contains("CORE"), "{text}");
    }
}
