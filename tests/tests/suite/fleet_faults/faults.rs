//! Faults of a fleet.

use std::{thread, time::Duration};

use e2e_tests::{
    DeploymentProcess, chaos::ChaosRng, fleet::shared::SharedFleet, network::NetworkLink,
    servers::wire::ResponseFault,
};
use rustix::process::Signal;

use super::changes::{AdapterChanges, SILENCE};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FleetFault {
    /// A process is killed, and its supervisor starts another.
    Dies(KilledProcess),
    /// All processes of a host are killed, and another host comes, at the same or another address.
    Replaced(ReplacementHost),
    /// A host becomes unreachable forever, and another one comes.
    Vanishes,
    /// A host gets SIGTERM, and another one comes.
    Drained,
    /// One more host comes, and the oldest gets SIGTERM.
    Added,
    /// A picker is killed, and another one starts in its place.
    Picker,
    Registry(Outage),
    Bucket(Wrong),
    /// One link of a host is cut, or all of them.
    Cut(Option<CutLink>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KilledProcess {
    Gateway,
    Executor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReplacementHost {
    Here,
    Elsewhere,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outage {
    Restarts,
    IsKilled,
    FailsOver,
    IsSilent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wrong {
    Slow,
    Flipped,
    Broken,
    Silent,
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CutLink {
    Front,
    Registry,
    Bucket,
}

impl FleetFault {
    pub(crate) const ALL: [Self; 21] = [
        Self::Dies(KilledProcess::Gateway),
        Self::Dies(KilledProcess::Executor),
        Self::Replaced(ReplacementHost::Here),
        Self::Replaced(ReplacementHost::Elsewhere),
        Self::Vanishes,
        Self::Drained,
        Self::Added,
        Self::Picker,
        Self::Registry(Outage::Restarts),
        Self::Registry(Outage::IsKilled),
        Self::Registry(Outage::FailsOver),
        Self::Registry(Outage::IsSilent),
        Self::Bucket(Wrong::Slow),
        Self::Bucket(Wrong::Flipped),
        Self::Bucket(Wrong::Broken),
        Self::Bucket(Wrong::Silent),
        Self::Bucket(Wrong::Gone),
        Self::Cut(Some(CutLink::Front)),
        Self::Cut(Some(CutLink::Registry)),
        Self::Cut(Some(CutLink::Bucket)),
        Self::Cut(None),
    ];

    /// Errors of adapter changes that this fault explains, until all hosts have recovered.
    pub(crate) fn explains(self) -> &'static [&'static str] {
        match self {
            Self::Dies(KilledProcess::Gateway) => &[SILENCE],
            // A gateway may notice the end of its executor before its own.
            Self::Replaced(_) | Self::Vanishes => &[SILENCE, "executor_unavailable"],
            Self::Dies(KilledProcess::Executor) => &["executor_unavailable"],
            Self::Drained | Self::Added => &[SILENCE, "shutting_down"],
            Self::Picker => &[],
            Self::Registry(_) | Self::Cut(Some(CutLink::Registry)) => &["registry_unavailable"],
            Self::Bucket(_) | Self::Cut(Some(CutLink::Bucket)) => &["adapter_store_unavailable"],
            Self::Cut(Some(CutLink::Front)) => &[],
            // A host cut off during a change holds a lock that delays the others.
            Self::Cut(None) => &["registry_unavailable"],
        }
    }
}

/// Injects the fault into a host or a shared server; returns when the faulty part or a replacement works.
pub(crate) fn happen(
    kind: FleetFault,
    fleet: &mut SharedFleet,
    changes: &AdapterChanges,
    random: &mut ChaosRng,
) {
    let (index, pause) = (random.below(fleet.hosts.len()), pause(random));
    match kind {
        FleetFault::Dies(KilledProcess::Gateway) => {
            fleet.hosts[index].deployment.signal(DeploymentProcess::Gateway, Signal::KILL)
        }
        FleetFault::Dies(KilledProcess::Executor) => fleet.hosts[index].deployment.kill_executor(),
        FleetFault::Replaced(place) => replace(fleet, index, place, pause),
        FleetFault::Vanishes => vanish(fleet, index, changes, pause),
        FleetFault::Drained => {
            assert!(fleet.remove_host(index).deployment.stop().success());
            fleet.add();
        }
        FleetFault::Added => {
            fleet.add();
            changes.ask(fleet.clients());
            thread::sleep(pause);
            assert!(fleet.remove_host(0).deployment.stop().success());
        }
        FleetFault::Picker => {
            fleet.front.kill_picker(index % 2);
            thread::sleep(pause);
            fleet.replace_picker(index % 2);
        }
        FleetFault::Registry(outage) => fail_registry(fleet, outage, pause),
        FleetFault::Bucket(wrong) => {
            fleet.bucket_wire.set(match wrong {
                Wrong::Slow => ResponseFault::Slow(Duration::from_millis(400)),
                Wrong::Flipped => ResponseFault::Flip(usize::MAX),
                Wrong::Broken => ResponseFault::Break(usize::MAX),
                Wrong::Silent => ResponseFault::Silence,
                Wrong::Gone => ResponseFault::Gone,
            });
            thread::sleep(pause);
            fleet.bucket_wire.set(ResponseFault::None);
        }
        FleetFault::Cut(side) => cut(fleet, index, side, changes, pause),
    }
}

/// Mostly shorter than all timeouts, sometimes longer.
fn pause(random: &mut ChaosRng) -> Duration {
    let most = if random.below(4) == 0 { 8000 } else { 2000 };
    Duration::from_millis(200 + random.below(most) as u64)
}

fn replace(fleet: &mut SharedFleet, index: usize, place: ReplacementHost, pause: Duration) {
    let host = match place {
        // The front gets no notice.
        ReplacementHost::Here => fleet.hosts.remove(index),
        ReplacementHost::Elsewhere => fleet.remove_host(index),
    };
    host.deployment.kill_supervisor();
    thread::sleep(pause);
    match place {
        ReplacementHost::Here => fleet.replace(index, host.links),
        ReplacementHost::Elsewhere => fleet.add(),
    }
}

fn vanish(fleet: &mut SharedFleet, index: usize, changes: &AdapterChanges, pause: Duration) {
    changes.ask(others(fleet, index));
    let host = fleet.remove_host(index);
    NetworkLink::ALL.into_iter().for_each(|link| host.links.cut(link));
    thread::sleep(pause);
    host.deployment.kill_supervisor();
    fleet.add();
}

fn fail_registry(fleet: &mut SharedFleet, outage: Outage, pause: Duration) {
    match outage {
        Outage::Restarts => fleet.registry.shut_down(),
        Outage::IsKilled => fleet.registry.kill(),
        Outage::FailsOver => {
            let standby = fleet.registry.standby();
            fleet.registry.stop();
            thread::sleep(pause);
            standby.promote();
            fleet.registry_wire.lead_to(standby.port());
            fleet.registry = standby;
        }
        Outage::IsSilent => fleet.registry_wire.set(ResponseFault::Cut),
    }
    match outage {
        Outage::Restarts | Outage::IsKilled => {
            thread::sleep(pause);
            fleet.registry.restart();
        }
        Outage::FailsOver => {}
        Outage::IsSilent => {
            thread::sleep(pause);
            fleet.registry_wire.set(ResponseFault::None);
        }
    }
}

fn cut(
    fleet: &mut SharedFleet,
    index: usize,
    side: Option<CutLink>,
    changes: &AdapterChanges,
    pause: Duration,
) {
    let links = match side {
        None => NetworkLink::ALL.to_vec(),
        Some(CutLink::Front) => vec![NetworkLink::Front],
        Some(CutLink::Registry) => vec![NetworkLink::Registry],
        Some(CutLink::Bucket) => vec![NetworkLink::Bucket],
    };
    if links.contains(&NetworkLink::Front) {
        changes.ask(others(fleet, index));
    }
    let host = &fleet.hosts[index].links;
    links.iter().for_each(|link| host.cut(*link));
    thread::sleep(pause);
    links.iter().for_each(|link| host.mend(*link));
}

fn others(fleet: &SharedFleet, index: usize) -> Vec<e2e_tests::Client> {
    let mut clients = fleet.clients();
    clients.remove(index);
    clients
}
