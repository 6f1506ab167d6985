//! Requests whose responses are read whole.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use ureq::Agent;

use super::REQUEST_LIMIT;

/// Text of `GET route` at `port` of this machine.
///
/// # Errors
/// If the server does not answer with 200.
pub(crate) fn get(port: u16, route: &str) -> Result<String> {
    get_as(port, route, None)
}

/// Text of `GET route` with API key `key`.
///
/// # Errors
/// As [`get`].
pub(crate) fn get_as(port: u16, route: &str, key: Option<&str>) -> Result<String> {
    let mut request = agent(REQUEST_LIMIT).get(format!("http://127.0.0.1:{port}{route}"));
    if let Some(key) = key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let mut answer = request.call().with_context(|| format!("no answer to GET {route}"))?;
    let text = answer.body_mut().read_to_string().with_context(|| format!("GET {route} broke off"))?;
    ensure!(answer.status() == 200, "GET {route} was answered with {}: {text}", answer.status());
    Ok(text)
}

/// Sends an empty POST to `route` at `port` of this machine.
///
/// # Errors
/// If the server does not answer with 200.
pub(crate) fn post(port: u16, route: &str) -> Result<()> {
    post_json(port, route, &Value::Object(Default::default())).map(drop)
}

/// Posts `body` to `route` at `port` of this machine and returns the response body.
///
/// # Errors
/// If the server does not answer with 200.
pub(crate) fn post_json(port: u16, route: &str, body: &Value) -> Result<String> {
    let url = format!("http://127.0.0.1:{port}{route}");
    let mut answer = agent(REQUEST_LIMIT)
        .post(url)
        .send_json(body)
        .with_context(|| format!("no answer to POST {route}"))?;
    let text = answer.body_mut().read_to_string().with_context(|| format!("POST {route} broke off"))?;
    ensure!(answer.status() == 200, "POST {route} was answered with {}: {text}", answer.status());
    Ok(text)
}

pub(super) fn agent(limit: Duration) -> Agent {
    Agent::config_builder().timeout_global(Some(limit)).http_status_as_error(false).build().new_agent()
}
