//! A member's process: holds a part of the weights and computes the leader's calls.

use std::{os::fd::AsFd as _, path::Path, sync::Arc, thread};

use anyhow::Context as _;
use kernels::ThreadPool;
use kv_cache::ledger::MemoryAccount;
use model::{
    shape::source::WeightSource,
    sources::random::RandomSource,
    weights::{
        LoadProgress,
        device_group::{GroupPlan, ShardWeights, leader::geometry, member::MemberModel},
    },
};
use rustix::process::{Signal, set_parent_process_death_signal};
use settings::{CoreList, LogFormat, exit::in_one_line};
use shmproto::{
    fd_passing::{SendError, bounded_text},
    group::{
        GroupMember, MemberOutputs, WeightSplit,
        startup::{FromMember, GroupLoading, MemberEnd, MemberHello, MemberLoaded, ToMember},
    },
};

use super::{PRECISIONS, RELEASE, SPIN, files_hash};
use crate::{budget, spawn, startup};

/// Advice to the operator for a part that exceeds memory.
const MORE_DEVICES: &str = "use more devices, a smaller base or one with fewer bits per weight, or raise \
                            --process-memory";

/// Error of a person who runs the command.
const FOR_OWN_USE: &str = "this command is for the executor's own use; set --devices instead";

/// Part of the weights after which progress is reported.
const REPORTED_PART: u64 = 100;

/// Serves a part of a base to the leader behind standard input, until the leader ends.
///
/// # Errors
/// If standard input is no leader, or the leader violates the protocol.
pub fn run() -> anyhow::Result<()> {
    process::start_log(LogFormat::Auto);
    // A stopped process hears no closed socket, but a signal ends it. The signal comes when the thread that
    // started this process ends; that thread is the leader's compute thread, which ends last.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot follow the leader")?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("there is no leader")?;
    let leader = Arc::new(MemberEnd::over(socket));
    let Some((ToMember::Hello(hello), _)) = leader.receive().context(FOR_OWN_USE)? else {
        anyhow::bail!(FOR_OWN_USE);
    };
    failpoint::pass("member.hello");
    let (weights, outputs) = match load(&hello, &leader) {
        Ok(loaded) => loaded,
        Err(error) => {
            let reason = format!("device {} of the group: {}", hello.device, in_one_line(&*error));
            let _ = leader.send(&FromMember::Refused(bounded_text(&reason).to_owned()), &[]);
            return Ok(());
        }
    };
    let weight_bytes = weights.bytes() as u64;
    leader.send(&FromMember::Loaded(MemberLoaded { weight_bytes }), &[outputs.fd()])?;
    failpoint::pass("member.loaded");
    let Ok(Some((ToMember::Serve(serve), region))) = leader.receive() else {
        // The leader could not open the base and has said why.
        return Ok(());
    };
    let region = region.into_iter().next().context("the leader sent no region")?;
    let cores: Vec<usize> = hello.cores.iter().map(|&core| core as usize).collect();
    tracing::info!(
        device = hello.device,
        weight_bytes,
        threads = cores.len(),
        "a part of the base is loaded"
    );
    end_with(leader)?;
    let precision = PRECISIONS.get(usize::from(serve.precision)).context("the precision is unknown")?;
    let geometry = geometry(&weights, hello.pass_rows as usize);
    let group = GroupMember::join(region, geometry, (hello.device - 1, outputs), SPIN)?;
    let pool = ThreadPool::new(&cores).context("cannot start the threads of a device")?;
    MemberModel::new(weights, *precision, pool).serve(group)?;
    // The group ends with its leader. A member that ended first would look like a fault.
    loop {
        thread::park();
    }
}

/// Loads this device's part of the weights, and allocates the memory of its outputs.
fn load(hello: &MemberHello, leader: &MemberEnd) -> anyhow::Result<(ShardWeights, MemberOutputs)> {
    let path = Path::new(&hello.model);
    hello.check(RELEASE, &files_hash(path)?)?;
    startup::stay_on(&CoreList(hello.cores.iter().copied().collect()))?;
    let source: Box<dyn WeightSource + Send + Sync> = match hello.random_weights {
        Some(seed) => Box::new(RandomSource::open(path, seed)?),
        None => model::sources::open::open(path)?,
    };
    let split =
        WeightSplit::from_code(hello.split).context("the leader divides weights in an unknown way")?;
    let plan = GroupPlan { devices: hello.devices as usize, split };
    let (device, threads) = (hello.device as usize, hello.cores.len());
    let memory = MemoryAccount::new("the memory of a device of the group", hello.memory_bytes);
    budget::expect(&memory, ShardWeights::planned_bytes(&*source, plan, device)?, MORE_DEVICES)?;
    failpoint::pass("member.before_weights");
    let progress = |at: LoadProgress| report(leader, at);
    let weights = ShardWeights::load(&*source, plan, device, threads, &progress)?;
    anyhow::ensure!(
        source.unchanged(),
        "{} was written while it was loaded, so its weights may be wrong; start again when the file is \
         complete",
        path.display()
    );
    let outputs = MemberOutputs::create(&geometry(&weights, hello.pass_rows as usize));
    Ok((weights, outputs.context("there is no memory for a device's outputs")?))
}

/// Reports progress at every hundredth of the weights.
fn report(leader: &MemberEnd, LoadProgress { done, total }: LoadProgress) {
    let step = (total / REPORTED_PART).max(1);
    if done == total || done % step < step / 2 {
        // A leader that is gone ends this process soon.
        let _: Result<(), SendError> = leader.send(&FromMember::Loading(GroupLoading { done, total }), &[]);
    }
}

/// Ends this process when the leader's end of the socket closes.
fn end_with(leader: Arc<MemberEnd>) -> anyhow::Result<()> {
    let watch = move || {
        while leader.receive().is_ok() {}
        std::process::exit(0);
    };
    spawn("leader", watch).map(|_: thread::JoinHandle<()>| ())
}
