//! Adapters whose files are sent along, and what every load is asked before a byte is taken.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::{
    base::Base,
    entry::AdapterEntry,
    errors::AdapterError,
    names::{check_chosen_name, check_tenant},
    registry::{MAX_LOADS, Registry},
    request::{LoadRequest, check_replace},
    share::LoadOrigin,
    store::{IncomingAdapter, StoreError},
};

impl Registry {
    /// A turn to load an adapter.
    ///
    /// # Errors
    /// Too many are under way.
    pub fn begin_load(&self) -> Result<OwnedSemaphorePermit, AdapterError> {
        Arc::clone(&self.loads).try_acquire_owned().map_err(|_| AdapterError::Busy(MAX_LOADS))
    }

    /// Refuses a load that can be refused before a byte is copied.
    ///
    /// # Errors
    /// See [`AdapterError`].
    pub fn check_load(&self, request: &LoadRequest, base_name: &str) -> Result<(), AdapterError> {
        check_chosen_name(&request.name, base_name)?;
        check_tenant(request.tenant.as_deref())?;
        check_replace(request, self.entries().get(&request.name).map(|old| &**old))
    }

    /// Makes room for an adapter's files.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn receive(&self) -> Result<IncomingAdapter, AdapterError> {
        Ok(self.store.receive()?)
    }

    /// Loads an adapter whose files have come, in its turn.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub async fn load_received(
        self: &Arc<Self>,
        arrived: IncomingAdapter,
        turn: OwnedSemaphorePermit,
        request: LoadRequest,
        base: Base<'_>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        self.check_load(&request, base.name)?;
        let place = arrived.place().map_err(StoreError::from)?.told_as(&request.path);
        self.load_from(place, request, base, LoadOrigin::Administrator, (arrived, turn)).await
    }
}
