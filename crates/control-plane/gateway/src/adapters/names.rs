//! What adapters, and those who own them, may be called.

use super::errors::{AdapterError, MAX_NAME_BYTES, RESERVED_PREFIX};

/// Fails if an administrator cannot call an adapter so.
pub(super) fn check_chosen_name(name: &str, base_name: &str) -> Result<(), AdapterError> {
    check_name(name, base_name)?;
    if name.starts_with(RESERVED_PREFIX) {
        return Err(AdapterError::ReservedName(name.to_owned()));
    }
    Ok(())
}

/// Fails if an adapter cannot be called so.
pub(super) fn check_name(name: &str, base_name: &str) -> Result<(), AdapterError> {
    // A name is never joined to a path here; whoever else does so must not be led out by it.
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

/// Fails if nobody can be called so.
pub(super) fn check_tenant(tenant: Option<&str>) -> Result<(), AdapterError> {
    let bad = |tenant: &str| AdapterError::BadTenant(tenant.chars().take(64).collect());
    tenant.map_or(Ok(()), |tenant| security::keys::tenant_name(tenant).map(drop).map_err(|_| bad(tenant)))
}
