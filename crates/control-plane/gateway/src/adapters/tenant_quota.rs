//! Limits on what one tenant may publish: results of fine-tuning jobs and snapshots of Tinker models, which
//! only the tenant uses.

use super::{errors::AdapterError, request::Terms, table::AdapterNames};

/// Maximum number of adapters that a tenant may publish, regardless of the registry's limit.
const MAX_PUBLISHED: usize = 1024;

/// Limits that apply to a load.
#[derive(Debug)]
pub(super) enum LoadOrigin {
    /// An administrator, whose loads have only the limits of the registry.
    Administrator,
    /// A tenant, whose published adapters are limited too.
    Tenant(Terms),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct TenantQuota {
    max_adapters: usize,
    max_bytes: u64,
}

impl TenantQuota {
    pub(super) fn max_adapters(self) -> usize {
        self.max_adapters
    }

    /// Limits for a registry of `max_adapters` names: half of them, at most [`MAX_PUBLISHED`], and
    /// `max_bytes` bytes.
    pub(super) fn of(max_adapters: usize, max_bytes: u64) -> Self {
        Self { max_adapters: max_adapters.div_ceil(2).min(MAX_PUBLISHED), max_bytes }
    }

    /// Checks that `tenant` may publish the adapter `name` with `bytes`, in place of the one with that name.
    pub(super) fn check(
        self,
        table: &AdapterNames,
        tenant: Option<&str>,
        name: &str,
        bytes: u64,
    ) -> Result<(), AdapterError> {
        let Self { max_adapters, max_bytes } = self;
        let others = table.values().map(|entry| &entry.record);
        let others = others.filter(|record| record.tenant.as_deref() == tenant && record.name != name);
        let (adapters, held_bytes) = others
            .fold((0, 0u64), |(count, sum), record| (count + 1, sum.saturating_add(record.tenant_bytes())));
        // As with saved training states, the last adapter may exceed the byte limit.
        if adapters < max_adapters && held_bytes < max_bytes {
            return Ok(());
        }
        Err(AdapterError::TenantFull { adapters, held_bytes, bytes, max_adapters, max_bytes })
    }
}
