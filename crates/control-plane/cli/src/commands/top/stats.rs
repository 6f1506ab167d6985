//! Snapshots of a deployment: `/v1/status`, `/v1/lora_adapters`, and first-token times from `/metrics`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::exposition::{Histogram, histograms};
use crate::{
    client::{ClientError, GatewayClient, LoadedAdapter, list_in},
    terminal::printable,
};

/// Metric of the time to first token, by adapter.
const FIRST_TOKEN: &str = "holobiont_adapter_time_to_first_token_seconds";

/// Label value of `FIRST_TOKEN` that stands for the base.
const BASE: &str = "base";

#[derive(Debug, Clone, Default)]
pub(super) struct DashboardSnapshot {
    pub(super) status: TopStatus,
    /// Executors of the deployment; a single executor is named `executor`.
    pub(super) executors: Vec<TopExecutor>,
    adapters: Vec<LoadedAdapter>,
    /// First-token times since the gateway started, keyed by the metric's adapter label.
    first_tokens: BTreeMap<String, Histogram>,
}

/// Fields of `/v1/status` about the whole deployment.
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

/// Load, device and memory of one executor.
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
    /// Blocks of the block pool, by use.
    device: TopPool,
    /// Bytes of host memory, by kind, with keys such as `weights_bytes`.
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

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct MemoryKind {
    /// `blocks` for the block pool of KV cache and adapters, `host` for all host memory of the executor.
    pub(super) of: &'static str,
    /// Use of the memory, such as `running`, `history` or `adapters`.
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Bytes available in total.
    pub(super) limit_bytes: u64,
}

/// Row of the model table: the base or an adapter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct TopRow {
    pub(super) name: String,
    pub(super) tier: Option<String>,
    pub(super) requests: Option<u64>,
    pub(super) tokens_per_s: Option<f64>,
    pub(super) first_token: FirstToken,
}

/// Times to first token of one row.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(super) struct FirstToken {
    pub(super) count: u64,
    pub(super) mean_ms: Option<f64>,
    pub(super) p95_ms: Option<f64>,
}

impl DashboardSnapshot {
    pub(super) fn fetch(client: &GatewayClient) -> Result<Self, ClientError> {
        let status = client.get("/v1/status")?;
        let adapters = list_in(client.get("/v1/lora_adapters")?)?;
        Self::read(status, adapters, &client.get_text("/metrics")?)
    }

    fn read(body: Value, adapters: Vec<LoadedAdapter>, metrics: &str) -> Result<Self, ClientError> {
        let mut status: TopStatus = serde_json::from_value(body.clone()).map_err(ClientError::Garbled)?;
        let mut executors = std::mem::take(&mut status.executors);
        if executors.is_empty() {
            // With a single executor, `/v1/status` has the executor's fields at the top level.
            let only: TopExecutor = serde_json::from_value(body).map_err(ClientError::Garbled)?;
            executors.push(TopExecutor { name: "executor".into(), ..only });
        }
        executors.iter_mut().for_each(|one| one.name = in_a_line(&one.name));
        Ok(Self { status, executors, adapters, first_tokens: histograms(metrics, FIRST_TOKEN, "adapter") })
    }

    /// Returns the base and all adapters except those only on disk, busiest first. First-token times are
    /// those counted since `before`.
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

    /// Returns the name by which clients request the base.
    pub(super) fn model(&self) -> String {
        self.status.model.as_deref().map_or_else(|| "no model yet".into(), in_a_line)
    }

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
    /// Returns the executor's memory by kind, without empty kinds.
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

    /// Returns the executor's state and device kind.
    pub(super) fn state(&self) -> String {
        let words = [self.state.as_deref(), self.device.kind.as_deref()].into_iter().flatten();
        let text = words.map(in_a_line).collect::<Vec<_>>().join(", ");
        if text.is_empty() { "-".into() } else { text }
    }

    /// Returns the attached and expected worker counts, and each worker's share of the work.
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

/// Makes untrusted text printable on one terminal line.
fn in_a_line(text: &str) -> String {
    printable(text).replace(['\n', '\t'], " ")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a snapshot of a deployment with one executor.
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
