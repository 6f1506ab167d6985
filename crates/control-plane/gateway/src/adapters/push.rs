//! Loads an adapter from weights in the body of a request, with PEFT's configuration beside or inside them,
//! or from weights that a trainer sends.
//!
//! 1. The body is written and hashed piece by piece: to the state directory, or to memory for an ephemeral
//!    adapter. The header of the weights is read as soon as it has arrived, so a body without a configuration
//!    is refused early.
//! 2. The executor loads the written files, and the name then refers to the new adapter, as after any load.
//!
//! An ephemeral adapter is in no registry: it ends with the gateway, and no other host has it. While the
//! gateway lives, its files are loaded again into restarted executors and after evictions.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::{
    base::{Base, ComparedText},
    detached_task::run_detached,
    entry::AdapterEntry,
    errors::AdapterError,
    names::check_name,
    peft_config::HeaderReader,
    registry::Registry,
    request::{LoadRequest, Terms},
    store::{AdapterStore, Durability, PushedWeights, StoreError},
    tenant_quota::LoadOrigin,
};
use crate::thread;

/// Bytes that are collected before a thread writes and hashes them.
const PIECE_BYTES: usize = 1 << 20;

/// Parameters of a push.
#[derive(Debug)]
pub(crate) struct PushRequest {
    pub(crate) load: LoadRequest,
    pub(crate) durability: Durability,
    /// PEFT's configuration; `None` if the weights contain it.
    pub(crate) config: Option<String>,
}

/// A push whose body is arriving. Dropping it removes what has arrived.
#[derive(Debug)]
pub(crate) struct ArrivingPush {
    /// The request, with the owner of the adapter.
    request: LoadRequest,
    store: AdapterStore,
    weights: PushedWeights,
    /// Received bytes that are not written yet.
    piece: Vec<u8>,
    header: HeaderReader,
    config: Option<String>,
    by: LoadOrigin,
    /// Permit of an administrator's load. The number of trainers bounds the other pushes.
    _turn: Option<OwnedSemaphorePermit>,
}

impl Registry {
    /// Begins a push of about `expected_bytes`.
    ///
    /// # Errors
    /// If too many loads are running, or there is no memory for the weights.
    pub(crate) fn begin_push(
        &self,
        request: PushRequest,
        expected_bytes: u64,
    ) -> Result<ArrivingPush, AdapterError> {
        let PushRequest { mut load, durability, config } = request;
        let turn = self.begin_load()?;
        load.tenant = self.owner_of(&load);
        let weights = self.store.begin_push(load.tenant.as_deref(), durability, expected_bytes)?;
        let push = self.arriving(load, config, weights, LoadOrigin::Administrator);
        Ok(ArrivingPush { _turn: Some(turn), ..push })
    }

    /// Begins a push of an adapter that was made for a tenant, within the tenant's limits. An ephemeral
    /// adapter is durable nevertheless in a fleet, or if memory is full.
    ///
    /// # Errors
    /// If the name is invalid, the weights are too large, or the system refuses.
    pub(crate) fn begin_made(
        &self,
        PushRequest { load, durability, config }: PushRequest,
        expected_bytes: u64,
        base: Base<'_>,
        terms: Terms,
    ) -> Result<ArrivingPush, AdapterError> {
        check_name(&load.name, base.name)?;
        let begin = |durability| self.store.begin_push(load.tenant.as_deref(), durability, expected_bytes);
        // Other gateways of a fleet find an adapter in the registry alone.
        let begun = begin(if self.shared().is_some() { Durability::Durable } else { durability });
        let weights = match begun {
            Err(StoreError::TenantMemory { .. } | StoreError::Memory { .. } | StoreError::Full(_)) => {
                begin(Durability::Durable)?
            }
            begun => begun?,
        };
        Ok(self.arriving(load, config, weights, LoadOrigin::Tenant(terms)))
    }

    fn arriving(
        &self,
        request: LoadRequest,
        config: Option<String>,
        weights: PushedWeights,
        by: LoadOrigin,
    ) -> ArrivingPush {
        let (store, piece, header) = (self.store.clone(), Vec::new(), HeaderReader::default());
        ArrivingPush { request, store, weights, piece, header, config, by, _turn: None }
    }

    /// Loads and registers the adapter of a push whose body is complete.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub(crate) async fn end_push(
        self: &Arc<Self>,
        push: ArrivingPush,
        base: Base<'_>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        self.check_load(&push.request, base.name)?;
        self.end_made(push).await
    }

    /// Loads and registers the adapter of [`Registry::begin_made`] whose weights are complete.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub(crate) async fn end_made(
        self: &Arc<Self>,
        push: ArrivingPush,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let registry = Arc::clone(self);
        run_detached(async move { registry.load_pushed(push).await }).await
    }

    async fn load_pushed(self: &Arc<Self>, push: ArrivingPush) -> Result<Arc<AdapterEntry>, AdapterError> {
        let ArrivingPush { request, store, mut weights, piece, header, config, by, _turn } = push;
        let config = config.ok_or_else(|| StoreError::PushedConfig(header.cut()))?;
        let arrived = thread::run("adapter-push", move || {
            store.extend(&mut weights, &piece)?;
            store.end_push(weights, config.as_bytes())
        });
        let incoming = arrived.await??;
        let tenant = request.tenant.clone();
        self.replace(request, tenant, incoming, ComparedText::default(), by).await
    }
}

impl ArrivingPush {
    /// Takes the next bytes of the body.
    ///
    /// # Errors
    /// If the weights have no configuration or exceed a limit, or the system refuses.
    pub(crate) async fn take(mut self, bytes: &[u8]) -> Result<Self, AdapterError> {
        if self.config.is_none() {
            self.config = self.header.take(bytes).map_err(StoreError::PushedConfig)?;
        }
        self.piece.extend_from_slice(bytes);
        if self.piece.len() < PIECE_BYTES {
            return Ok(self);
        }
        thread::run("adapter-push", move || {
            self.store.extend(&mut self.weights, &self.piece)?;
            self.piece.clear();
            Ok(self)
        })
        .await?
    }
}
