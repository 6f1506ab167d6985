//! Where adapters were computed, and the cost of waiting for them.

use serde_json::json;

use crate::{
    fake_executor::reply_with,
    harness::{Harness, eventually_async},
    values::{TEXT, as_told, ask, load, scrape, value},
};

/// Rank rows of an adapter on the device, by workers, and by the executor.
async fn rank_rows(harness: &Harness, adapter: &str) -> [Option<f64>; 3] {
    let families = scrape(&harness.client).await;
    ["device", "workers", "executor"].map(|place| {
        value(&families, "holobiont_adapter_rank_rows_total", &[("adapter", adapter), ("place", place)])
    })
}

#[tokio::test]
async fn an_adapters_work_is_counted_by_place_and_goes_on_with_another_executor() {
    let mut harness = Harness::start(as_told()).await;
    load(&harness, "pirate").await;
    let counted = async |harness: &Harness, times: f64| {
        eventually_async("it is counted", async || {
            rank_rows(harness, "pirate").await == [50.0, 40.0, 10.0].map(|rows| Some(rows * times))
        })
        .await;
    };
    counted(&harness, 1.0).await;
    assert_eq!(rank_rows(&harness, "base").await, [None; 3], "the base is no adapter");
    let families = scrape(&harness.client).await;
    for (verdict, expected) in [("accepted", 9.0), ("rejected", 3.0)] {
        let labels = [("adapter", "pirate"), ("verdict", verdict)];
        assert_eq!(value(&families, "holobiont_adapter_drafted_tokens_total", &labels), Some(expected));
    }
    let labels = [("adapter", "pirate")];
    assert_eq!(value(&families, "holobiont_adapter_draft_least_confidence_ratio", &labels), Some(0.5));
    harness.restart_executor(reply_with("x")).await;
    let answered = async || harness.client.post(TEXT, &ask("pirate", 8)).await.status == 200;
    eventually_async("the next executor answers", answered).await;
    counted(&harness, 2.0).await;
}

#[tokio::test]
async fn an_adapter_of_two_names_is_counted_under_the_one_that_requests_use() {
    let mut harness = Harness::start(as_told()).await;
    load(&harness, "pirate").await;
    assert_eq!(harness.client.post(TEXT, &ask("pirate", 8)).await.status, 200);
    let accepted = async |harness: &Harness, adapter: &str| {
        let labels = [("adapter", adapter), ("verdict", "accepted")];
        value(&scrape(&harness.client).await, "holobiont_adapter_drafted_tokens_total", &labels)
    };
    eventually_async("it is counted", async || accepted(&harness, "pirate").await == Some(9.0)).await;
    let alias = json!({ "lora_name": "alias", "lora_path": harness.adapter("alias", "pirate") });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &alias).await.status, 200);
    harness.restart_executor(reply_with("x")).await;
    let answered = async || harness.client.post(TEXT, &ask("pirate", 8)).await.status == 200;
    eventually_async("the next executor answers", answered).await;
    eventually_async("it is counted again", async || accepted(&harness, "pirate").await == Some(18.0)).await;
    assert_eq!(accepted(&harness, "alias").await, None);
}

