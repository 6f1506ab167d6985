//! Adapters of Tinker runs in a fleet: a gateway unloads adapters that its own runs no longer need, and of
//! other gateways only those that lost their gateway.

use std::{collections::HashSet, path::Path, sync::Arc};

use gateway::{
    adapters::{LoadRequest, Terms},
    lifecycle::GatewayReadiness,
    tenant_memory::{MemoryLimits, TenantMemory},
    trainer_client::TrainerClient,
    training_sessions::{Runs, checkpoint_path},
};
use tokio::sync::watch;

use crate::{
    servers::{self, postgres::Postgres},
    support::{BASE, FleetHost, eventually},
};

struct TrainingHost {
    host: FleetHost,
    runs: Arc<Runs>,
    suspects: HashSet<String>,
}

impl TrainingHost {
    fn on(host: FleetHost) -> Self {
        let starting = GatewayReadiness::Starting { stage: "a test".to_owned(), percent: None };
        let (status, state) = (watch::channel(starting).1, host.directory.path().join("state"));
        let runs = runs(&host, status, &state);
        Self { host, runs, suspects: HashSet::new() }
    }

    fn begin(&self) -> (String, String) {
        let memory = TenantMemory::new(MemoryLimits::default());
        let reserve = || memory.reserve(&"acme".into(), 1).unwrap();
        let session = self.runs.book.begin(reserve()).unwrap();
        let model = self.runs.book.model(&session, 0, reserve(), &self.runs.means).unwrap();
        (session, model.run.clone())
    }

    async fn register(&self, name: &str, terms: Terms) {
        let request = LoadRequest { tenant: Some("acme".to_owned()), ..self.host.request(name, name) };
        self.host.registry.load_made(request, BASE.into(), terms).await.unwrap();
    }

    /// Registers a snapshot of a run of this gateway; returns its name.
    async fn snapshot(&self, run: &str, number: u64) -> String {
        let name = checkpoint_path::snapshot(run, number);
        let made_by = Some(self.host.registry.instance().to_owned());
        self.register(&name, Terms { made_by, ..Terms::default() }).await;
        name
    }

    async fn sweep(&mut self) {
        self.runs.unload_unwanted(&mut self.suspects).await;
    }

    fn has(&self, name: &str) -> bool {
        self.host.stands_for(name).is_some()
    }
}

fn runs(host: &FleetHost, status: watch::Receiver<GatewayReadiness>, state: &Path) -> Arc<Runs> {
    Runs::new(TrainerClient::at(None), Arc::clone(&host.registry), status, state, 1 << 20)
}

/// Makes a gateway's presence expire, as if it had been stopped for longer than its lease.
fn expire(postgres: &Postgres, host: &FleetHost) {
    let id = host.registry.instance();
    let expired = format!("UPDATE holobiont_gateways SET until = now() - interval '1 s' WHERE id = '{id}'");
    tokio::task::block_in_place(|| postgres.ask(&expired));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_survives_the_sweeps_of_other_gateways_and_ends_with_its_model() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let mut one = TrainingHost::on(FleetHost::new(&postgres, &bucket).await);
    let mut other = TrainingHost::on(FleetHost::new(&postgres, &bucket).await);
    let (session, run) = one.begin();
    let name = one.snapshot(&run, 1).await;
    other.host.hears(&one.host, &name).await;
    for _ in 0..3 {
        one.sweep().await;
        other.sweep().await;
    }
    other.host.ask(&name).await.expect("another host samples from it");
    assert!(one.has(&name) && other.has(&name));
    one.runs.book.end(&session, "acme");
    one.sweep().await;
    eventually("its own gateway unloads it for all", || !one.has(&name) && !other.has(&name)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_of_a_gateway_that_is_gone_are_unloaded_and_nobody_elses() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let lost = TrainingHost::on(FleetHost::new(&postgres, &bucket).await);
    let lives = TrainingHost::on(FleetHost::new(&postgres, &bucket).await);
    let mut sweeps = TrainingHost::on(FleetHost::new(&postgres, &bucket).await);
    let left = lost.snapshot(&lost.begin().1, 1).await;
    let kept = lives.snapshot(&lives.begin().1, 1).await;
    // Adapters that users load are never swept, under any name.
    lives.register("tinker-x~y", Terms::default()).await;
    for name in [&left, &kept] {
        sweeps.host.hears(&lives.host, name).await;
        lost.host.hears(&lives.host, name).await;
    }
    for training in [&lost, &lives] {
        expire(&postgres, &training.host);
    }
    // After an outage the presence of all gateways has expired at first.
    sweeps.sweep().await;
    lives.host.registry.renew_presence().await.unwrap();
    assert!(sweeps.has(&left) && sweeps.has(&kept), "one look is not enough");
    sweeps.sweep().await;
    eventually("what the lost gateway made is gone", || !sweeps.has(&left) && !lives.has(&left)).await;
    sweeps.sweep().await;
    assert!(sweeps.has(&kept) && sweeps.has("tinker-x~y"));
    lives.host.registry.remove_presence().await;
    sweeps.sweep().await;
    sweeps.sweep().await;
    eventually("a gateway that has ended is gone too", || !sweeps.has(&kept)).await;
    assert!(sweeps.has("tinker-x~y"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_host_alone_what_an_earlier_process_left_is_unloaded_and_nothing_else() {
    let mut training = TrainingHost::on(FleetHost::alone().await);
    let kept = training.snapshot(&training.begin().1, 1).await;
    let made_by = Some("an earlier process".to_owned());
    training.register("tinker-before~1", Terms { made_by, ..Terms::default() }).await;
    training.register("tinker-x~y", Terms::default()).await;
    training.sweep().await;
    training.sweep().await;
    eventually("its model is gone", || !training.has("tinker-before~1")).await;
    assert!(training.has(&kept) && training.has("tinker-x~y"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_ends_with_its_time_on_every_host_whoever_made_it() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let one = TrainingHost::on(FleetHost::new(&postgres, &bucket).await);
    let mut other = TrainingHost::on(FleetHost::new(&postgres, &bucket).await);
    for (name, expires_at) in [("over", Some(1)), ("later", Some(u64::MAX >> 1)), ("never", None)] {
        one.register(name, Terms { expires_at, ..Terms::default() }).await;
    }
    other.host.hears(&one.host, "never").await;
    other.sweep().await;
    eventually("its time is over", || !one.has("over") && !other.has("over")).await;
    assert!(one.has("later") && one.has("never"));
    let expiry = |training: &TrainingHost, name: &str| training.host.registry.entries()[name].expires_at();
    one.host.registry.set_expiry("later", None).await.unwrap();
    one.host.registry.set_expiry("never", Some(1)).await.unwrap();
    eventually("the other hears of it", || {
        expiry(&other, "later").is_none() && expiry(&other, "never") == Some(1)
    })
    .await;
    let late = FleetHost::new(&postgres, &bucket).await;
    assert_eq!(late.registry.entries()["never"].expires_at(), Some(1), "it is durable");
    other.sweep().await;
    eventually("its time is over", || !one.has("never")).await;
    assert!(one.has("later") && other.has("later"));
}
