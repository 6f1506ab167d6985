//! Targets of the endpoint picker: request bodies, Envoy's messages, reports of gateways.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use endpoint_picker::{
    exchange::Exchange,
    fleet::{HostFleet, PickRules},
    messages::ProcessingRequest,
    picker::Picker,
    request_parser::ParsedRequest,
};
use prost::Message as _;
use scheduling::routing::{RoutingPolicy, Slo};

use crate::{Outcome, targets::refused};

const HOST: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 80);
const MAX_BODY_BYTES: usize = 8 << 20;

fn rules() -> PickRules {
    PickRules {
        policy: RoutingPolicy::RankAware,
        slo: Slo::default(),
        stale: Duration::from_secs(3600),
        fallbacks: 2,
    }
}

/// Reads a request body. An invalid body is no error here, because the host reports what is wrong.
pub(crate) fn body(input: &[u8]) -> Outcome {
    let ask = ParsedRequest::read(input);
    assert!(ask.prompt_tokens() <= 4 * input.len() as u64, "no more was asked than was said");
    if ask.model.is_empty() { Err("it names no model".to_owned()) } else { Ok(()) }
}

/// Reads a sequence of messages, each after its length in four bytes, as in gRPC.
pub(crate) fn messages(mut input: &[u8]) -> Outcome {
    let mut exchange = Exchange::new(Arc::new(Picker::new(rules(), MAX_BODY_BYTES)));
    let mut out = VecDeque::new();
    while let Some((length, rest)) = input.split_first_chunk::<4>() {
        let length = usize::try_from(u32::from_be_bytes(*length)).map_err(refused)?;
        let (message, rest) = rest.split_at_checked(length).ok_or("it breaks off")?;
        let message = ProcessingRequest::decode(message).map_err(refused)?;
        exchange.handle_message(message, &mut out).map_err(refused)?;
        out.clear();
        input = rest;
    }
    Ok(())
}

/// Reads a report; an accepted one leads to a host or to a refusal.
pub(crate) fn report(input: &[u8]) -> Outcome {
    let report = serde_json::from_slice(input).map_err(refused)?;
    let (fleet, now) = (HostFleet::new(rules()), Instant::now());
    fleet.set_hosts(&[HOST].into());
    fleet.heard(HOST, now, report).map_err(refused)?;
    let head =
        endpoint_picker::request_parser::RequestHead { path: "/v1/completions".to_owned(), key: Vec::new() };
    let ask = ParsedRequest::read(br#"{"model":"a","prompt":"Hello"}"#);
    fleet.pick(&head, &ask, &None, now).map(drop).map_err(refused)
}
