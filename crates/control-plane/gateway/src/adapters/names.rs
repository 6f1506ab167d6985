//! Rules for the names of adapters and of their owners.

use super::errors::{AdapterError, MAX_NAME_BYTES, RESERVED_PREFIX};

/// Fails if an administrator may not use `name` for an adapter.
pub(super) fn check_chosen_name(name: &str, base_name: &str) -> Result<(), AdapterError> {
    check_name(name, base_name)?;
    if name.starts_with(RESERVED_PREFIX) {
        return Err(AdapterError::ReservedName(name.to_owned()));
    }
    Ok(())
}

pub(super) fn check_name(name: &str, base_name: &str) -> Result<(), AdapterError> {
    // Adapter names are never joined to a path here; code that does so must not leave its directory.
    let leads_out = name.split('/').any(|part| matches!(part, "" | "." | ".."));
    let bad = leads_out || name.len() > MAX_NAME_BYTES || name.chars().any(|c| c == ':' || c.is_control());
    if bad {
        return Err(AdapterError::BadName(name.chars().take(64).collect()));
    }
    if name == base_name {
        return Err(AdapterError::NameOfBase(name.to_owned()));
    }
    Ok(())
}

pub(super) fn check_tenant(tenant: Option<&str>) -> Result<(), AdapterError> {
    let bad = |tenant: &str| AdapterError::BadTenant(tenant.chars().take(64).collect());
    tenant.map_or(Ok(()), |tenant| security::keys::tenant_name(tenant).map(drop).map_err(|_| bad(tenant)))
}
