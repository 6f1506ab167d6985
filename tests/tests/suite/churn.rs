//! Adapters come and go under load: every answer is golden for the adapter version that it names.
//!
//! `HOLOBIONT_CHURN` sets the number of operations, `HOLOBIONT_SEED` their choice.

use std::{
    sync::{Arc, atomic::Ordering},
    thread,
};

use e2e_tests::{
    BASE, Client, DeploymentPlan, RequestFault,
    chaos::{AdapterVariants, ChaosReport, ChaosRng, PossibleNames, Traffic},
    eventually, repeats, watched,
};
use serde_json::json;

const VARIANTS: u32 = 5;
const CLIENTS: u64 = 6;

/// Loads, replaces, compares-and-swaps and unloads `name`, and tracks its current adapter version.
struct AdapterChurn {
    client: Client,
    variants: Arc<AdapterVariants>,
    name: String,
    random: ChaosRng,
    now: Option<String>,
}

impl AdapterChurn {
    fn run(mut self, operations: u64) -> PossibleNames {
        let mut names = PossibleNames::default();
        for _ in 0..operations {
            self.step();
        }
        names.change(&self.name, self.now.clone(), &Ok::<_, RequestFault>(()));
        names
    }

    fn step(&mut self) {
        let (path, generation) = self.random.pick(&self.variants.adapters).clone();
        let mut body = json!({ "lora_name": self.name, "lora_path": path });
        match (self.random.below(4), &self.now) {
            (0, Some(_)) => {
                let body = json!({ "lora_name": self.name });
                self.post("/v1/unload_lora_adapter", &body).expect("an unload succeeds");
                self.now = None;
                return;
            }
            (1, Some(_)) => {
                // A caller that expects another version must not replace it.
                body["expected_generation"] = "0".repeat(64).into();
                let refused = self.post("/v1/load_lora_adapter", &body);
                assert!(matches!(refused, Err(RequestFault::Refused { status: 409, .. })), "{refused:?}");
                return;
            }
            (2, Some(now)) => body["expected_generation"] = now.as_str().into(),
            (_, Some(_)) => body["load_inplace"] = true.into(),
            (_, None) => {}
        }
        let answer = self.post("/v1/load_lora_adapter", &body).expect("a load succeeds");
        assert_eq!(answer["generation"], generation.as_str());
        self.now = Some(generation);
    }

    /// Posts again while the server answers "not now".
    fn post(&self, route: &str, body: &serde_json::Value) -> Result<serde_json::Value, RequestFault> {
        loop {
            match self.client.try_post(route, body) {
                Err(RequestFault::Refused { status: 429, .. }) => thread::yield_now(),
                outcome => return outcome,
            }
        }
    }
}

#[test]
fn adapters_come_and_go_under_load_and_every_answer_is_golden_for_its_generation() {
    let (operations, seed) = (repeats::CHURN.number(), repeats::SEED.number());
    watched(move || {
        let deployment = DeploymentPlan::bare().start();
        let client = &deployment.client;
        let variants = Arc::new(AdapterVariants::learn(client, &deployment.place().adapters(), VARIANTS));
        let names: Vec<String> = (0..4).map(|index| format!("churn-{index}")).collect();
        let models: Vec<String> = names.iter().cloned().chain([BASE.to_owned()]).collect();
        let traffic = Traffic::begin(client, &variants, &models, CLIENTS);
        let churners = names.iter().zip(0..).map(|(name, index)| {
            let churner = AdapterChurn {
                client: client.clone(),
                variants: Arc::clone(&variants),
                name: name.clone(),
                random: ChaosRng::new(seed * 1000 + index),
                now: None,
            };
            thread::spawn(move || churner.run(operations / 4))
        });
        let churners: Vec<_> = churners.collect();
        let mut certain = Vec::new();
        for churner in churners {
            certain.push(churner.join().expect("every operation is answered as it should be"));
        }
        let tally = traffic.finish();
        let registry = client.registered().expect("the registry answers");
        for mut names in certain {
            let of_this: Vec<_> = registry.iter().filter(|(name, _)| names.knows(name)).cloned().collect();
            names.reconcile(&of_this);
        }
        for (name, _) in &registry {
            client.unload(name);
        }
        eventually("the adapters' bytes are free", || client.metric("holobiont_adapter_bytes") == 0.0);
        let mut ledger = ChaosReport::new("churn", seed);
        ledger.count("operations", operations / 4 * 4);
        ledger.count("golden answers", tally.answered.load(Ordering::Relaxed));
        ledger.write();
        assert!(tally.answered.load(Ordering::Relaxed) > 0, "nothing was asked meanwhile");
        assert_eq!(
            tally.given_up.load(Ordering::Relaxed),
            0,
            "no request suffers from adapters that come and go"
        );
        assert!(deployment.stop().success());
    });
}
