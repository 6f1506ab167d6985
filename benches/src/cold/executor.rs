//! An executor in one mode of a cold start, its worker, and requests to it as a gateway sends them.

use std::{
    collections::HashMap,
    iter,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use shmproto::{
    codec::Wire as _,
    message::{
        AdapterIdBytes, Generate, Hello, LoadAdapter, Output, PROTOCOL_VERSION, Stats, ToExecutor, ToGateway,
    },
};
use tempfile::TempDir;
use tokio::time::{sleep, timeout, timeout_at};
use zeromq::{DealerRecvHalf, DealerSendHalf, DealerSocket, Socket as _, SocketRecv as _, SocketSend as _};

use super::arrivals::RequestArrival;
use crate::{
    config::SuiteConfig,
    machine::{Cores, list},
    process::LoggedProcess,
    requests::greedy,
    workload,
};

const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);

/// Mode of requests whose adapter is not on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Cached,
    OnDemand,
    /// A request starts at once, and workers compute the missing ranks.
    CpuAssist,
}

impl Mode {
    pub(crate) const EACH: [Self; 3] = [Self::Cached, Self::OnDemand, Self::CpuAssist];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::OnDemand => "on-demand",
            Self::CpuAssist => "cpu-assist",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ColdCompute {
    Worker,
    Nobody,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ExecutorPlacement<'a> {
    pub(crate) programs: &'a Path,
    pub(crate) model: &'a Path,
    pub(crate) base_cores: &'a [usize],
    pub(crate) worker_core: usize,
    pub(crate) further_workers: &'a [usize],
    /// Bytes of adapters on the device; [`Mode::Cached`] ignores it and holds all adapters.
    pub(crate) device_bytes: u64,
    pub(crate) host_bytes: u64,
    /// Speed of the emulated link; infinity uses the real link.
    pub(crate) link_gbps: f64,
    pub(crate) kv_bytes: u64,
    pub(crate) options: &'a [String],
    pub(crate) helper: ColdCompute,
}

impl<'a> ExecutorPlacement<'a> {
    /// Puts the base on the first of `cores` and the worker on the last. The caller sets budgets and link.
    ///
    /// # Errors
    /// If there is only one core.
    pub(crate) fn on(config: &'a SuiteConfig, cores: &'a Cores) -> Result<Self> {
        let &[_, .., worker_core] = cores.numbers() else {
            bail!("cold starts take a core for the base and one for a worker; give --threads 2");
        };
        Ok(Self {
            programs: &config.ours,
            model: &config.model,
            base_cores: &cores.numbers()[..1],
            worker_core,
            further_workers: &[],
            device_bytes: 1 << 30,
            host_bytes: 4 << 30,
            link_gbps: 1.0,
            kv_bytes: 256 << 20,
            options: &[],
            helper: ColdCompute::Worker,
        })
    }

    fn worker_cores(&self) -> impl Iterator<Item = usize> {
        let first = (self.helper == ColdCompute::Worker).then_some(self.worker_core);
        first.into_iter().flat_map(|first| iter::once(first).chain(self.further_workers.iter().copied()))
    }
}

pub(crate) struct ColdExecutor {
    pub(crate) mode: Mode,
    send: DealerSendHalf,
    receive: DealerRecvHalf,
    next: u64,
    adapters: Vec<AdapterIdBytes>,
    // Dropped before `folder`, which the processes use.
    workers: Vec<LoggedProcess>,
    executor: LoggedProcess,
    folder: TempDir,
}

/// Arrival times of one request's tokens, and the executor's own report of its start.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ServedTiming {
    /// From the request to its first token.
    pub(crate) first: Duration,
    /// From the request to its last token.
    pub(crate) last: Duration,
    pub(crate) tokens: usize,
    pub(crate) load_wait: Duration,
    /// Arrival of each message with tokens, from the request on.
    pub(crate) steps: Vec<Duration>,
}

struct OpenRequest {
    sent: Instant,
    served: ServedTiming,
}

