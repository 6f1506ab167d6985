//! Loads adapters from uploaded files, and checks loads before their first byte is read.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::{
    base::Base,
    entry::AdapterEntry,
    errors::AdapterError,
    names::{check_chosen_name, check_tenant},
    registry::{MAX_LOADS, Registry},
    request::{LoadRequest, check_replace},
    store::{IncomingAdapter, StoreError},
    tenant_quota::LoadOrigin,
};

impl Registry {
    /// Returns a permit to load an adapter.
    ///
    /// # Errors
    /// If too many loads are running.
    pub(crate) fn begin_load(&self) -> Result<OwnedSemaphorePermit, AdapterError> {
        Arc::clone(&self.loads).try_acquire_owned().map_err(|_| AdapterError::Busy(MAX_LOADS))
    }

    /// Rejects an invalid load before a byte is copied.
    ///
    /// # Errors
    /// See [`AdapterError`].
    pub(crate) fn check_load(&self, request: &LoadRequest, base_name: &str) -> Result<(), AdapterError> {
        self.check_other_bases(&request.name)?;
        check_chosen_name(&request.name, base_name)?;
        check_tenant(request.tenant.as_deref())?;
        check_replace(request, self.entries().get(&request.name).map(|old| &**old))
    }

    /// Creates a directory for the files of an upload.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn receive(&self) -> Result<IncomingAdapter, AdapterError> {
        Ok(self.store.receive()?)
    }

    /// Loads an adapter from received files, with the permit `turn`.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub(crate) async fn load_received(
        self: &Arc<Self>,
        arrived: IncomingAdapter,
        turn: OwnedSemaphorePermit,
        request: LoadRequest,
        base: Base<'_>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        self.check_load(&request, base.name)?;
        let place = arrived.place().map_err(StoreError::from)?.displayed_as(&request.path);
        self.load_from(place, request, base, LoadOrigin::Administrator, (arrived, turn)).await
    }
}
