//! Snapshots of a deployment: `/v1/status`, `/v1/lora_adapters`, and first-token times from `/metrics`.

use std::collections::BTreeMap;

use control_protocol::status::{
    DeploymentStatus, ExecutorStatus, MemoryStatus, TokenRates, WorkerPoolStatus,
};
use serde::Serialize;
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
    pub(super) status: DeploymentStatus,
    /// Executors of the deployment; a single executor is named `executor`.
    pub(super) executors: Vec<ExecutorStatus>,
    adapters: Vec<LoadedAdapter>,
    /// First-token times since the gateway started, keyed by the metric's adapter label.
    first_tokens: BTreeMap<String, Histogram>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct MemoryKind {
    /// `blocks` for the block pool of KV cache and adapters, `host` for all host memory of the executor.
    pub(super) of: &'static str,
    /// Use of the memory, such as `running`, `history` or `adapters`.
    pub(super) name: &'static str,
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
        let mut status: DeploymentStatus = serde_json::from_value(body).map_err(ClientError::Garbled)?;
        let mut executors = std::mem::take(&mut status.executors);
        if executors.is_empty() {
            let (name, stats) = ("executor".into(), status.stats.clone());
            executors.push(ExecutorStatus { name, stats, ..ExecutorStatus::default() });
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
        let DeploymentStatus { version, uptime_s, ready, stats, .. } = &self.status;
        let rates = |rates: TokenRates| json!({"generated": rates.generated, "prompt": rates.prompt});
        let executor = |one: &ExecutorStatus| {
            let stats = &one.stats;
            let workers = stats.workers.clone().unwrap_or_default();
            json!({
                "name": one.name, "state": one.state,
                "device": stats.device.as_ref().and_then(|device| device.kind.as_deref()),
                "requests": stats.requests, "tokens_per_s": rates(stats.tokens_per_s), "memory": memory(one),
                "workers": {"seated": workers.seated.len(), "expected": workers.expected, "lost": workers.lost},
            })
        };
        json!({
            "model": self.status.model, "version": version, "uptime_s": uptime_s, "ready": ready,
            "requests": stats.requests, "tokens_per_s": rates(stats.tokens_per_s),
            "executors": self.executors.iter().map(executor).collect::<Vec<_>>(), "models": self.rows(None),
        })
    }
}

/// Returns an executor's memory by kind, without empty kinds.
pub(super) fn memory(executor: &ExecutorStatus) -> Vec<MemoryKind> {
    let MemoryStatus { block_bytes, device, held, .. } = executor.stats.memory.clone().unwrap_or_default();
    let blocks = |blocks: u64| blocks.saturating_mul(block_bytes);
    let pool = [("running", device.running), ("history", device.history), ("adapters", device.adapters)];
    let pool = pool.map(|(name, count)| MemoryKind {
        of: "blocks",
        name,
        bytes: blocks(count),
        limit_bytes: blocks(device.total),
    });
    let mut uses = held.uses();
    uses.sort_unstable();
    let limit_bytes = held.limit_bytes;
    let host = uses.map(|(name, bytes)| MemoryKind { of: "host", name, bytes, limit_bytes });
    pool.into_iter().chain(host).filter(|kind| kind.bytes > 0).collect()
}

/// Returns an executor's state and device kind.
pub(super) fn state(executor: &ExecutorStatus) -> String {
    let kind = executor.stats.device.as_ref().and_then(|device| device.kind.as_deref());
    let words = [executor.state.as_deref(), kind].into_iter().flatten();
    let text = words.map(in_a_line).collect::<Vec<_>>().join(", ");
    if text.is_empty() { "-".into() } else { text }
}

/// Returns the attached and expected worker counts, and each worker's share of the work.
pub(super) fn workers(executor: &ExecutorStatus) -> String {
    let workers = executor.stats.workers.clone().unwrap_or_default();
    let WorkerPoolStatus { expected, lost, seated, .. } = workers;
    if seated.is_empty() && expected == 0 {
        return "-".into();
    }
    let shares = seated.iter().map(|worker| format!("core {} {:.0} %", worker.core, worker.share * 100.0));
    let lost = (lost > 0).then(|| format!("{lost} lost"));
    let all = [format!("{} of {expected}", seated.len())].into_iter().chain(shares).chain(lost);
    all.collect::<Vec<_>>().join(", ")
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
        let kinds = memory(&snapshot(1.0, 0).executors[0]);
        let shown: Vec<_> = kinds.iter().map(|kind| (kind.of, kind.name, kind.bytes)).collect();
        assert_eq!(
            shown,
            [("blocks", "running", 2048), ("blocks", "history", 4096), ("host", "weights", 2048)]
        );
        assert!(kinds.iter().all(|kind| kind.limit_bytes == 8192));
    }

    #[test]
    fn several_executors_are_told_each_by_its_name() {
        let status = json!({"model": "smol", "executors": [{"name": "left", "state": "ready"}, {"name": "right", "state": "lost"}]});
        let look = DashboardSnapshot::read(status, Vec::new(), "").unwrap();
        let shown: Vec<_> = look.executors.iter().map(|one| (one.name.as_str(), state(one))).collect();
        assert_eq!(shown, [("left", "ready".to_owned()), ("right", "lost".to_owned())]);
        assert_eq!(look.json()["executors"][1]["state"], "lost");
    }
}
