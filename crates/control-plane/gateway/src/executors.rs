//! All executors, on this host and others: each has a name, a connection, and a record of its load.
//!
//! - [`executor_handle`]: one executor and its state.
//! - [`load_tracker`]: the load of an executor, and estimates of its costs.
//! - [`prefix_affinity`]: which executor computed which prefixes.
//!
//! All executors serve one base. The first executor determines the base while any executor serves it; an
//! executor with another base is refused by name and never used. Apart from that the executors are
//! independent: each has its own adapters, memory and load, and may disconnect at any time.

pub mod executor_handle;
pub(crate) mod load_tracker;
pub(crate) mod prefix_affinity;

use std::sync::{Arc, Mutex};

use scheduling::{
    fairness::{background_limit::BackgroundCapacity, burst_limit::BurstCapacity},
    routing::in_flight::MeanAnswer,
};
use shmproto::message::{DeviceKind, Welcome};
use tokio::sync::Notify;

pub use self::executor_handle::{ExecutorHandle, ExecutorState};
use self::prefix_affinity::Prefixes;
use crate::{
    executor::{Endpoint, Executor, LinkSettings, SharedConnections},
    lock::lock,
};

pub(crate) const MAX_EXECUTORS: usize = 64;

/// Name of a single executor.
pub const ONLY: &str = "executor";

#[derive(Debug, Clone)]
pub struct Address {
    pub name: String,
    pub endpoint: Endpoint,
}

/// Hashes of the base and its text that all executors share.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BaseIdentity {
    base_hash: [u8; 32],
    text_hash: [u8; 32],
}

