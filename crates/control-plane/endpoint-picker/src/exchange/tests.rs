use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use control_protocol::fleet::{GatewayReport, GatewayState, ReportedExecutor, ReportedLoad, Tagged};
use prost::Message as _;
use prost_types::ListValue;
use scheduling::routing::{RoutingPolicy, Slo};

use super::*;
use crate::{
    fleet::PickRules,
    messages::{BodyMutation, CommonResponse, Empty, HeaderMap, HeaderValue, ProtocolConfiguration},
    picker::MAX_HELD_BYTES,
};

const MAX_BODY_BYTES: usize = 200 << 10;
const HOSTS: [&str; 2] = ["10.0.0.1:80", "10.0.0.2:80"];

fn picker(ready: &[&str]) -> Arc<Picker> {
    let stale = Duration::from_secs(3600);
    let rules = PickRules { policy: RoutingPolicy::RankAware, slo: Slo::default(), stale, fallbacks: 2 };
    let picker = Picker::new(rules, MAX_BODY_BYTES);
    let addresses: Vec<SocketAddr> = ready.iter().map(|host| host.parse().unwrap()).collect();
    picker.fleet.set_hosts(&addresses.iter().copied().collect());
    for address in addresses {
        let executor = ReportedExecutor {
            open: true,
            places: 8,
            running: ReportedLoad::default(),
            waiting: ReportedLoad::default(),
            promised_tpot_us: None,
            timings: None,
        };
        let report = GatewayReport {
            state: GatewayState::Ready,
            instance: 1,
            base: "base".to_owned(),
            answer_tokens: 10.0,
            queued: 0,
            executors: vec![executor],
            registered: Tagged::of(Vec::new(), None),
            resident: Tagged::of(vec![Vec::new()], None),
        };
        picker.fleet.heard(address, Instant::now(), report).unwrap();
    }
    Arc::new(picker)
}

fn opening(mode: BodySendMode) -> ProcessingRequest {
    let header = |key: &str, value: &str| HeaderValue {
        key: key.to_owned(),
        value: String::new(),
        raw_value: value.into(),
    };
    let headers = vec![header(":path", "/v1/completions?x=1"), header("authorization", "Bearer k")];
    let head = HttpHeaders { headers: Some(HeaderMap { headers }), end_of_stream: false };
    let config = ProtocolConfiguration { request_body_mode: mode.into(), response_body_mode: 0 };
    ProcessingRequest { protocol_config: Some(config), ..part(RequestPart::RequestHeaders(head)) }
}

fn part(part: RequestPart) -> ProcessingRequest {
    ProcessingRequest { part: Some(part), ..ProcessingRequest::default() }
}

fn body(bytes: &[u8], end_of_stream: bool) -> ProcessingRequest {
    part(RequestPart::RequestBody(HttpBody { body: bytes.to_vec(), end_of_stream }))
}

/// Returns the answers to each message, after an encoding round trip.
fn replies(picker: &Arc<Picker>, messages: &[ProcessingRequest]) -> Vec<Vec<ProcessingResponse>> {
    let mut exchange = Exchange::new(Arc::clone(picker));
    let take = |message: &ProcessingRequest| {
        let read = ProcessingRequest::decode(message.encode_to_vec().as_slice()).unwrap();
        let mut out = VecDeque::new();
        exchange.handle_message(read, &mut out).unwrap();
        out.into_iter()
            .map(|one| ProcessingResponse::decode(one.encode_to_vec().as_slice()).unwrap())
            .collect()
    };
    messages.iter().map(take).collect()
}

/// Returns the endpoints of an answer, which are equal in header and metadata.
fn destination(response: &ProcessingResponse) -> String {
    let (Some(PartAnswer::RequestHeaders(common)) | Some(PartAnswer::RequestBody(common))) = &response.answer
    else {
        panic!("{response:?} names no destination")
    };
    let headers = common.response.clone().unwrap().header_mutation.unwrap().set_headers;
    let header = headers[0].header.clone().unwrap();
    assert_eq!((headers.len(), header.key.as_str()), (1, "x-gateway-destination-endpoint"));
    let metadata = response.dynamic_metadata.clone().unwrap();
    let Some(Kind::StructValue(inner)) = &metadata.fields["envoy.lb"].kind else { panic!("{metadata:?}") };
    let said = String::from_utf8(header.raw_value).unwrap();
    assert_eq!(inner.fields["x-gateway-destination-endpoint"].kind, Some(Kind::StringValue(said.clone())));
    said
}

fn immediate(response: &ProcessingResponse) -> (i32, String) {
    let Some(PartAnswer::Immediate(refusal)) = &response.answer else { panic!("{response:?} is no refusal") };
    (refusal.status.unwrap().code, String::from_utf8(refusal.body.clone()).unwrap())
}

