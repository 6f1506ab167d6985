//! The table of metrics against Prometheus's rules, the guide, and the dashboard.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use gateway::metrics::{
    aliases::ALIASES,
    table::{IDS, Metric, MetricKind, TABLE, Unit},
};
use serde_json::Value;

use crate::parser::is_name;

fn read(path: &str) -> String {
    fs::read_to_string(testkit::paths::root().join(path)).unwrap()
}

#[test]
fn names_follow_the_rules_of_prometheus() {
    let names: BTreeSet<&str> = TABLE.iter().map(|metric| metric.name).collect();
    assert_eq!((names.len(), IDS.len()), (TABLE.len(), TABLE.len()), "a name comes twice");
    for metric in TABLE {
        let Metric { name, kind, unit, labels, help } = metric;
        assert!(is_name(name) && !name.contains(':') && name.to_lowercase() == *name, "{name}");
        assert!(name.starts_with("holobiont_") || name.starts_with("process_"), "{name}");
        assert_eq!(*kind == MetricKind::Counter, name.ends_with("_total"), "{name}");
        let suffix = match unit {
            Unit::Seconds => "_seconds",
            Unit::Bytes => "_bytes",
            Unit::Ratio => "_ratio",
            Unit::Info => "_info",
            Unit::Count => "",
        };
        let stem = name.strip_suffix("_total").unwrap_or(name);
        assert!(stem.ends_with(suffix), "{name} does not end in {suffix}");
        for other in ["_milliseconds", "_ms", "_us", "_percent", "_kb", "_mb", "_count", "_sum", "_bucket"] {
            assert!(!stem.ends_with(other), "{name} ends in {other}");
        }
        assert!(!help.is_empty() && !help.ends_with('.') && !help.contains('\n'), "{name}: {help}");
        assert!(
            labels.iter().all(|label| is_name(label) && !label.starts_with("__") && *label != "le"),
            "{name}"
        );
        assert!(!labels.contains(&"tenant") && !labels.contains(&"key"), "{name} tells of tenants");
        if let MetricKind::Histogram(bounds) = kind {
            let is_counted = matches!(unit, Unit::Seconds | Unit::Count);
            assert!(bounds.is_sorted_by(|a, b| a < b) && is_counted, "{name}");
        }
    }
}

#[test]
fn aliases_have_vllms_names_and_each_only_once() {
    let names: BTreeSet<&str> = ALIASES.iter().map(|alias| alias.name).collect();
    assert_eq!(names.len(), ALIASES.len());
    for wanted in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
    ] {
        assert!(names.contains(wanted), "{wanted}");
    }
}

fn row(metric: &Metric) -> String {
    let kind = match metric.kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram(_) => "histogram",
    };
    let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
    format!("| `{}` | {kind} | {} | {} |", metric.name, labels.join(" "), metric.help)
}

#[test]
fn the_guide_has_a_row_for_every_metric_and_every_alias_and_no_other() {
    let guide = read("docs/guides/observability.md");
    let missing: Vec<String> = TABLE.iter().map(row).filter(|row| !guide.contains(row.as_str())).collect();
    assert!(missing.is_empty(), "put these rows into docs/guides/observability.md:\n{}", missing.join("\n"));
    for alias in ALIASES {
        let row = format!("| `{}` | `{}` |", alias.name, alias.of.metric().name);
        assert!(guide.contains(&row), "put this row into docs/guides/observability.md:\n{row}");
    }
    let rows =
        guide.lines().filter(|line| line.starts_with("| `holobiont_") || line.starts_with("| `process_"));
    assert_eq!(rows.count(), TABLE.len(), "the guide has a row for a metric that is not there");
}

fn metrics_of(expression: &str) -> Vec<&str> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    words
        .filter(|word| ["holobiont_", "process_", "vllm:"].iter().any(|prefix| word.starts_with(prefix)))
        .collect()
}