#[derive(Debug, Default)]
struct Claims {
    base: Option<BaseIdentity>,
    /// Index of each executor that serves the base, with its device kind and its numeric settings.
    by: Vec<(usize, DeviceKind, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FreeCapacity {
    /// Batch slots, in total and for over-quota tenants.
    pub places: BurstCapacity,
    /// Batch slots for background requests.
    pub background: BackgroundCapacity,
    /// Number of requests that keep all executors busy.
    pub requests: usize,
    /// Maximum number of sequences that one executor can take now.
    pub sequences: usize,
    /// Maximum number of sequences that one executor takes when idle.
    pub limit: usize,
}

/// All executors of the gateway; clones share them.
#[derive(Debug, Clone)]
pub struct Executors(Arc<SharedExecutors>);

#[derive(Debug)]
struct SharedExecutors {
    members: Vec<ExecutorHandle>,
    claims: Mutex<Claims>,
    prefixes: Prefixes,
    answers: Mutex<MeanAnswer>,
    /// Notified when one of the executors may have capacity again.
    capacity_changed: Arc<Notify>,
}

impl Executors {
    #[must_use]
    pub fn connect(addresses: &[Address], limits: LinkSettings, common: &SharedConnections) -> Self {
        let executors = addresses.iter().map(|address| {
            (address.name.clone(), Executor::connect(address.endpoint.clone(), limits, common.clone()))
        });
        Self::of(executors, common)
    }

    /// Collects existing connections with their `common` state.
    #[must_use]
    pub fn of(executors: impl IntoIterator<Item = (String, Executor)>, common: &SharedConnections) -> Self {
        let members = executors.into_iter().enumerate();
        let members =
            members.map(|(index, (name, executor))| ExecutorHandle::new(index, name, executor)).collect();
        Self(Arc::new(SharedExecutors {
            members,
            claims: Mutex::default(),
            prefixes: Prefixes::default(),
            answers: Mutex::default(),
            capacity_changed: Arc::clone(&common.capacity_changed),
        }))
    }

    /// Returns all executors, in the order of the settings.
    #[must_use]
    pub fn all(&self) -> &[ExecutorHandle] {
        &self.0.members
    }

    #[must_use]
    pub fn member(&self, index: usize) -> &ExecutorHandle {
        &self.0.members[index]
    }

    #[must_use]
    pub fn named(&self, name: &str) -> Option<&ExecutorHandle> {
        self.all().iter().find(|member| member.name() == name)
    }

    #[must_use]
    pub(crate) fn are_several(&self) -> bool {
        self.all().len() > 1
    }

    /// Returns the record of which executor computed which prefixes.
    #[must_use]
    pub(crate) fn prefixes(&self) -> &Prefixes {
        &self.0.prefixes
    }

    #[must_use]
    pub(crate) fn answer_tokens(&self) -> f64 {
        lock(&self.0.answers).tokens()
    }

    /// Records that an answer ended with `tokens` tokens.
    pub fn answered(&self, tokens: u64) {
        lock(&self.0.answers).observe(tokens);
    }

    /// Records that the executor at `index` serves the base of `welcome`. Fails if another executor serves
    /// another base, or computes with other numeric settings on a device of the same kind.
    pub(crate) fn claim(&self, index: usize, welcome: &Welcome) -> Result<(), String> {
        let base = BaseIdentity { base_hash: welcome.base_hash, text_hash: welcome.text_hash };
        let mut claims = lock(&self.0.claims);
        claims.by.retain(|(other, ..)| *other != index);
        if let (Some((other, ..)), Some(served)) = (claims.by.first(), &claims.base)
            && *served != base
        {
            let first = self.member(*other).name();
            let what = if served.base_hash == base.base_hash { "tokenizer" } else { "base model" };
            return Err(format!(
                "it serves another {what} than the executor '{first}' ('{}'); start both with the same model",
                welcome.model_path
            ));
        }
        let of_its_kind = claims.by.iter().find(|(_, kind, _)| *kind == welcome.device.kind);
        if let Some((other, _, numbers)) = of_its_kind.filter(|(.., numbers)| *numbers != welcome.numbers) {
            return Err(format!(
                "its numbers ({}) differ from those of the executor '{}' ({numbers}); start both with \
                 the same precision, kv_dtype and adapter_dtype",
                welcome.numbers,
                self.member(*other).name()
            ));
        }
        claims.base = Some(base);
        claims.by.push((index, welcome.device.kind, welcome.numbers.clone()));
        Ok(())
    }

    /// Records that the executor at `index` serves nothing any more, and forgets its prefixes.
    pub(crate) fn release(&self, index: usize) {
        self.0.prefixes.forget(index);
        lock(&self.0.claims).by.retain(|(other, ..)| *other != index);
    }

    #[must_use]
    pub(crate) fn capacity_changed(&self) -> &Arc<Notify> {
        &self.0.capacity_changed
    }

    /// Sums the capacity of the executors that accept requests. Over-quota tenants may use the share
    /// `burst_share` of the batch slots. Background requests may use a share of the batch slots, or a number
    /// beside online requests.
    #[must_use]
    pub(crate) fn free_capacity(&self, burst_share: f64, background: (f64, usize)) -> FreeCapacity {
        let open = self.all().iter().filter(|member| member.is_open());
        open.fold(FreeCapacity::default(), |capacity, member| {
            let load = member.executor().load();
            FreeCapacity {
                places: BurstCapacity {
                    executors: capacity.places.executors + 1,
                    all: capacity.places.all.saturating_add(load.places),
                    floods: capacity
                        .places
                        .floods
                        .saturating_add((load.places as f64 * burst_share) as usize),
                },
                background: BackgroundCapacity {
                    beside: capacity.background.beside + background.1,
                    alone: capacity
                        .background
                        .alone
                        .saturating_add((load.places as f64 * background.0) as usize),
                },
                requests: capacity.requests.saturating_add(load.free()),
                sequences: capacity.sequences.max(load.limit.saturating_sub(load.held)),
                limit: capacity.limit.max(load.limit),
            }
        })
    }

    /// Waits until all connection tasks answer, connected or not. Returns false if one has ended.
    pub(crate) async fn links_answer(&self) -> bool {
        for member in self.all() {
            if !member.executor().link_answers().await {
                return false;
            }
        }
        true
    }

    /// Ends all connections; running sequences and calls end as lost.
    pub fn close(&self) {
        self.all().iter().for_each(|member| member.executor().close());
    }
}

#[cfg(test)]
mod tests {
    use shmproto::message::DeviceFacts;

    use super::*;

    fn two() -> Executors {
        let limits = LinkSettings { max_sequences: 1, silence: std::time::Duration::from_secs(1) };
        let address =
            |name: &str| Address { name: name.to_owned(), endpoint: Endpoint::Socket("nobody".into()) };
        Executors::connect(&[address("a"), address("b")], limits, &SharedConnections::default())
    }

    fn welcome(base: u8) -> Welcome {
        Welcome { base_hash: [base; 32], ..crate::executor::tests::welcome() }
    }

    #[tokio::test]
    async fn one_that_serves_another_base_is_refused_as_long_as_the_first_serves() {
        let executors = two();
        executors.claim(0, &welcome(1)).unwrap();
        let why = executors.claim(1, &welcome(2)).unwrap_err();
        assert!(why.contains("another base model than the executor 'a'"), "{why}");
        executors.claim(1, &welcome(1)).unwrap();
        executors.claim(0, &welcome(2)).unwrap_err();
        executors.release(1);
        executors.claim(0, &welcome(2)).unwrap();
    }

    #[tokio::test]
    async fn one_that_would_answer_with_other_bits_on_a_like_device_is_refused() {
        let executors = two();
        let with = |kind, numbers: &str| {
            let device = DeviceFacts { kind, ..DeviceFacts::default() };
            Welcome { device, numbers: numbers.to_owned(), ..welcome(1) }
        };
        executors.claim(0, &with(DeviceKind::Cpu, "activations mixed")).unwrap();
        let why = executors.claim(1, &with(DeviceKind::Cpu, "activations int8")).unwrap_err();
        assert!(
            why.contains("(activations int8) differ from those of the executor 'a' (activations mixed)"),
            "{why}"
        );
        executors.claim(1, &with(DeviceKind::Cuda, "activations the device's")).unwrap();
        executors.claim(1, &with(DeviceKind::Cpu, "activations mixed")).unwrap();
        executors.claim(0, &with(DeviceKind::Cpu, "activations int8")).unwrap_err();
        executors.release(1);
        executors.claim(0, &with(DeviceKind::Cpu, "activations int8")).unwrap();
    }

    #[tokio::test]
    async fn requests_are_counted_together() {
        let executors = two();
        assert_eq!(executors.named("b").unwrap().index(), 1);
        assert!(executors.named("c").is_none() && executors.are_several());
    }
}
