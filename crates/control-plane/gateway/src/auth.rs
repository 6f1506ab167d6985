//! Authentication in front of every handler: finds the caller of a request by its API key.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::Response,
};

use crate::{
    app::App,
    caller::{Access, Caller},
    errors::ApiError,
    http_api::HttpApi,
};

/// Maximum length of a key in bytes.
const MAX_KEY_BYTES: usize = 512;

/// Returns the key of a request: a bearer token, or the header `x-api-key`.
fn given(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let key = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))?;
    (key.len() <= MAX_KEY_BYTES).then(|| key.trim_ascii())
}

/// Passes a request on if its key allows the route and its rate limit, and gives the handler the caller.
pub(crate) async fn guard(
    State((app, access)): State<(Arc<App>, Access)>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if access == Access::Open {
        return Ok(next.run(request).await);
    }
    let api = HttpApi::of(request.uri().path(), request.headers());
    let caller = caller(&app, access, request.headers())?;
    // Rate limits do not apply to metrics and administration, which must work above all under overload.
    let remaining = if access == Access::User { caller.limit.check()? } else { None };
    request.extensions_mut().insert(caller);
    let mut response = next.run(request).await;
    if let Some(remaining) = remaining {
        remaining.write(api, response.headers_mut());
    }
    Ok(response)
}

fn caller(app: &App, access: Access, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let given = given(headers);
    match app.keys.caller(given) {
        Some(caller) if access.allows(caller.role) => Ok(caller),
        Some(_) => Err(ApiError::forbidden(format!(
            "this API key lacks the permission; use a key with the role '{}'",
            access.needed()
        ))),
        None if given.is_some() => Err(ApiError::unauthorized("the API key is not valid")),
        None => Err(ApiError::unauthorized(
            "no API key; send it as 'authorization: Bearer KEY' or 'x-api-key: KEY'",
        )),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn with(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn a_key_comes_in_either_header() {
        for headers in [
            with("authorization", "Bearer hb-a"),
            with("authorization", "bearer  hb-a "),
            with("x-api-key", "hb-a"),
        ] {
            assert_eq!(given(&headers), Some(&b"hb-a"[..]), "{headers:?}");
        }
        for headers in
            [HeaderMap::new(), with("authorization", "Basic abc"), with("x-api-key", &"k".repeat(513))]
        {
            assert_eq!(given(&headers), None);
        }
    }
}