impl ColdExecutor {
    pub(crate) async fn start(place: ExecutorPlacement<'_>, mode: Mode) -> Result<Self> {
        let folder = tempfile::tempdir().context("no folder for an executor's sockets")?;
        let socket = folder.path().join("run/executor.sock");
        let log = |name: &str| folder.path().join(name);
        let executor =
            LoggedProcess::start(&mut executor_command(place, mode, &socket), &log("executor.log"))?;
        let workers = place.worker_cores().map(|core| {
            LoggedProcess::start(
                &mut worker_command(place, core, &socket),
                &log(&format!("worker-{core}.log")),
            )
        });
        let workers = workers.collect::<Result<Vec<_>>>()?;
        let connected = timeout(LIMIT, connect(&socket)).await.context("the executor does not answer")?;
        let (send, receive) = connected.with_context(|| executor.last_words())?;
        let mut started =
            Self { mode, send, receive, next: 1, adapters: Vec::new(), workers, executor, folder };
        let workers = started.workers.len();
        let all = started.stats_when(|stats| stats.workers.len() == workers).await;
        all.context("the workers do not come")?;
        Ok(started)
    }

    /// Loads adapters into the host tier, and in [`Mode::Cached`] onto the device; requests name them by
    /// index.
    pub(crate) async fn load(&mut self, folders: &[PathBuf]) -> Result<()> {
        for folder in folders {
            let call = LoadAdapter::of_one(0, folder.display().to_string(), [0; 32]);
            self.send(&ToExecutor::LoadAdapter(call)).await?;
            match self.answer().await? {
                ToGateway::AdapterLoaded(loaded) => self.adapters.push(loaded.adapter),
                other => bail!("{} was not loaded: {other:?}", folder.display()),
            }
        }
        Ok(())
    }

    pub(crate) async fn wait_for_copies(&mut self) -> Result<()> {
        let mut copied = None;
        let started = Instant::now();
        loop {
            let now = self.stats().await?.copied_bytes;
            if copied == Some(now) {
                return Ok(());
            }
            ensure!(started.elapsed() < LIMIT, "adapters travel for ever");
            copied = Some(now);
            sleep(POLL * 5).await;
        }
    }

    /// Sends every request at its time and returns the timings in the order of arrival.
    pub(crate) async fn serve(&mut self, arrivals: &[RequestArrival]) -> Result<Vec<ServedTiming>> {
        let (first, started) = (self.next, Instant::now());
        let mut open: HashMap<u64, OpenRequest> = HashMap::new();
        let mut ended: Vec<Option<ServedTiming>> = vec![None; arrivals.len()];
        let mut sent = 0;
        while sent < arrivals.len() || !open.is_empty() {
            let due = arrivals.get(sent).map(|arrival| started + arrival.at);
            if due.is_some_and(|due| due <= Instant::now()) {
                let request = self.ask(&arrivals[sent]).await?;
                open.insert(request, OpenRequest::new());
                sent += 1;
                continue;
            }
            let until = due.unwrap_or_else(|| Instant::now() + LIMIT);
            match timeout_at(until.into(), self.receive.recv()).await {
                Err(_) => ensure!(due.is_some(), "requests are not answered: {}", self.executor.last_words()),
                Ok(message) => {
                    for output in outputs(&read(&message.context("the executor hung up")?.into_vec())?)? {
                        if let Some(served) = note(&mut open, output)? {
                            ended[usize::try_from(output.request - first)?] = Some(served);
                        }
                    }
                }
            }
        }
        ended.into_iter().map(|served| served.context("a request was lost")).collect()
    }

    async fn ask(&mut self, arrival: &RequestArrival) -> Result<u64> {
        let request = self.next;
        self.next += 1;
        let loaded = |index| self.adapters.get(index).copied().context("there is no such adapter");
        let adapter = arrival.adapter.map(loaded).transpose()?;
        let prompt = workload::prompt(arrival.seed, arrival.prompt);
        let namespace = adapter.unwrap_or_default();
        let generate = Generate { adapter, namespace, ..greedy(request, &prompt, arrival.answer) };
        self.send(&ToExecutor::Generate(generate)).await.map(|()| request)
    }

    pub(crate) async fn stats(&mut self) -> Result<Stats> {
        self.send(&ToExecutor::GetStats(0)).await?;
        match self.answer().await? {
            ToGateway::Stats(stats) => Ok(stats),
            other => bail!("figures were asked for, not {other:?}"),
        }
    }

    async fn stats_when(&mut self, is_so: impl Fn(&Stats) -> bool) -> Result<Stats> {
        let started = Instant::now();
        loop {
            let stats = self.stats().await?;
            if is_so(&stats) {
                return Ok(stats);
            }
            ensure!(started.elapsed() < LIMIT, "the executor's last words:\n{}", self.executor.last_words());
            sleep(POLL).await;
        }
    }

