//! Prefix cache namespaces: which requests share cached KV blocks.

use types::TenantId;

use super::target::ModelTarget;
use crate::{caller::Caller, lifecycle::ServingState};

/// Keys under which an executor caches prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace of the request's own weights.
    pub hash: [u8; 32],
    /// Namespace of the base, for tokens before the invocation of an activated LoRA.
    pub base: [u8; 32],
    /// Tenant that the cached memory is charged to.
    pub owner: TenantId,
}

/// Derives the namespace: requests share cached prefixes if their tenant and weights are equal.
#[must_use]
pub(crate) fn namespace(caller: &Caller, target: &ModelTarget, serving: &ServingState) -> Namespace {
    let hash = |kind: &[u8], weights: &[u8; 32]| {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 prefix cache namespace v1");
        let tenant = caller.tenant.as_bytes();
        hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant).update(kind).update(weights);
        *hasher.finalize().as_bytes()
    };
    let base = hash(b"base", &serving.welcome.base_hash);
    let own = target.lease.as_ref().map_or(base, |lease| hash(b"adapter", &lease.generation.0));
    Namespace { hash: own, base, owner: TenantId::of(Some(&caller.tenant)) }
}