#[tokio::test]
async fn workers_are_counted_by_core_and_an_emulated_link_is_called_one() {
    let harness = Harness::start_with(as_told(), |config| config.telemetry.expected_workers = vec![3]).await;
    eventually_async("the executor was asked", async || {
        value(&scrape(&harness.client).await, "holobiont_workers", &[]) == Some(2.0)
    })
    .await;
    eventually_async("its link is known", async || {
        let families = scrape(&harness.client).await;
        let labels = [("mode", "cpu-assist"), ("link", "emulated")];
        value(&families, "holobiont_cold_start_info", &labels) == Some(1.0)
    })
    .await;
    let families = scrape(&harness.client).await;
    assert_eq!(families["holobiont_cold_start_info"].samples.len(), 1, "there is one mode");
    for (name, labels, expected) in [
        ("holobiont_workers_expected", &[][..], 3.0),
        ("holobiont_workers_lost_total", &[], 1.0),
        ("holobiont_worker_slices_total", &[("core", "2")], 6.0),
        ("holobiont_worker_taken_back_total", &[("core", "3")], 1.0),
        ("holobiont_worker_wait_seconds_total", &[], 0.007),
        ("holobiont_draft_verifications_total", &[], 5.0),
        ("holobiont_drafted_tokens_total", &[("by", "text"), ("verdict", "accepted")], 9.0),
        ("holobiont_drafted_tokens_total", &[("by", "text"), ("verdict", "rejected")], 3.0),
        ("holobiont_drafted_tokens_total", &[("by", "model"), ("verdict", "accepted")], 6.0),
        ("holobiont_drafted_tokens_total", &[("by", "model"), ("verdict", "rejected")], 2.0),
        ("holobiont_draft_accepted_tokens_bucket", &[("le", "0")], 1.0),
        ("holobiont_draft_accepted_tokens_bucket", &[("le", "2")], 2.0),
        ("holobiont_draft_accepted_tokens_bucket", &[("le", "16")], 4.0),
        ("holobiont_draft_accepted_tokens_count", &[], 5.0),
        ("holobiont_draft_accepted_tokens_sum", &[], 15.0),
        ("holobiont_drafting_seconds_total", &[], 0.0015),
        ("holobiont_draft_least_confidence_ratio", &[], 0.25),
        ("holobiont_ahead_tokens_total", &[("what", "drafted")], 8.0),
        ("holobiont_ahead_tokens_total", &[("what", "kept")], 6.0),
        ("holobiont_draft_hidden_seconds_total", &[], 0.0025),
        ("holobiont_adapter_copy_seconds_total", &[], 0.009),
        ("holobiont_device_weight_bytes", &[("device", "0")], 5.0),
        ("holobiont_device_weight_bytes", &[("device", "1")], 7.0),
        ("holobiont_device_info", &[("kind", "cuda"), ("name", "A GPU")], 1.0),
        ("holobiont_device_memory_bytes", &[], 1_073_741_824.0),
        ("holobiont_device_memory_free_bytes", &[], 536_870_912.0),
        ("holobiont_device_adapter_budget_bytes", &[], 524_288.0),
        ("holobiont_weight_read_bytes_total", &[], 4096.0),
        ("holobiont_weight_read_seconds_total", &[], 0.008),
        ("holobiont_weight_wait_seconds_total", &[], 0.002),
    ] {
        let found = value(&families, name, labels);
        assert!(found.is_some_and(|found| (found - expected).abs() < 1e-9), "{name}: {found:?}");
    }
}

#[tokio::test]
async fn what_split_clients_use_is_counted_and_no_figure_names_a_tenant() {
    let harness = Harness::start(as_told()).await;
    eventually_async("the executor was asked", async || {
        value(&scrape(&harness.client).await, "holobiont_layer_sessions", &[]) == Some(3.0)
    })
    .await;
    let text = harness.client.get("/metrics").await.body;
    assert!(!text.contains("acme") && !text.contains("zeta"), "{text}");
    let families = scrape(&harness.client).await;
    for (name, labels, expected) in [
        ("holobiont_layer_sessions_refused_total", &[][..], 4.0),
        ("holobiont_layer_sessions_broken_total", &[], 5.0),
        ("holobiont_layer_batches_total", &[], 6.0),
        ("holobiont_layer_joined_rows_total", &[], 8.0),
        ("holobiont_layer_calls_total", &[("outcome", "done")], 10.0),
        ("holobiont_layer_calls_total", &[("outcome", "refused")], 1.0),
        ("holobiont_layer_rows_total", &[("class", "prefill")], 3.0),
        ("holobiont_layer_bytes_total", &[("direction", "out")], 300.0),
        ("holobiont_layer_wait_seconds_total", &[], 0.002),
        ("holobiont_layer_compute_seconds_total", &[], 0.004),
        ("holobiont_layer_waiting_rows", &[], 4.0),
    ] {
        let found = value(&families, name, labels);
        assert!(found.is_some_and(|found| (found - expected).abs() < 1e-9), "{name}: {found:?}");
    }
}

#[tokio::test]
async fn only_requests_that_name_an_adapter_wait_for_one() {
    let harness = Harness::start(as_told()).await;
    load(&harness, "pirate").await;
    for model in ["base", "pirate"] {
        assert_eq!(harness.client.post(TEXT, &ask(model, 8)).await.status, 200);
    }
    let families = scrape(&harness.client).await;
    let of = |suffix: &str| value(&families, &format!("holobiont_adapter_load_wait_seconds_{suffix}"), &[]);
    assert_eq!((of("count"), of("sum")), (Some(1.0), Some(0.0012)));
}
