//! What one tenant may publish: adapters of fine-tuning jobs and of Tinker's models, which nobody but the tenant asks for.

use super::{errors::AdapterError, request::Terms, table::AdapterNames};

/// Most adapters that a tenant may publish, however many the registry holds.
const MAX_PUBLISHED: usize = 1024;

/// Whose limits a load is held to.
#[derive(Debug)]
pub(super) enum LoadOrigin {
    /// An administrator, who is bound by the limits of the registry alone.
    Administrator,
    /// A tenant, whose share of the registry is bounded too, on these terms.
    Tenant(Terms),
}

/// The limits of each tenant.
#[derive(Debug, Clone, Copy)]
pub(super) struct TenantQuota {
    max_adapters: usize,
    max_bytes: u64,
}

impl TenantQuota {
    /// The share of a registry for `max_adapters`: half of it, [`MAX_PUBLISHED`] adapters at most, and `max_bytes`.
    pub(super) fn of(max_adapters: usize, max_bytes: u64) -> Self {
        Self { max_adapters: max_adapters.div_ceil(2).min(MAX_PUBLISHED), max_bytes }
    }

    /// Checks that `tenant` may publish the adapter `name` with files of `bytes`, in the place of the one that has the name.
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
        // As with states, the last one may go beyond.
        if adapters < max_adapters && held_bytes < max_bytes {
            return Ok(());
        }
        Err(AdapterError::TenantFull { adapters, held_bytes, bytes, max_adapters, max_bytes })
    }
}
