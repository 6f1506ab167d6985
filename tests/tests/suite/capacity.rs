//! `holobiont doctor --model` forecasts the memory of a deployment before its start.

use e2e_tests::{DeploymentPlan, eventually, fixtures, watched};
use serde_json::Value;

const SETTINGS: [(&str, &str); 4] =
    [("KV_DTYPE", "int8"), ("DEVICE_BYTES", "48MiB"), ("ADAPTER_BYTES", "20MiB"), ("PROCESS_MEMORY", "2GiB")];

#[test]
fn doctor_forecasts_the_memory_of_a_deployment() {
    watched(|| {
        let model = fixtures::model().display().to_string();
        let variables = SETTINGS.map(|(name, value)| (format!("HOLOBIONT_{name}"), value.to_owned()));
        let variables: Vec<_> =
            variables.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let (fits, said) = fixtures::holobiont(&["--json", "doctor", "--model", &model], &variables);
        assert!(fits, "{said}");
        let report: Value = serde_json::from_str(&said).unwrap();
        let forecast = &report["capacity"][0]["figures"];
        let set = |plan: DeploymentPlan, (name, value): (&str, &str)| plan.set(name, value);
        let deployment = SETTINGS.into_iter().fold(DeploymentPlan::bare(), set).start();
        eventually("the executor reports its memory", || {
            let memory = deployment.client.status()["memory"].clone();
            let held = &memory["held"];
            held["weights_bytes"] == forecast["weights"]["bytes"]
                && held["blocks_bytes"] == forecast["host"]["pool_bytes"]
                && held["limit_bytes"] == forecast["host"]["limit_bytes"]
                && memory["block_bytes"] == forecast["kv"]["block_bytes"]
                && memory["device"]["total"] == forecast["kv"]["pool_blocks"]
        });
        assert!(deployment.stop().success());
    });
}