#[test]
fn a_body_in_one_piece_is_read_and_its_answer_names_the_hosts() {
    let asked = [opening(BodySendMode::Buffered), body(br#"{"model":"base"}"#, true)];
    let told = replies(&picker(&HOSTS), &asked);
    assert_eq!(told[0], [head_goes_on()]);
    let mut hosts: Vec<_> = destination(&told[1][0]).split(',').map(str::to_owned).collect();
    hosts.sort();
    assert_eq!(hosts, HOSTS);
}

#[test]
fn a_body_that_is_sent_back_goes_on_behind_its_head_byte_for_byte() {
    let text: Vec<u8> = (0..150_000u32).map(|index| index as u8).collect();
    let (one, two) = text.split_at(1_000);
    let opening = || opening(BodySendMode::FullDuplexStreamed);
    let trailers = || part(RequestPart::RequestTrailers(Empty {}));
    for messages in
        [vec![opening(), body(one, false), body(two, true)], vec![opening(), body(&text, false), trailers()]]
    {
        let told = replies(&picker(&HOSTS), &messages);
        let (last, before) = told.split_last().unwrap();
        assert!(before.iter().all(Vec::is_empty), "the head waits");
        destination(&last[0]);
        let mut sent = Vec::new();
        for response in &last[1..] {
            let Some(PartAnswer::RequestBody(CommonAnswer {
                response: Some(CommonResponse { body_mutation: Some(BodyMutation { streamed_response }), .. }),
            })) = &response.answer
            else {
                assert_eq!(response.answer, Some(PartAnswer::RequestTrailers(Empty {})));
                continue;
            };
            sent.push(streamed_response.clone().unwrap());
        }
        let whole: Vec<u8> = sent.iter().flat_map(|piece| piece.body.clone()).collect();
        assert_eq!(whole, text);
        let ends: Vec<bool> = sent.iter().map(|piece| piece.end_of_stream).collect();
        let has_trailers = messages.last() == Some(&trailers());
        assert_eq!(ends.iter().filter(|end| **end).count(), usize::from(!has_trailers));
        assert_eq!(ends.last(), Some(&!has_trailers));
    }
}

#[test]
fn a_head_without_a_body_names_the_hosts_at_once() {
    let mut alone = opening(BodySendMode::Buffered);
    if let Some(RequestPart::RequestHeaders(head)) = &mut alone.part {
        head.end_of_stream = true;
    }
    for asked in [alone, opening(BodySendMode::None), opening(BodySendMode::Streamed)] {
        assert!(destination(&replies(&picker(&HOSTS), &[asked])[0][0]).contains(HOSTS[0]));
    }
}

#[test]
fn answers_are_left_as_they_are() {
    let head = || part(RequestPart::ResponseHeaders(HttpHeaders::default()));
    let piece = || part(RequestPart::ResponseBody(HttpBody { body: b"text".to_vec(), end_of_stream: true }));
    let asked = [opening(BodySendMode::None), head(), piece(), part(RequestPart::ResponseTrailers(Empty {}))];
    let told = replies(&picker(&HOSTS), &asked);
    assert_eq!(told[1], [answer(PartAnswer::ResponseHeaders(CommonAnswer::default()))]);
    assert_eq!(told[2], [answer(PartAnswer::ResponseBody(CommonAnswer::default()))]);
    assert_eq!(told[3], [answer(PartAnswer::ResponseTrailers(Empty {}))]);
}

#[test]
fn without_a_host_the_answer_is_503_and_nothing_follows() {
    let asked = [
        opening(BodySendMode::FullDuplexStreamed),
        body(b"{}", true),
        part(RequestPart::RequestTrailers(Empty {})),
    ];
    let told = replies(&picker(&[]), &asked);
    let (status, text) = immediate(&told[1][0]);
    assert_eq!((status, told[1].len(), told[2].len()), (503, 1, 0));
    assert!(text.contains("\"code\":\"no_host_ready\""), "{text}");
}

#[test]
fn a_body_that_is_too_long_is_refused_and_not_kept() {
    let piece = vec![b'x'; MAX_BODY_BYTES / 2 + 1];
    let asked = [opening(BodySendMode::FullDuplexStreamed), body(&piece, false), body(&piece, false)];
    let told = replies(&picker(&HOSTS), &asked);
    assert_eq!(immediate(&told[2][0]).0, 413);
}

#[test]
fn a_body_that_finds_no_room_is_not_held_and_its_request_is_placed_all_the_same() {
    let picker = picker(&HOSTS);
    let others = u32::try_from(MAX_HELD_BYTES - 1500).unwrap();
    let others = Arc::clone(&picker.body_permits).try_acquire_many_owned(others).unwrap();
    let asked =
        [opening(BodySendMode::FullDuplexStreamed), body(&[b'a'; 1000], false), body(&[b'b'; 1000], false)];
    let said = replies(&picker, &asked);
    assert!(said[1].is_empty(), "there is room for the first piece");
    destination(&said[2][0]);
    let last = replies(&picker, &[asked.as_slice(), &[body(b"c", true)]].concat()).pop().unwrap();
    assert!(matches!(&last[..], [ProcessingResponse { answer: Some(PartAnswer::RequestBody(_)), .. }]));
    drop(others);
    let said = replies(&picker, &asked);
    assert!(said[2].is_empty(), "there is room for both");
    assert_eq!(picker.body_permits.available_permits(), MAX_HELD_BYTES, "all is given back");
}

#[test]
fn room_is_given_back_when_a_body_has_gone_on() {
    let picker = picker(&HOSTS);
    let mut exchange = Exchange::new(Arc::clone(&picker));
    let mut out = VecDeque::new();
    for message in [opening(BodySendMode::FullDuplexStreamed), body(&[b'a'; 1000], false)] {
        exchange.handle_message(message, &mut out).unwrap();
        exchange.said();
    }
    assert_eq!(picker.body_permits.available_permits(), MAX_HELD_BYTES - 1000);
    exchange.handle_message(body(b"b", true), &mut out).unwrap();
    assert_eq!(
        picker.body_permits.available_permits(),
        MAX_HELD_BYTES - 1001,
        "pieces are on their way back"
    );
    out.clear();
    exchange.said();
    assert_eq!(picker.body_permits.available_permits(), MAX_HELD_BYTES);
}

#[test]
fn a_subset_of_metadata_is_kept_to() {
    let of = |kind| {
        let (namespace, key) = SUBSET;
        let fields = Struct { fields: [(key.to_owned(), Value { kind: Some(kind) })].into() };
        let metadata = Metadata { filter_metadata: [(namespace.to_owned(), fields)].into() };
        let mut asked = opening(BodySendMode::None);
        asked.metadata_context = Some(metadata);
        replies(&picker(&HOSTS), &[asked])[0][0].clone()
    };
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let list = |values: Vec<Kind>| {
        let values = values.into_iter().map(|kind| Value { kind: Some(kind) }).collect();
        Kind::ListValue(ListValue { values })
    };
    assert_eq!(destination(&of(text(HOSTS[1]))), HOSTS[1]);
    assert_eq!(destination(&of(list(vec![text(HOSTS[1])]))), HOSTS[1]);
    for nobody in [list(Vec::new()), list(vec![Kind::NumberValue(1.0)]), Kind::BoolValue(true)] {
        assert_eq!(immediate(&of(nobody)).0, 503);
    }
}

#[test]
fn what_is_out_of_place_ends_the_stream_and_a_listener_alone_hears_nothing() {
    let mut exchange = Exchange::new(picker(&HOSTS));
    let mut out = VecDeque::new();
    for (message, error) in [
        (body(b"{}", true), UnexpectedMessage::NoHead),
        (part(RequestPart::RequestTrailers(Empty {})), UnexpectedMessage::NoHead),
        (ProcessingRequest::default(), UnexpectedMessage::Nothing),
    ] {
        assert_eq!(exchange.handle_message(message, &mut out), Err(error));
        exchange = Exchange::new(picker(&HOSTS));
    }
    let watched = ProcessingRequest { observability_mode: true, ..opening(BodySendMode::None) };
    exchange.handle_message(watched, &mut out).unwrap();
    assert!(out.is_empty());
}

#[test]
fn who_answered_in_the_place_of_another_is_counted() {
    let picker = picker(&HOSTS);
    let opening = opening(BodySendMode::None);
    let first = destination(&replies(&picker, std::slice::from_ref(&opening))[0][0]);
    let other = HOSTS.into_iter().find(|host| !first.starts_with(host)).unwrap();
    let (namespace, key) = SERVED;
    let value = Value { kind: Some(Kind::StringValue(other.to_owned())) };
    let fields = Struct { fields: [(key.to_owned(), value)].into() };
    let mut answered = part(RequestPart::ResponseHeaders(HttpHeaders::default()));
    answered.metadata_context = Some(Metadata { filter_metadata: [(namespace.to_owned(), fields)].into() });
    // The next request goes to the other host, since the first request is still on its way to this one.
    replies(&picker, &[opening.clone(), answered.clone()]);
    replies(&picker, &[opening, answered]);
    let figures = picker.metrics.render(&picker.fleet);
    assert!(figures.contains("served_total{by=\"other\"} 1"), "{figures}");
    assert!(figures.contains("served_total{by=\"picked\"} 1"), "{figures}");
}
