//! Starts the members of a group, waits for their weights and watches them.

use std::{
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
};

use anyhow::Context as _;
use model::{
    precision::Precision,
    resident::LoadedWeights,
    shape::source::WeightSource,
    weights::{
        LoadProgress,
        device_group::{GroupPlan, ShardWeights, leader::geometry},
        served::ServedLayers,
    },
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use settings::{CoreList, DeviceGroup, DeviceSplit, exit::Exit};
use shmproto::{
    fd_passing::ReceiveError,
    group::{
        GroupLeader, LAYOUT_HASH, WeightSplit,
        startup::{FromMember, LeaderEnd, MemberHello, ServeGroup, ToMember},
    },
};

use text::sandbox::OWN_PROGRAM;

use super::{MEMBER_COMMAND, RELEASE, SPIN, code_of, files_hash};
use crate::{config::DeviceFlags, spawn};

/// A base that several devices hold.
#[derive(Debug, Clone)]
pub(crate) struct GroupOptions {
    pub(crate) devices: DeviceGroup,
    pub(crate) split: DeviceSplit,
    /// Maximum number of rows of a pass.
    pub(crate) rows: usize,
    /// Memory that each process may use, in bytes.
    pub(crate) memory_bytes: u64,
    /// Seed of random weights, instead of read ones.
    pub(crate) random_weights: Option<u64>,
}

impl GroupOptions {
    /// Returns the options of a base on several devices; `None` on one.
    pub(crate) fn of(
        flags: &DeviceFlags,
        rows: usize,
        memory_bytes: u64,
        random_weights: Option<u64>,
    ) -> Option<Self> {
        let (devices, split) = (flags.several()?.clone(), flags.device_split);
        Some(Self { devices, split, rows, memory_bytes, random_weights })
    }

    /// Returns the division of the weights.
    pub(crate) fn plan(&self) -> GroupPlan {
        GroupPlan { devices: self.devices.devices().len(), split: weight_split(self.split) }
    }
}

/// The members of a group, which wait for the leader's calls once they serve.
#[derive(Debug)]
pub(crate) struct Members {
    members: Vec<MemberLink>,
    /// Bytes of weights on each device, the leader's first.
    pub(crate) weight_bytes: Vec<u64>,
    /// Bytes of the group's shared memory.
    pub(crate) shared_bytes: u64,
}

#[derive(Debug)]
struct MemberLink {
    device: usize,
    socket: Arc<LeaderEnd>,
    /// Answer to the hello, or the reason of the refusal.
    loaded: mpsc::Receiver<Result<LoadedMember, String>>,
}

/// Answer of a member whose weights are loaded.
#[derive(Debug)]
struct LoadedMember {
    weight_bytes: u64,
    /// Memory of its outputs.
    outputs: OwnedFd,
}

/// Starts the members of a group, loads the leader's part of the weights of the model at `path`, and waits
/// for the members' weights. Progress of all of them goes to `progress`.
///
/// # Errors
/// If a process cannot be started or a part cannot be loaded, or a member refuses to take part.
pub(crate) fn load(
    path: &Path,
    source: &(dyn WeightSource + Sync),
    options: &GroupOptions,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> anyhow::Result<(LoadedWeights<ServedLayers>, GroupStart)> {
    let (devices, plan) = (options.devices.devices(), options.plan());
    let total = Arc::new(GroupProgress::new(devices.len()));
    let members = start(path, options, &total)?;
    let told = |at: LoadProgress| progress(total.record(0, at));
    let own = ShardWeights::load(source, plan, 0, devices[0].0.len(), &told)?;
    let loaded = members.iter().map(MemberLink::await_weights).collect::<anyhow::Result<Vec<_>>>()?;
    let weight_bytes = loaded.iter().map(|member| member.weight_bytes);
    let weight_bytes = std::iter::once(own.bytes() as u64).chain(weight_bytes).collect();
    let outputs = loaded.into_iter().map(|member| member.outputs).collect();
    let geometry = geometry(&own, options.rows);
    let group = GroupLeader::create(geometry, outputs, SPIN);
    let group = group.context("cannot share memory with the device group")?;
    let region = group.fd().map(|fd| fd.try_clone_to_owned()).transpose()?;
    let region = region.context("the region of the device group has no descriptor")?;
    let weights = LoadedWeights::of_group(source, own, group)?;
    let members = Members { members, weight_bytes, shared_bytes: geometry.shared_bytes() };
    Ok((weights, GroupStart { members, region }))
}

/// A group whose members have loaded their weights and do not know the precision yet.
#[derive(Debug)]
pub(crate) struct GroupStart {
    members: Members,
    region: OwnedFd,
}

impl GroupStart {
    /// Lets the members serve, with linear layers in `precision`.
    ///
    /// # Errors
    /// If a member is gone.
    pub(crate) fn serve(self, precision: Precision) -> anyhow::Result<Members> {
        let serve = ServeGroup { precision: code_of(precision) };
        for member in &self.members.members {
            let sent = member.socket.send(&ToMember::Serve(serve), &[self.region.as_fd()]);
            sent.with_context(|| format!("device {} of the group is gone", member.device))?;
        }
        Ok(self.members)
    }
}

fn weight_split(split: DeviceSplit) -> WeightSplit {
    match split {
        DeviceSplit::Outputs => WeightSplit::Outputs,
        DeviceSplit::Layers => WeightSplit::Layers,
    }
}

/// Starts a process for each device but the first.
fn start(
    path: &Path,
    options: &GroupOptions,
    progress: &Arc<GroupProgress>,
) -> anyhow::Result<Vec<MemberLink>> {
    let path = std::path::absolute(path).context("cannot find the directory of the model")?;
    let files = files_hash(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let devices = options.devices.devices();
    let hello = |(device, cores): (usize, &CoreList)| MemberHello {
        layout_hash: LAYOUT_HASH,
        release: RELEASE.to_owned(),
        device: u32::try_from(device).unwrap_or(u32::MAX),
        devices: u32::try_from(devices.len()).unwrap_or(u32::MAX),
        split: weight_split(options.split).code(),
        model: path.display().to_string(),
        random_weights: options.random_weights,
        files,
        cores: cores.0.iter().copied().collect(),
        memory_bytes: options.memory_bytes,
        pass_rows: u32::try_from(options.rows).unwrap_or(u32::MAX),
    };
    let hellos = devices.iter().enumerate().skip(1).map(hello);
    hellos.map(|hello| MemberLink::start(hello, Arc::clone(progress))).collect()
}

impl MemberLink {
    /// Starts a member's process and the thread that listens to it.
    fn start(hello: MemberHello, progress: Arc<GroupProgress>) -> anyhow::Result<Self> {
        let device = hello.device as usize;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (own, childs) = pair.context("cannot make a socket for a device of the group")?;
        let mut command = Command::new(OWN_PROGRAM);
        // The process list shows this name.
        command.arg0("base-executor").arg(MEMBER_COMMAND).stdin(Stdio::from(childs)).stdout(Stdio::null());
        let started = command.spawn();
        let child = started.with_context(|| format!("cannot start device {device} of the group"))?;
        // The command holds the child's end of the socket; after it is gone the child alone does.
        drop(command);
        let socket = Arc::new(LeaderEnd::over(own));
        socket.send(&ToMember::Hello(hello), &[]).context("a device of the group does not listen")?;
        let (answer, loaded) = mpsc::channel();
        let listening = Arc::clone(&socket);
        spawn("device-group", move || {
            listen(&listening, device, &progress, &answer);
            drop(child);
        })?;
        Ok(Self { device, socket, loaded })
    }

    /// Waits until the member has loaded its weights.
    fn await_weights(&self) -> anyhow::Result<LoadedMember> {
        let ended = || format!("device {} of the group ended while it loaded; see its log", self.device);
        self.loaded.recv().with_context(ended)?.map_err(anyhow::Error::msg)
    }
}

/// Hears a member until its process ends. A member that ends after it has loaded takes the leader with it.
fn listen(
    socket: &LeaderEnd,
    device: usize,
    progress: &GroupProgress,
    answer: &mpsc::Sender<Result<LoadedMember, String>>,
) {
    let mut has_loaded = false;
    let ended = loop {
        match socket.receive() {
            Ok(Some((FromMember::Loading(at), _))) => {
                progress.record(device, LoadProgress { done: at.done, total: at.total });
            }
            Ok(Some((FromMember::Loaded(loaded), descriptors))) => {
                has_loaded = true;
                let weight_bytes = loaded.weight_bytes;
                let member =
                    descriptors.into_iter().next().map(|outputs| LoadedMember { weight_bytes, outputs });
                let _ =
                    answer.send(member.ok_or_else(|| "a device sent no memory of its outputs".to_owned()));
            }
            Ok(Some((FromMember::Refused(reason), _))) => {
                let _ = answer.send(Err(reason));
                return;
            }
            Ok(None) => {}
            Err(ended) => break ended,
        }
    };
    if has_loaded {
        end_group(device, &ended);
    }
}

/// Ends this process, because a part of its weights is gone: no answer may come from the rest. The supervisor
/// restarts the group, and gateways repeat the requests that were running.
fn end_group(device: usize, ended: &ReceiveError) -> ! {
    tracing::error!(device, cause = %ended, "a device of the group ended, so the whole executor ends");
    std::process::exit(Exit::Failed.number().into());
}

/// Progress of all devices, as one.
#[derive(Debug)]
struct GroupProgress {
    devices: Vec<[AtomicU64; 2]>,
}

impl GroupProgress {
    fn new(devices: usize) -> Self {
        Self { devices: (0..devices).map(|_| Default::default()).collect() }
    }

    /// Records the progress of one device and returns that of the group.
    fn record(&self, device: usize, at: LoadProgress) -> LoadProgress {
        let [done, total] = &self.devices[device];
        // Threads of a device report out of order.
        done.fetch_max(at.done, Relaxed);
        total.store(at.total, Relaxed);
        let sum = |number: usize| self.devices.iter().map(|of| of[number].load(Relaxed)).sum();
        LoadProgress { done: sum(0), total: sum(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_of_a_group_is_that_of_all_its_devices() {
        let group = GroupProgress::new(2);
        let at = |done, total| LoadProgress { done, total };
        assert_eq!(group.record(0, at(5, 10)), at(5, 10));
        assert_eq!(group.record(1, at(1, 20)), at(6, 30));
        assert_eq!(group.record(0, at(3, 10)), at(6, 30), "a late report takes nothing back");
    }
}
