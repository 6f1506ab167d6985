//! A gateway over real HTTP, in front of an executor with canned answers.

use std::{path::PathBuf, time::Duration};

use gateway::{
    adapters::{EphemeralStorage, RemoteOptions},
    admission_queue::AdmissionLimits,
    config::{
        AllowedHosts, BasesConfig, BatchLimits, ConnectionLimits, GatewayConfig, OutputParsers, RateLimits,
        ScoringDefaults, ShutdownTrigger, TelemetryConfig, TrainingLimits,
    },
    executor::{Endpoint, LinkSettings},
    executors::{Address, ONLY},
    keys::{Keys, line_of},
    lifecycle::{GatewayReadiness, LoadText},
    server::Gateway,
};
use scheduling::{admission::DelayLimits, routing::RoutingPolicy};
use settings::{ReasoningParser, ToolCallParser};
use tempfile::TempDir;

use crate::{
    client::TestClient,
    fake_executor::{FakeExecutor, FakeModelIdentity, Reply},
    text::bytes,
};

pub(crate) use testkit::WATCHDOG;

pub(crate) struct Harness {
    pub(crate) directory: TempDir,
    pub(crate) executor: Option<FakeExecutor>,
    pub(crate) gateway: Option<Gateway>,
    pub(crate) client: TestClient,
}

impl Harness {
    /// Starts a gateway without keys, whose executor answers with `reply`.
    pub(crate) async fn start(reply: Reply) -> Self {
        Self::start_with(reply, |_| {}).await
    }

    /// Like [`Harness::start`], with settings changed first.
    pub(crate) async fn start_with(reply: Reply, change: impl FnOnce(&mut GatewayConfig)) -> Self {
        Self::start_with_text(reply, bytes(), change).await
    }

    /// Like [`Harness::start_with`], with another tokenizer.
    pub(crate) async fn start_with_text(
        reply: Reply,
        text: LoadText,
        change: impl FnOnce(&mut GatewayConfig),
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("adapters")).unwrap();
        let executor = FakeExecutor::start(&directory.path().join("socket"), reply).await;
        let mut config = config(&directory);
        change(&mut config);
        let gateway = ready_with_text(config, text).await;
        let client = TestClient::new(gateway.address);
        Self { directory, executor: Some(executor), gateway: Some(gateway), client }
    }

    pub(crate) fn executor(&self) -> &FakeExecutor {
        self.executor.as_ref().unwrap()
    }

    pub(crate) async fn kill_executor(&mut self) {
        self.executor.take().unwrap().kill().await;
    }

    pub(crate) async fn restart_executor(&mut self, reply: Reply) {
        if self.executor.is_some() {
            self.kill_executor().await;
        }
        self.executor = Some(FakeExecutor::start(&self.directory.path().join("socket"), reply).await);
    }

    /// Replaces the executor, and returns when one of `model` is served.
    pub(crate) async fn replace_executor(&mut self, reply: Reply, model: FakeModelIdentity) {
        self.kill_executor().await;
        let mut status = self.gateway.as_ref().unwrap().status.clone();
        let lost = status.wait_for(|status| !matches!(status, GatewayReadiness::Ready(_)));
        tokio::time::timeout(WATCHDOG, lost).await.expect("it is missed").unwrap();
        let socket = self.directory.path().join("socket");
        self.executor = Some(FakeExecutor::start_with(&socket, reply, model).await);
        self.wait_ready().await;
    }

    pub(crate) async fn restart_gateway(&mut self) {
        // Running requests are cut off, which is no fault here.
        let _ = self.gateway.take().unwrap().shut_down().await;
        let gateway = ready(config(&self.directory)).await;
        self.client = TestClient::new(gateway.address);
        self.gateway = Some(gateway);
    }

    pub(crate) async fn wait_ready(&self) {
        wait_ready(self.gateway.as_ref().unwrap()).await;
    }

    /// Folder with an adapter for the fake executor; other `weights` are another adapter version.
    pub(crate) fn adapter(&self, name: &str, weights: &str) -> PathBuf {
        let path = self.directory.path().join("adapters").join(name);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
        std::fs::write(path.join("adapter_model.safetensors"), weights).unwrap();
        path
    }
}

/// File of API keys, each given as role, name, key.
pub(crate) fn key_file(keys: &[(&str, &str, &str)]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let lines: String = keys.iter().map(|(role, name, key)| line_of(role, name, key)).collect();
    std::fs::write(file.path(), lines).unwrap();
    file
}

pub(crate) fn config(directory: &TempDir) -> GatewayConfig {
    GatewayConfig {
        executors: vec![Address {
            name: ONLY.to_owned(),
            endpoint: Endpoint::Socket(directory.path().join("socket")),
        }],
        model: None,
        listen: "127.0.0.1:0".parse().unwrap(),
        state: directory.path().join("state"),
        served_model_name: Some("base".to_owned()),
        adapters: Vec::new(),
        adapter_root: directory.path().join("adapters").canonicalize().unwrap(),
        max_adapters: 100,
        max_adapter_file_bytes: 1 << 20,
        ephemeral: EphemeralStorage { memory: directory.path().to_owned(), bytes: 1 << 20 },
        remote: RemoteOptions::default(),
        fleet: None,
        keys: Keys::none(None),
        hosts: AllowedHosts::Local,
        cors_origins: Vec::new(),
        rates: RateLimits::default(),
        connections: ConnectionLimits { max_body_bytes: 1 << 20, ..ConnectionLimits::default() },
        helper_program: env!("CARGO_BIN_EXE_gateway").into(),
        routing: RoutingPolicy::default(),
        parsers: OutputParsers { calls: ToolCallParser::Auto, reasoning: ReasoningParser::Auto },
        scoring: ScoringDefaults::default(),
        classes: Vec::new(),
        admission: AdmissionLimits {
            max_sequences: 64,
            delays: DelayLimits::default(),
            burst_share: 0.0625,
            background_share: 0.5,
            background_beside: 0,
        },
        executor: LinkSettings { max_sequences: 64, silence: WATCHDOG },
        training: TrainingLimits::default(),
        batches: BatchLimits::default(),
        grace: Duration::from_millis(200),
        threads: 1,
        telemetry: TelemetryConfig::default(),
        bases: BasesConfig::default(),
        kv_events: None,
        log_format: settings::LogFormat::Human,
        lifeline: ShutdownTrigger::Signals,
    }
}

pub(crate) async fn ready(config: GatewayConfig) -> Gateway {
    ready_with_text(config, bytes()).await
}

async fn ready_with_text(config: GatewayConfig, text: LoadText) -> Gateway {
    let gateway = Gateway::start(config, text).await.unwrap();
    wait_ready(&gateway).await;
    gateway
}

async fn wait_ready(gateway: &Gateway) {
    let mut status = gateway.status.clone();
    let ready = status.wait_for(|status| matches!(status, GatewayReadiness::Ready(_)));
    tokio::time::timeout(WATCHDOG, ready).await.expect("the gateway becomes ready").unwrap();
}

pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WATCHDOG, wait).await.unwrap_or_else(|_| panic!("did not happen: {what}"));
}

pub(crate) async fn eventually_async(what: &str, condition: impl AsyncFn() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WATCHDOG, wait).await.unwrap_or_else(|_| panic!("did not happen: {what}"));
}
