//! What is seen at a look: `/v1/status`, `/v1/lora_adapters`, and from `/metrics` how long first tokens took.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::exposition::{Histogram, histograms};
use crate::{
    client::{ClientError, GatewayClient, LoadedAdapter, list_in},
    terminal::printable,
};

/// The metric of first tokens by adapter.
const FIRST_TOKEN: &str = "holobiont_adapter_time_to_first_token_seconds";

/// What that calls the base.
const BASE: &str = "base";

/// What a deployment does at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct DashboardSnapshot {
    pub(super) status: TopStatus,
    /// A single one has no name of its own.
    pub(super) executors: Vec<TopExecutor>,
    adapters: Vec<LoadedAdapter>,
    /// Since the gateway began, by what the metric calls an adapter.
    first_tokens: BTreeMap<String, Histogram>,
}

/// `/v1/status`, as far as it is about the whole deployment.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct TopStatus {
    pub(super) model: Option<String>,
    pub(super) version: String,
    pub(super) uptime_s: u64,
    pub(super) ready: bool,
    pub(super) requests: TopRequests,
    pub(super) tokens_per_s: TopRates,
    executors: Vec<TopExecutor>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct TopRequests {
    pub(super) running: u64,
    pub(super) waiting: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct TopRates {
    pub(super) generated: f64,
    pub(super) prompt: f64,
}

/// What an executor does and holds.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct TopExecutor {
    pub(super) name: String,
    pub(super) state: Option<String>,
    pub(super) requests: TopRequests,
    pub(super) tokens_per_s: TopRates,
    device: TopDevice,
    memory: TopMemory,
    workers: Workers,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct TopDevice {
    kind: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct TopMemory {
    block_bytes: u64,
    /// Blocks of keys, values and adapters, by who has them.
    device: TopPool,
    /// Bytes of the host's memory, by kind: `weights_bytes` and its like.
    held: BTreeMap<String, u64>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
struct TopPool {
    total: u64,
    running: u64,
    history: u64,
    adapters: u64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Workers {
    expected: u64,
    lost: u64,
    seated: Vec<TopWorker>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct TopWorker {
    core: u32,
    share: f64,
}

/// Memory of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct MemoryKind {
    /// `blocks` of the pool that keys, values and adapters share, or `host`: all that the executor holds of its host's memory.
    pub(super) of: &'static str,
    /// What it is for.
    pub(super) name: String,
    pub(super) bytes: u64,
    /// All that there is of it.
    pub(super) limit_bytes: u64,
}

/// An adapter or the base, for a line of a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct TopRow {
    pub(super) name: String,
    pub(super) tier: Option<String>,
    pub(super) requests: Option<u64>,
    pub(super) tokens_per_s: Option<f64>,
    pub(super) first_token: FirstToken,
}

/// How long first tokens took.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(super) struct FirstToken {
    pub(super) count: u64,
    pub(super) mean_ms: Option<f64>,
    pub(super) p95_ms: Option<f64>,
}

impl DashboardSnapshot {
    /// Asks the gateway.
    pub(super) fn fetch(client: &GatewayClient) -> Result<Self, ClientError> {
        let status = client.get("/v1/status")?;
        let adapters = list_in(client.get("/v1/lora_adapters")?)?;
        Self::read(status, adapters, &client.get_text("/metrics")?)
    }

    fn read(body: Value, adapters: Vec<LoadedAdapter>, metrics: &str) -> Result<Self, ClientError> {
        let mut status: TopStatus = serde_json::from_value(body.clone()).map_err(ClientError::Garbled)?;
        let mut executors = std::mem::take(&mut status.executors);
        if executors.is_empty() {
            // What is said of a single one stands beside what is said of all.
            let only: TopExecutor = serde_json::from_value(body).map_err(ClientError::Garbled)?;
            executors.push(TopExecutor { name: "executor".into(), ..only });
        }
        executors.iter_mut().for_each(|one| one.name = in_a_line(&one.name));
        Ok(Self { status, executors, adapters, first_tokens: histograms(metrics, FIRST_TOKEN, "adapter") })
    }

    /// The base and the adapters that are not on disk alone, the busiest first; first tokens are those since `before`.
    pub(super) fn rows(&self, before: Option<&Self>) -> Vec<TopRow> {
        let mut adapters: Vec<&LoadedAdapter> =
            self.adapters.iter().filter(|one| one.tier.as_deref() != Some("disk")).collect();
        let rate = |one: &LoadedAdapter| one.tokens_per_s.unwrap_or_default();
        adapters.sort_by(|a, b| rate(b).total_cmp(&rate(a)).then_with(|| a.name.cmp(&b.name)));
        let base = TopRow {
            name: self.model(),
            tier: Some(BASE.into()),
            requests: None,
            tokens_per_s: None,
            first_token: self.first_token(BASE, before),
        };
        let row = |one: &LoadedAdapter| TopRow {
            name: in_a_line(&one.name),
            tier: one.tier.as_deref().map(in_a_line),
            requests: one.requests,
            tokens_per_s: one.tokens_per_s,
            first_token: self.first_token(&one.name, before),
        };
        std::iter::once(base).chain(adapters.into_iter().map(row)).collect()
    }

    fn first_token(&self, label: &str, before: Option<&Self>) -> FirstToken {
        let Some(all) = self.first_tokens.get(label) else { return FirstToken::default() };
        let seen = match before.and_then(|before| before.first_tokens.get(label)) {
            Some(before) => all.since(before),
            None => all.clone(),
        };
        let millis = |seconds: f64| seconds * 1e3;
        FirstToken {
            count: seen.count(),
            mean_ms: seen.mean().map(millis),
            p95_ms: seen.quantile(0.95).map(millis),
        }
    }

    /// What clients call the base.
    pub(super) fn model(&self) -> String {
        self.status.model.as_deref().map_or_else(|| "no model yet".into(), in_a_line)
    }

    /// All of it, for programs.
    pub(super) fn json(&self) -> Value {
        let TopStatus { version, uptime_s, ready, requests, tokens_per_s, .. } = &self.status;
        let executor = |one: &TopExecutor| {
            json!({
                "name": one.name, "state": one.state, "device": one.device.kind, "requests": one.requests,
                "tokens_per_s": one.tokens_per_s, "memory": one.memory(),
                "workers": {"seated": one.workers.seated.len(), "expected": one.workers.expected, "lost": one.workers.lost},
            })
        };
        json!({
            "model": self.status.model, "version": version, "uptime_s": uptime_s, "ready": ready, "requests": requests,
            "tokens_per_s": tokens_per_s, "executors": self.executors.iter().map(executor).collect::<Vec<_>>(),
            "models": self.rows(None),
        })
    }
}

impl TopExecutor {
    /// Its memory, by kind; what there is none of is left out.
    pub(super) fn memory(&self) -> Vec<MemoryKind> {
        let TopMemory { block_bytes, device, held } = &self.memory;
        let blocks = |blocks: u64| blocks.saturating_mul(*block_bytes);
        let pool = [("running", device.running), ("history", device.history), ("adapters", device.adapters)];
        let pool = pool.map(|(name, count)| MemoryKind {
            of: "blocks",
            name: name.to_owned(),
            bytes: blocks(count),
            limit_bytes: blocks(device.total),
        });
        let limit_bytes = held.get("limit_bytes").copied().unwrap_or_default();
        let host = held.iter().filter_map(|(field, &bytes)| {
            let name = field.strip_suffix("_bytes").filter(|name| *name != "limit")?;
            Some(MemoryKind { of: "host", name: in_a_line(name), bytes, limit_bytes })
        });
        pool.into_iter().chain(host).filter(|kind| kind.bytes > 0).collect()
    }

    /// Its state, and what it computes on.
    pub(super) fn state(&self) -> String {
        let words = [self.state.as_deref(), self.device.kind.as_deref()].into_iter().flatten();
        let text = words.map(in_a_line).collect::<Vec<_>>().join(", ");
        if text.is_empty() { "-".into() } else { text }
    }

    /// How many workers there are of how many there should be, and who did how much.
    pub(super) fn workers(&self) -> String {
        let Workers { expected, lost, seated } = &self.workers;
        if seated.is_empty() && *expected == 0 {
            return "-".into();
        }
        let shares =
            seated.iter().map(|worker| format!("core {} {:.0} %", worker.core, worker.share * 100.0));
        let lost = (*lost > 0).then(|| format!("{lost} lost"));
        let all = [format!("{} of {expected}", seated.len())].into_iter().chain(shares).chain(lost);
        all.collect::<Vec<_>>().join(", ")
    }
}

/// A name of somebody else's, in one line of a terminal.
fn in_a_line(text: &str) -> String {
    printable(text).replace(['\n', '\t'], " ")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A look at a deployment of one executor.
    pub(in super::super) fn snapshot(generated: f64, first_tokens: u64) -> DashboardSnapshot {
        let status = json!({
            "model": "smol", "version": "1.2", "uptime_s": 9, "ready": true, "requests": {"running": 2, "waiting": 1},
            "tokens_per_s": {"generated": generated, "prompt": 5.0}, "device": {"kind": "cpu"},
            "memory": {"block_bytes": 1024, "device": {"total": 8, "running": 2, "history": 4, "adapters": 0},
                "held": {"limit_bytes": 8192, "weights_bytes": 2048, "drafts_bytes": 0}},
            "workers": {"expected": 2, "lost": 1, "seated": [{"core": 3, "share": 0.75}]},
        });
        let adapter = |name: &str, tier: &str, rate: f64| {
            json!({"name": name, "generation": "01", "rank": 4, "bytes": 1, "tier": tier, "state": "ready",
                "requests": 1, "tokens_per_s": rate})
        };
        let adapters = json!([
            adapter("slow\n\u{1b}[2J", "host", 1.0),
            adapter("pirate", "host", 12.5),
            adapter("asleep", "disk", 0.0)
        ]);
        let metrics = format!(
            "{FIRST_TOKEN}_bucket{{adapter=\"pirate\",le=\"0.1\"}} {first_tokens}\n\
             {FIRST_TOKEN}_bucket{{adapter=\"pirate\",le=\"+Inf\"}} {first_tokens}\n\
             {FIRST_TOKEN}_sum{{adapter=\"pirate\"}} {}\n{FIRST_TOKEN}_count{{adapter=\"pirate\"}} {first_tokens}\n",
            0.05 * f64::from(u32::try_from(first_tokens).unwrap()),
        );
        DashboardSnapshot::read(status, serde_json::from_value(adapters).unwrap(), &metrics).unwrap()
    }

    #[test]
    fn the_busiest_adapter_comes_behind_the_base_and_what_is_on_disk_not_at_all() {
        let rows = snapshot(1.0, 4).rows(None);
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["smol", "pirate", "slow [2J"]);
        assert_eq!((rows[1].first_token.count, rows[1].first_token.mean_ms), (4, Some(50.0)));
        assert_eq!(rows[0].first_token, FirstToken::default(), "nobody asked the base");
    }

    #[test]
    fn first_tokens_are_those_since_the_look_before() {
        let (before, now) = (snapshot(1.0, 4), snapshot(1.0, 6));
        assert_eq!(now.rows(Some(&before))[1].first_token.count, 2);
        assert_eq!(now.rows(Some(&now))[1].first_token, FirstToken::default());
    }

    #[test]
    fn memory_is_told_by_kind_as_far_as_there_is_any() {
        let memory = snapshot(1.0, 0).executors[0].memory();
        let told: Vec<_> = memory.iter().map(|kind| (kind.of, kind.name.as_str(), kind.bytes)).collect();
        assert_eq!(
            told,
            [("blocks", "running", 2048), ("blocks", "history", 4096), ("host", "weights", 2048)]
        );
        assert!(memory.iter().all(|kind| kind.limit_bytes == 8192));
    }

    #[test]
    fn several_executors_are_told_each_by_its_name() {
        let status = json!({"model": "smol", "executors": [{"name": "left", "state": "ready"}, {"name": "right", "state": "lost"}]});
        let look = DashboardSnapshot::read(status, Vec::new(), "").unwrap();
        let told: Vec<_> = look.executors.iter().map(|one| (one.name.as_str(), one.state())).collect();
        assert_eq!(told, [("left", "ready".to_owned()), ("right", "lost".to_owned())]);
        assert_eq!(look.json()["executors"][1]["state"], "lost");
    }
}