    pub(crate) fn run_folder(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    pub(crate) fn log(&self) -> Result<String> {
        std::fs::read_to_string(self.folder.path().join("executor.log")).context("no log of the executor")
    }

    async fn send(&mut self, message: &ToExecutor) -> Result<()> {
        self.send.send(message.to_bytes().into()).await.context("the executor takes no message")
    }

    /// Waits for the next message; only for use while no request generates.
    async fn answer(&mut self) -> Result<ToGateway> {
        let message = timeout(LIMIT, self.receive.recv()).await.context("the executor is silent")?;
        read(&message.context("the executor hung up")?.into_vec())
    }
}

impl OpenRequest {
    fn new() -> Self {
        let none = Duration::ZERO;
        let served = ServedTiming { first: none, last: none, tokens: 0, load_wait: none, steps: Vec::new() };
        Self { sent: Instant::now(), served }
    }
}

fn executor_command(place: ExecutorPlacement<'_>, mode: Mode, socket: &Path) -> Command {
    let device_bytes = if mode == Mode::Cached { place.host_bytes } else { place.device_bytes };
    let mut command = Command::new(place.programs.join("base-executor"));
    command.arg("--model").arg(place.model).arg("--socket").arg(socket);
    for (option, value) in [
        ("--cores", list(place.base_cores)),
        ("--kv-bytes", place.kv_bytes.to_string()),
        ("--adapter-bytes", place.host_bytes.to_string()),
        ("--device-adapter-bytes", device_bytes.to_string()),
        ("--cold-start", mode.name().to_owned()),
        ("--max-workers", place.worker_cores().count().to_string()),
        ("--max-running", "32".to_owned()),
        ("--max-waiting", "1024".to_owned()),
        ("--log-format", "json".to_owned()),
    ] {
        command.arg(option).arg(value);
    }
    command.args(place.options);
    // In cached mode no adapter is cold; an emulated link would only slow down the loading.
    if mode != Mode::Cached && place.link_gbps.is_finite() {
        command.arg("--link-gbps").arg(place.link_gbps.to_string());
    }
    command
}

fn worker_command(place: ExecutorPlacement<'_>, core: usize, socket: &Path) -> Command {
    let mut command = Command::new(place.programs.join("lora-worker"));
    command.arg("--executor").arg(socket.with_file_name("workers.sock"));
    command.arg("--core").arg(core.to_string());
    command
}

async fn connect(socket: &Path) -> Result<(DealerSendHalf, DealerRecvHalf)> {
    while !socket.exists() {
        sleep(POLL).await;
    }
    let mut dealer = DealerSocket::new();
    dealer.connect(&format!("ipc://{}", socket.display())).await.context("cannot connect")?;
    let (mut send, mut receive) = dealer.split();
    let hello = ToExecutor::Hello(Hello { version: PROTOCOL_VERSION, instance: 1 });
    send.send(hello.to_bytes().into()).await.context("cannot say hello")?;
    loop {
        match read(&receive.recv().await.context("no welcome")?.into_vec())? {
            ToGateway::Welcome(_) => return Ok((send, receive)),
            ToGateway::Loading(_) => {}
            other => bail!("a welcome was expected, not {other:?}"),
        }
    }
}

fn read(frames: &[impl AsRef<[u8]>]) -> Result<ToGateway> {
    let [frame] = frames else { bail!("a message has one frame") };
    ToGateway::from_bytes(frame.as_ref()).map_err(|error| anyhow::anyhow!("a message is not one: {error}"))
}

fn outputs(message: &ToGateway) -> Result<&[Output]> {
    match message {
        ToGateway::Outputs(outputs) => Ok(outputs),
        other => bail!("outputs were expected, not {other:?}"),
    }
}

/// Records an output of a request; returns the timing when the request has ended.
fn note(open: &mut HashMap<u64, OpenRequest>, output: &Output) -> Result<Option<ServedTiming>> {
    ensure!(output.error.is_none(), "a request failed: {:?}", output.error);
    let Some(OpenRequest { sent, served }) = open.get_mut(&output.request) else {
        bail!("an answer to a request that is not open");
    };
    if !output.tokens.is_empty() {
        served.last = sent.elapsed();
        if served.tokens == 0 {
            served.first = served.last;
            served.load_wait = Duration::from_micros(output.load_wait_us);
        }
        served.tokens += output.tokens.len();
        served.steps.push(served.last);
    }
    let has_ended = output.finish.is_some();
    Ok(has_ended.then(|| open.remove(&output.request)).flatten().map(|open| open.served))
}