/// Adds the Markdown pages of a folder and those below.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            pages(&entry, found);
        } else if entry.extension().is_some_and(|ending| ending == "md") {
            found.push(entry);
        }
    }
}

#[test]
fn metrics_that_documents_name_are_there() {
    let root = testkit::paths::root();
    let mut found = vec![root.join("README.md")];
    pages(&root.join("docs"), &mut found);
    let names: BTreeSet<&str> = TABLE.iter().map(|metric| metric.name).collect();
    let is_known = |word: &str| {
        let series = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| word.strip_suffix(suffix));
        // A prefix of names, a metric of the endpoint picker, a file name, or a field of `adapter_config.json`.
        let is_other = word.ends_with('_') || word.starts_with("holobiont_picker_");
        let is_none = word.contains(|c: char| c.is_ascii_uppercase()) || word == "holobiont_draft";
        is_other || is_none || names.contains(series.unwrap_or(word))
    };
    let mut wrong = BTreeSet::new();
    for page in found {
        let text = fs::read_to_string(&page).unwrap();
        let named = metrics_of(&text).into_iter().filter(|word| word.starts_with("holobiont_"));
        wrong.extend(named.filter(|word| !is_known(word)).map(|word| (page.clone(), word.to_owned())));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn expressions(value: &Value, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(text) if key == "expr" || key == "query" || key == "definition" => {
                        out.push(text.clone())
                    }
                    value => expressions(value, out),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, out)),
        _ => {}
    }
}

#[test]
fn the_dashboard_shows_every_metric_and_none_that_is_not_there() {
    let dashboard: Value = serde_json::from_str(&read("deploy/dashboards/holobiont.json")).unwrap();
    let mut found = Vec::new();
    expressions(&dashboard, &mut found);
    let mut shown = BTreeSet::new();
    for expression in &found {
        for name in metrics_of(expression) {
            let stem = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let is = |metric: &&Metric| match metric.kind {
                MetricKind::Histogram(_) => Some(metric.name) == stem,
                _ => metric.name == name,
            };
            let metric =
                TABLE.iter().find(is).unwrap_or_else(|| panic!("{name} of '{expression}' does not exist"));
            shown.insert(metric.name);
        }
    }
    let hidden: Vec<&str> =
        TABLE.iter().map(|metric| metric.name).filter(|name| !shown.contains(name)).collect();
    assert!(hidden.is_empty(), "not on the dashboard: {hidden:?}");
}

#[test]
fn the_dashboard_can_be_imported() {
    let dashboard: Value = serde_json::from_str(&read("deploy/dashboards/holobiont.json")).unwrap();
    assert_eq!((&dashboard["id"], dashboard["uid"].as_str()), (&Value::Null, Some("holobiont")));
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert!(
        variables.iter().any(|variable| variable["type"] == "datasource" && variable["name"] == "datasource")
    );
    let panels = dashboard["panels"].as_array().unwrap();
    let rows: Vec<&str> = panels
        .iter()
        .filter(|panel| panel["type"] == "row")
        .filter_map(|panel| panel["title"].as_str())
        .collect();
    assert_eq!(
        rows,
        [
            "Traffic",
            "Latency",
            "Service classes",
            "Adapters",
            "Split clients",
            "Fine-tuning",
            "Executor",
            "Resources",
            "Many hosts",
            "Batches",
            "Adapters by URI",
            "Bases"
        ]
    );
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "panels share an id");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
        assert!(!panel["targets"].as_array().unwrap().is_empty(), "{}", panel["title"]);
    }
}

/// A deployment with an invalid trace endpoint does not start.
#[test]
fn an_invalid_endpoint_for_traces_is_refused_by_name() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_gateway"));
    command.args(["--socket", "s", "--state", "d", "--otlp-endpoint", "grpc://localhost:4317"]);
    let output = command.output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("--otlp-endpoint"), "{message}");
}
