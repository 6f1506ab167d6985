//! Status of the registry and adapter store that gateways on several hosts share.

use control_protocol::status::shared::{RegistryStatus, StoreStatus};

use crate::terminal::{printable, table::size};

/// Formats the status of the registry; `None` if it is not shared.
pub(super) fn registry(registry: &RegistryStatus) -> Option<String> {
    let shared = registry.shared.as_ref()?;
    let address = printable(&shared.address);
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    let age_s = shared.age_ms as f64 / 1000.0;
    Some(match (shared.reachable, &shared.error) {
        (true, _) => format!("{address}, read {age_s:.1} s ago"),
        (false, error) => {
            let why = error.as_deref().map(printable).unwrap_or_default();
            format!("{address} CANNOT BE REACHED ({why}); the local copy is {age_s:.0} s old")
        }
    })
}

/// Formats the status of the store; `None` if it is not shared.
pub(super) fn store(store: &StoreStatus) -> Option<String> {
    let shared = store.shared.as_ref()?;
    let damaged = if shared.damaged > 0 { format!(", {} DAMAGED", shared.damaged) } else { String::new() };
    Some(format!(
        "{}, {} of it here; {} fetched, {} failed{damaged}",
        printable(&shared.address),
        size(shared.cached_bytes),
        shared.fetched,
        shared.failed
    ))
}
