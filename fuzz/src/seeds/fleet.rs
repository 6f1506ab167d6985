//! Valid and hostile input of the endpoint picker.

use endpoint_picker::messages::{
    HeaderMap, HeaderValue, HttpBody, HttpHeaders, ProcessingRequest, RequestPart,
};
use prost::Message as _;
use serde_json::{Value, json};

use super::{Maker, Seed};

const DEPTH: &str = "stack exhaustion by nesting (CVE-2021-38153 and its like)";
const SIZES: &str = "a length that is believed";
const NUMBERS: &str = "numbers beyond all measure";

pub(super) fn bodies() -> Vec<Seed> {
    let mut make = Maker::new("picker_body");
    let body = json!({ "model": "a", "messages": [{ "role": "user", "content": "Hello" }] });
    make.valid("a chat", body.to_string().into_bytes());
    make.valid("tokens", json!({ "model": "a", "prompt": [[1, 2], [3]] }).to_string().into_bytes());
    make.refused("nothing", "empty", Vec::new(), "no model");
    make.refused("no text", "another type", json!({ "model": ["a"] }).to_string().into_bytes(), "no model");
    for (name, open) in [("deep arrays", "["), ("deep objects", "{\"a\":")] {
        let text = format!("{{\"model\":\"a\",\"prompt\":{}", open.repeat(500_000));
        make.refused(name, DEPTH, text.into_bytes(), "no model");
    }
    let long = json!({ "model": "a", "prompt": "x".repeat(4 << 20) });
    make.bounded("a long prompt", SIZES, long.to_string().into_bytes());
    make.bounded("a long name", SIZES, json!({ "model": "x".repeat(1 << 20) }).to_string().into_bytes());
    make.bounded(
        "large numbers",
        NUMBERS,
        br#"{"model":"a","prompt":[1e308,18446744073709551615,-9]}"#.to_vec(),
    );
    make.seeds
}

fn framed(messages: &[ProcessingRequest]) -> Vec<u8> {
    let framed = messages.iter().map(|message| {
        let bytes = message.encode_to_vec();
        [&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes()[..], &bytes].concat()
    });
    framed.flatten().collect()
}

fn part(part: RequestPart) -> ProcessingRequest {
    ProcessingRequest { part: Some(part), ..ProcessingRequest::default() }
}

fn head() -> ProcessingRequest {
    let path =
        HeaderValue { key: ":path".to_owned(), value: String::new(), raw_value: b"/v1/completions".to_vec() };
    let headers = Some(HeaderMap { headers: vec![path] });
    part(RequestPart::RequestHeaders(HttpHeaders { headers, end_of_stream: false }))
}

fn body(bytes: usize) -> ProcessingRequest {
    part(RequestPart::RequestBody(HttpBody { body: vec![b'x'; bytes], end_of_stream: true }))
}

pub(super) fn messages() -> Vec<Seed> {
    let mut make = Maker::new("picker_messages");
    make.valid("a head and a body", framed(&[head(), body(20)]));
    make.valid("two heads", framed(&[head(), head(), body(20), body(20)]));
    make.refused("a body first", "out of order", framed(&[body(20)]), "before its head");
    make.refused(
        "a message of nothing",
        "out of order",
        framed(&[ProcessingRequest::default()]),
        "no known part",
    );
    make.refused("a length without a message", SIZES, vec![0xff; 4], "breaks off");
    make.refused("no protobuf", SIZES, [&[0, 0, 0, 3][..], &[0x12, 0xff, 0xff]].concat(), "decode");
    // Metadata: deeply nested structs in protobuf's encoding.
    let mut nested = vec![0x1a, 0x00];
    for _ in 0..1_000 {
        let mut outer = vec![0x2a];
        prost::encode_length_delimiter(nested.len(), &mut outer).unwrap_or_default();
        outer.extend(&nested);
        nested = outer;
        nested.truncate(60_000);
    }
    let message = [&[0x42][..], &nested].concat();
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes();
    make.bounded("deep metadata", DEPTH, [&length[..], &message].concat());
    make.seeds
}

fn report() -> Value {
    let work = json!({ "requests": 1, "ranks": 8, "max_rank": 8, "tokens": 10, "token_ranks": 80 });
    let timings = json!({
        "decode": [0.001, 0.001, 0.0, 0.0], "prefill": [0.001, 0.001, 0.0], "link": [0.0, 0.0],
        "store": [0.0, 0.0], "waits_for_link": false, "is_stale": false,
    });
    json!({
        "state": "ready", "instance": 7, "base": "base", "answer_tokens": 50.0, "queued": 0,
        "executors": [{
            "open": true, "places": 8, "running": work, "waiting": work, "promised_tpot_us": null,
            "timings": timings,
        }],
        "registered": { "tag": 1, "content": [{ "name": "a", "rank": 8, "bytes": 100, "generation": 7 }, { "name": "b", "rank": 8, "bytes": 100 }] },
        "resident": { "tag": 2, "content": [["a"]] },
    })
}

pub(super) fn reports() -> Vec<Seed> {
    let mut make = Maker::new("host_report");
    make.valid("a report", report().to_string().into_bytes());
    let mut with = |name, class, field: &str, value: Value, refused: Option<&'static str>| {
        let mut report = report();
        report[field] = value;
        let bytes = report.to_string().into_bytes();
        match refused {
            Some(why) => make.refused(name, class, bytes, why),
            None => make.bounded(name, class, bytes),
        }
    };
    with("no executor", "empty", "executors", json!([]), Some("no host is ready"));
    with("it ends", "empty", "state", json!("stopping"), Some("no host is ready"));
    with(
        "it left adapters out",
        "empty",
        "registered",
        json!({ "tag": 1, "content": null }),
        Some("omits adapters"),
    );
    with("answers without an end", NUMBERS, "answer_tokens", json!(1e308), None);
    with("a long queue", NUMBERS, "queued", json!(u64::MAX), None);
    let mut huge = report()["executors"][0].clone();
    huge["running"] = json!({
        "requests": u64::MAX, "ranks": u64::MAX, "max_rank": u64::MAX, "tokens": u64::MAX, "token_ranks": u64::MAX,
    });
    huge["timings"]["decode"] = json!([1e308, -1e308, 1e308, 1e308]);
    huge["places"] = json!(0);
    with("work and times", NUMBERS, "executors", json!(vec![huge; 100]), None);
    make.seeds
}
