//! The parts of a request that generation routes extract first: caller, served model, default seed and body.

use std::sync::Arc;

use axum::{
    extract::{FromRequest, Request},
    http::HeaderMap,
};

use super::{idempotency, named_uris::fetch_named};
use crate::{
    app::App,
    body::JsonBody,
    caller::{Caller, RequestPriority},
    errors::ApiError,
    lifecycle::ServingState,
    random::random_u64,
};

#[derive(Debug)]
pub struct RequestContext {
    pub caller: Caller,
    pub serving: Arc<ServingState>,
    /// Seed of a request whose body sets none.
    pub default_seed: u64,
    pub body: JsonBody,
}

impl FromRequest<Arc<App>> for RequestContext {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let caller = request.extensions().get::<Caller>().cloned();
        let caller = caller.ok_or_else(|| ApiError::internal("a route was served without its guard"))?;
        let default_seed = default_seed(request.headers(), &caller)?;
        let serving = app.serving()?;
        let body = JsonBody::from_request(request, app).await?;
        // A background request waits in a queue of its own.
        if caller.priority == RequestPriority::Online {
            app.admission.check(&caller.tenant)?;
        }
        let body = fetch_named(app, &caller, body).await?;
        Ok(Self { caller, serving, default_seed, body })
    }
}

/// Returns the default seed, derived from `Idempotency-Key` and tenant alone. A request sent again gets the
/// same tokens, even after a crash of every process. Without the header the seed is random.
fn default_seed(headers: &HeaderMap, caller: &Caller) -> Result<u64, ApiError> {
    let Some(key) = idempotency::key(headers)? else { return Ok(random_u64()) };
    let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 idempotent seed v1");
    let tenant = caller.tenant.as_bytes();
    hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant).update(key);
    let mut seed = [0; 8];
    hasher.finalize_xof().fill(&mut seed);
    Ok(u64::from_le_bytes(seed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{caller::KeyRole, limits::KeyLimit};

    fn seed(tenant: &str, key: &str) -> Result<u64, ApiError> {
        let (limit, priority) = (KeyLimit::new(None), RequestPriority::Online);
        let caller = Caller { tenant: tenant.into(), role: KeyRole::User, limit, priority };
        let header = ("idempotency-key".parse().unwrap(), key.parse().unwrap());
        default_seed(&HeaderMap::from_iter([header]), &caller)
    }

    #[test]
    fn one_key_of_one_tenant_is_one_seed() {
        assert_eq!(seed("alice", "order-7").unwrap(), seed("alice", "order-7").unwrap());
        assert_ne!(seed("alice", "order-7").unwrap(), seed("alice", "order-8").unwrap());
        assert_ne!(seed("alice", "order-7").unwrap(), seed("bob", "order-7").unwrap());
        assert_ne!(seed("ab", "c").unwrap(), seed("a", "bc").unwrap());
    }

    #[test]
    fn a_key_that_is_too_long_is_refused_by_name() {
        seed("alice", &"k".repeat(255)).unwrap();
        assert!(seed("alice", &"k".repeat(256)).unwrap_err().to_string().contains("Idempotency-Key"));
        seed("alice", "").unwrap_err();
    }
}
