//! What can fail of a fleet.

use std::{thread, time::Duration};

use e2e_tests::{Process, chaos::Random, fleet::shared::Shared, network::Link, servers::wire::Harm};
use rustix::process::Signal;

use super::changes::{Changes, SILENCE};

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A process dies, and its supervisor starts another.
    Dies(Died),
    /// All processes of a host die, and another host is there instead: in its place, or elsewhere.
    Replaced(Where),
    /// A host cannot be reached any more and never comes back, and another one comes.
    Vanishes,
    /// A host is told to end, and another one comes.
    Drained,
    /// One more host comes, and the oldest is told to end.
    Added,
    /// A picker dies, and another one is started in its place.
    Picker,
    /// PostgreSQL fails.
    Registry(Outage),
    /// What the bucket says goes wrong.
    Bucket(Wrong),
    /// One link of a host is cut, or all of them.
    Cut(Option<Side>),
}

/// See [`Kind::Dies`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Died {
    Gateway,
    Executor,
}

/// See [`Kind::Replaced`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Where {
    Here,
    Elsewhere,
}

/// See [`Kind::Registry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outage {
    Restarts,
    IsKilled,
    FailsOver,
    IsSilent,
}

/// See [`Kind::Bucket`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wrong {
    Slow,
    Flipped,
    Broken,
    Silent,
    Gone,
}

/// See [`Kind::Cut`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Front,
    Registry,
    Bucket,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 21] = [
        Self::Dies(Died::Gateway),
        Self::Dies(Died::Executor),
        Self::Replaced(Where::Here),
        Self::Replaced(Where::Elsewhere),
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
        Self::Cut(Some(Side::Front)),
        Self::Cut(Some(Side::Registry)),
        Self::Cut(Some(Side::Bucket)),
        Self::Cut(None),
    ];

    /// What changes of adapters may be refused with while it lasts, and until it is over for everybody.
    pub(crate) fn explains(self) -> &'static [&'static str] {
        match self {
            Self::Dies(Died::Gateway) => &[SILENCE],
            // A gateway may see its executor die before it dies itself.
            Self::Replaced(_) | Self::Vanishes => &[SILENCE, "executor_unavailable"],
            Self::Dies(Died::Executor) => &["executor_unavailable"],
            Self::Drained | Self::Added => &[SILENCE, "shutting_down"],
            Self::Picker => &[],
            Self::Registry(_) | Self::Cut(Some(Side::Registry)) => &["registry_unavailable"],
            Self::Bucket(_) | Self::Cut(Some(Side::Bucket)) => &["adapter_store_unavailable"],
            Self::Cut(Some(Side::Front)) => &[],
            // Whoever was in the middle of a change holds up the others.
            Self::Cut(None) => &["registry_unavailable"],
        }
    }
}

/// Lets it happen to a host, or to what all of them share; returns when what has failed is back, or another is there.
pub(crate) fn happen(kind: Kind, fleet: &mut Shared, changes: &Changes, random: &mut Random) {
    let (index, pause) = (random.below(fleet.hosts.len()), pause(random));
    match kind {
        Kind::Dies(Died::Gateway) => fleet.hosts[index].deployment.signal(Process::Gateway, Signal::KILL),
        Kind::Dies(Died::Executor) => fleet.hosts[index].deployment.kill_executor(),
        Kind::Replaced(place) => replace(fleet, index, place, pause),
        Kind::Vanishes => vanish(fleet, index, changes, pause),
        Kind::Drained => {
            assert!(fleet.take(index).deployment.stop().success());
            fleet.add();
        }
        Kind::Added => {
            fleet.add();
            changes.ask(fleet.clients());
            thread::sleep(pause);
            assert!(fleet.take(0).deployment.stop().success());
        }
        Kind::Picker => {
            fleet.front.kill_picker(index % 2);
            thread::sleep(pause);
            fleet.replace_picker(index % 2);
        }
        Kind::Registry(outage) => fail_registry(fleet, outage, pause),
        Kind::Bucket(wrong) => {
            fleet.bucket_wire.set(match wrong {
                Wrong::Slow => Harm::Slow(Duration::from_millis(400)),
                Wrong::Flipped => Harm::Flip(usize::MAX),
                Wrong::Broken => Harm::Break(usize::MAX),
                Wrong::Silent => Harm::Silence,
                Wrong::Gone => Harm::Gone,
            });
            thread::sleep(pause);
            fleet.bucket_wire.set(Harm::None);
        }
        Kind::Cut(side) => cut(fleet, index, side, changes, pause),
    }
}

/// Mostly shorter than anybody's patience, and sometimes longer.
fn pause(random: &mut Random) -> Duration {
    let most = if random.below(4) == 0 { 8000 } else { 2000 };
    Duration::from_millis(200 + random.below(most) as u64)
}

fn replace(fleet: &mut Shared, index: usize, place: Where, pause: Duration) {
    let host = match place {
        // Nobody is told.
        Where::Here => fleet.hosts.remove(index),
        Where::Elsewhere => fleet.take(index),
    };
    host.deployment.kill_supervisor();
    thread::sleep(pause);
    match place {
        Where::Here => fleet.replace(index, host.links),
        Where::Elsewhere => fleet.add(),
    }
}

fn vanish(fleet: &mut Shared, index: usize, changes: &Changes, pause: Duration) {
    changes.ask(others(fleet, index));
    let host = fleet.take(index);
    Link::ALL.into_iter().for_each(|link| host.links.cut(link));
    thread::sleep(pause);
    host.deployment.kill_supervisor();
    fleet.add();
}

fn fail_registry(fleet: &mut Shared, outage: Outage, pause: Duration) {
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
        Outage::IsSilent => fleet.registry_wire.set(Harm::Cut),
    }
    match outage {
        Outage::Restarts | Outage::IsKilled => {
            thread::sleep(pause);
            fleet.registry.restart();
        }
        Outage::FailsOver => {}
        Outage::IsSilent => {
            thread::sleep(pause);
            fleet.registry_wire.set(Harm::None);
        }
    }
}

fn cut(fleet: &mut Shared, index: usize, side: Option<Side>, changes: &Changes, pause: Duration) {
    let links = match side {
        None => Link::ALL.to_vec(),
        Some(Side::Front) => vec![Link::Front],
        Some(Side::Registry) => vec![Link::Registry],
        Some(Side::Bucket) => vec![Link::Bucket],
    };
    if links.contains(&Link::Front) {
        changes.ask(others(fleet, index));
    }
    let host = &fleet.hosts[index].links;
    links.iter().for_each(|link| host.cut(*link));
    thread::sleep(pause);
    links.iter().for_each(|link| host.mend(*link));
}

/// Who asks all hosts but one.
fn others(fleet: &Shared, index: usize) -> Vec<e2e_tests::Client> {
    let mut clients = fleet.clients();
    clients.remove(index);
    clients
}
