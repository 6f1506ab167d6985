//! Calls, replies and control messages: every field travels, invalid ones are rejected, and the document is
//! right.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;

use proptest::prelude::*;
use shmproto::{
    codec::{DecodeError, Wire},
    fd_passing::FdMessage,
    layer::{
        CallClass, CallHeader, CallStatus, Dtype, HEADER_BYTES, HeaderError, MAX_ROWS, ReplyHeader,
        RowSource, SiteOp, SitePath,
        control::{
            AdapterDtype, Catalog, ChannelReady, ClientFileEntry, Fetch, Fetched, FromLayers, KvDtype,
            ModularWeights, RefusalCode, SessionOpen, SessionOpened, SessionRefused, SessionStats, Site,
            SiteLayer, ToLayers,
        },
    },
};

const DOCUMENT: &str = include_str!("../../docs/PROTOCOL.md");

fn call() -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 0,
        part: Some(0),
        source: RowSource::Rows,
        sequence: 0,
        rows: 1,
        input: 0,
        output: 0,
    }
}

fn reply() -> ReplyHeader {
    ReplyHeader { rows: 0, ..ReplyHeader::refusal(&call(), CallStatus::Done, 0) }
}

/// The table under a heading: bytes and name of each row.
fn table(heading: &str) -> Vec<(Range<usize>, String)> {
    let (_, section) = DOCUMENT.split_once(&format!("\n### {heading}\n")).expect(heading);
    let rows = section.lines().take_while(|line| !line.starts_with('#'));
    let rows = rows.filter_map(|line| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, offset, bytes, _, name, ..] = cells[..] else { return None };
        let (offset, bytes): (usize, usize) = (offset.parse().ok()?, bytes.parse().ok()?);
        Some((offset..offset + bytes, name.trim_matches('`').to_owned()))
    });
    rows.collect()
}

/// Checks that the table covers the header, and that each of `fields`, with all bits changed, changes only
/// the bytes of its row.
fn is_drawn(heading: &str, plain: [u8; HEADER_BYTES], fields: &[(&str, [u8; HEADER_BYTES])]) {
    let table = table(heading);
    let covered: Vec<usize> = table.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
    assert_eq!(covered, (0..HEADER_BYTES).collect::<Vec<_>>(), "{heading} is drawn without gaps");
    let named: Vec<&str> = table
        .iter()
        .map(|(_, name)| name.as_str())
        .filter(|name| !["magic", "reserved"].contains(name))
        .collect();
    assert_eq!(named, fields.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    for (name, changed) in fields {
        let (drawn, _) = table.iter().find(|(_, row)| row == name).unwrap();
        let differs: Vec<usize> = (0..HEADER_BYTES).filter(|&at| plain[at] != changed[at]).collect();
        assert!(!differs.is_empty() && differs.iter().all(|at| drawn.contains(at)), "{name}: {differs:?}");
    }
}

#[test]
fn the_document_draws_both_headers_as_they_are() {
    let fields = [
        ("op", CallHeader { op: SiteOp::Backward, ..call() }),
        ("path", CallHeader { path: SitePath::Linear, ..call() }),
        ("class", CallHeader { class: CallClass::Noise, ..call() }),
        ("dtype", CallHeader { dtype: Dtype::Bf16, ..call() }),
        ("site", CallHeader { site: u32::MAX, ..call() }),
        ("part", CallHeader { part: None, ..call() }),
        ("source", CallHeader { source: RowSource::Draw, ..call() }),
        ("sequence", CallHeader { sequence: u64::MAX, ..call() }),
        ("rows", CallHeader { rows: MAX_ROWS, ..call() }),
        ("input", CallHeader { input: u64::MAX, ..call() }),
        ("output", CallHeader { output: u64::MAX, ..call() }),
    ];
    is_drawn("Call", call().to_bytes(), &fields.map(|(name, call)| (name, call.to_bytes())));
    assert_eq!(call().to_bytes()[..4], *b"HLC1");
    let fields = [
        ("status", ReplyHeader { status: CallStatus::Failed, ..reply() }),
        ("dtype", ReplyHeader { dtype: Dtype::Bf16, ..reply() }),
        ("retry_after_ms", ReplyHeader { retry_after_ms: u32::MAX, ..reply() }),
        ("rows", ReplyHeader { rows: u32::MAX, ..reply() }),
        ("sequence", ReplyHeader { sequence: u64::MAX, ..reply() }),
        ("waited_us", ReplyHeader { waited_us: u32::MAX, ..reply() }),
        ("batch_rows", ReplyHeader { batch_rows: u32::MAX, ..reply() }),
    ];
    is_drawn("Reply", reply().to_bytes(), &fields.map(|(name, reply)| (name, reply.to_bytes())));
    assert_eq!(reply().to_bytes()[..4], *b"HLR1");
}

#[test]
fn every_reserved_byte_and_every_byte_of_the_magic_is_looked_at() {
    let spoiled =
        |heading: &str, plain: [u8; HEADER_BYTES], read: &dyn Fn(&[u8; HEADER_BYTES]) -> HeaderError| {
            for (bytes, name) in table(heading) {
                for (at, bit) in bytes.flat_map(|at| (0..8).map(move |bit| (at, bit))) {
                    let mut header = plain;
                    header[at] ^= 1 << bit;
                    match name.as_str() {
                        "reserved" => assert_eq!(read(&header), HeaderError::Reserved, "byte {at}"),
                        "magic" => assert!(matches!(read(&header), HeaderError::Magic(_)), "byte {at}"),
                        _ => {}
                    }
                }
            }
        };
    spoiled("Call", call().to_bytes(), &|header| CallHeader::from_bytes(header).unwrap_err());
    spoiled("Reply", reply().to_bytes(), &|header| ReplyHeader::from_bytes(header).unwrap_err());
    assert!(matches!(CallHeader::from_bytes(&reply().to_bytes()), Err(HeaderError::Magic(_))));
    assert!(matches!(ReplyHeader::from_bytes(&call().to_bytes()), Err(HeaderError::Magic(_))));
}

#[test]
fn codes_that_name_nothing_and_rows_beyond_the_limit_are_refused() {
    let codes = [
        (4, "operation", 3),
        (5, "path", 3),
        (6, "class", 5),
        (7, "number format", 2),
        (13, "source of rows", 2),
    ];
    for (at, what, known) in codes {
        for code in 0..=u8::MAX {
            let mut header = call().to_bytes();
            header[at] = code;
            let read = CallHeader::from_bytes(&header);
            match code < known {
                true => assert_eq!(read.unwrap().to_bytes(), header),
                false => assert_eq!(read, Err(HeaderError::Code { what, code })),
            }
        }
    }
    for (at, what, known) in [(4, "status", 10), (5, "number format", 2)] {
        for code in known..=u8::MAX {
            let mut header = reply().to_bytes();
            header[at] = code;
            assert_eq!(ReplyHeader::from_bytes(&header), Err(HeaderError::Code { what, code }));
        }
    }
    for rows in [0, MAX_ROWS + 1, u32::MAX] {
        let header = CallHeader { rows, ..call() }.to_bytes();
        assert!(matches!(CallHeader::from_bytes(&header), Err(HeaderError::Range { what: "rows", .. })));
    }
}

fn arbitrary_call() -> impl Strategy<Value = CallHeader> {
    let codes = (
        prop::sample::select(SiteOp::ALL),
        prop::sample::select(SitePath::ALL),
        prop::sample::select(CallClass::ALL),
        prop::sample::select(Dtype::ALL),
        prop::option::of(0..u8::MAX),
        prop::sample::select(RowSource::ALL),
    );
    (codes, any::<u32>(), 1..=MAX_ROWS, any::<[u64; 3]>()).prop_map(
        |((op, path, class, dtype, part, source), site, rows, [sequence, input, output])| CallHeader {
            op,
            path,
            class,
            dtype,
            site,
            part,
            source,
            sequence,
            rows,
            input,
            output,
        },
    )
}

fn arbitrary_reply() -> impl Strategy<Value = ReplyHeader> {
    let codes = (prop::sample::select(CallStatus::ALL), prop::sample::select(Dtype::ALL));
    (codes, any::<[u32; 4]>(), any::<u64>()).prop_map(|((status, dtype), numbers, sequence)| {
        let [retry_after_ms, rows, waited_us, batch_rows] = numbers;
        ReplyHeader { status, dtype, retry_after_ms, rows, sequence, waited_us, batch_rows }
    })
}

proptest! {
    #[test]
    fn headers_arrive_as_they_were_sent(call in arbitrary_call(), reply in arbitrary_reply()) {
        prop_assert_eq!(CallHeader::from_bytes(&call.to_bytes()), Ok(call));
        prop_assert_eq!(ReplyHeader::from_bytes(&reply.to_bytes()), Ok(reply));
    }

    #[test]
    fn arbitrary_headers_have_one_meaning_or_none(
        bytes in any::<[u8; 32]>(), low in prop::collection::vec(0..6_u8, 8), call in any::<bool>(),
    ) {
        let mut header = [0; HEADER_BYTES];
        header[..32].copy_from_slice(&bytes);
        header[..4].copy_from_slice(if call { b"HLC1" } else { b"HLR1" });
        header[4..12].copy_from_slice(&low);
        if let Ok(call) = CallHeader::from_bytes(&header) {
            prop_assert_eq!(call.to_bytes(), header);
        }
        if let Ok(reply) = ReplyHeader::from_bytes(&header) {
            prop_assert_eq!(reply.to_bytes(), header);
        }
    }
}

fn open() -> SessionOpen {
    SessionOpen {
        version: 1,
        layout_hash: 2,
        key: "secret".to_owned(),
        name: "laptop".to_owned(),
        masking: "off".to_owned(),
        session: 3,
    }
}

/// One of each, in the order of their tags.
fn to_layers() -> Vec<(ToLayers, &'static str)> {
    vec![
        (ToLayers::Open(open()), "Open"),
        (ToLayers::Fetch(Fetch { blob: 1, offset: 2, bytes: 3 }), "Fetch"),
        (ToLayers::Channel(4096), "Channel"),
        (ToLayers::GetStats, "GetStats"),
        (ToLayers::Close, "Close"),
    ]
}

fn from_layers() -> Vec<(FromLayers, &'static str)> {
    let opened = SessionOpened {
        session: 1,
        instance: 2,
        tenant: "acme".to_owned(),
        catalog_bytes: 3,
        max_rows: 4,
        max_waiting_rows: 5,
        max_bytes: 6,
    };
    let refused =
        SessionRefused { code: RefusalCode::NoSuchSession, message: "why".to_owned(), retry_after_ms: 7 };
    let stats = SessionStats { calls: 1, rows: [1, 2, 3, 4, 5], ..SessionStats::default() };
    vec![
        (FromLayers::Opened(opened), "Opened"),
        (FromLayers::Refused(refused), "Refused"),
        (FromLayers::Fetched(Fetched { blob: 1, offset: 2, bytes: vec![3; 9] }), "Fetched"),
        (FromLayers::ChannelReady(ChannelReady { region_bytes: 1, slab_bytes: 2, depth: 3 }), "ChannelReady"),
        (FromLayers::Stats(stats), "Stats"),
        (FromLayers::Draining, "Draining"),
    ]
}

#[test]
fn control_messages_arrive_as_they_were_sent_and_are_drawn_with_their_descriptors() {
    let (_, control) = DOCUMENT.split_once("\n## Control messages\n").expect("the section");
    for (tag, (message, name)) in to_layers().into_iter().enumerate() {
        assert_eq!(ToLayers::from_bytes(&message.to_bytes()), Ok(message.clone()));
        assert_eq!(usize::from(message.to_bytes()[0]), tag);
        assert!(control.contains(&format!("| {tag} | `{name}` | {} |", message.descriptors())), "{name}");
    }
    for (tag, (message, name)) in from_layers().into_iter().enumerate() {
        assert_eq!(FromLayers::from_bytes(&message.to_bytes()), Ok(message.clone()));
        assert_eq!(usize::from(message.to_bytes()[0]), tag);
        assert!(control.contains(&format!("| {tag} | `{name}` | {} |", message.descriptors())), "{name}");
    }
    assert!(matches!(ToLayers::from_bytes(&[5]), Err(DecodeError::UnknownTag { tag: 5, .. })));
    assert!(matches!(FromLayers::from_bytes(&[6]), Err(DecodeError::UnknownTag { tag: 6, .. })));
}

#[test]
fn codes_of_refusals_and_statuses_are_drawn_as_they_are() {
    for status in CallStatus::ALL {
        let row = format!("| {} | `{status:?}` |", *status as u8);
        assert!(DOCUMENT.contains(&row), "{row}");
    }
    for code in 0..=8_u8 {
        let name = RefusalCode::from_bytes(&[code]).unwrap();
        assert!(DOCUMENT.contains(&format!("| {code} | `{name:?}` |")), "{name:?}");
    }
    assert!(RefusalCode::from_bytes(&[9]).is_err());
}

#[test]
fn every_text_of_a_control_message_is_bounded() {
    let long = |change: fn(&mut SessionOpen, String)| {
        let mut open = open();
        change(&mut open, "x".repeat(5000));
        ToLayers::Open(open).text_bytes()
    };
    assert_eq!(long(|open, text| open.key = text), 5000);
    assert_eq!(long(|open, text| open.name = text), 5000);
    assert_eq!(long(|open, text| open.masking = text), 5000);
    for (message, name) in from_layers() {
        let wanted = match name {
            "Opened" => 4,
            "Refused" => 3,
            _ => 0,
        };
        assert_eq!(message.text_bytes(), wanted, "{name}");
    }
}

#[test]
fn a_key_is_never_shown() {
    assert!(!format!("{:?}", ToLayers::Open(open())).contains("secret"));
}

#[test]
fn a_catalog_arrives_as_it_was_sent_and_hostile_counts_cost_nothing() {
    let part = SiteLayer { name: "q_proj".to_owned(), rows: 64, has_bias: 1 };
    let ring = ModularWeights { weight_exponent: -24, l1: [1 << 40, 3], commitment: [9; 32] };
    let catalog = Catalog {
        model: "m".to_owned(),
        architecture: "llama".to_owned(),
        base_hash: [7; 32],
        context_length: 2048,
        kv_dtype: KvDtype::F16,
        adapter_dtype: AdapterDtype::F16,
        sites: vec![
            Site { columns: 64, paths: 3, ring: None, parts: vec![part.clone(), part.clone()] },
            Site { columns: 64, paths: 15, ring: Some(ring), parts: vec![part] },
        ],
        files: vec![ClientFileEntry {
            name: "model.gguf".to_owned(),
            bytes: 1 << 40,
            ranges: vec![(0, 64), (128, 64)],
        }],
    };
    let bytes = catalog.to_bytes();
    assert_eq!(Catalog::from_bytes(&bytes), Ok(catalog));
    let sites = 4 + 1 + 4 + 5 + 32 + 4 + 1 + 1;
    let mut hostile = bytes.clone();
    hostile[sites..sites + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(Catalog::from_bytes(&hostile), Err(DecodeError::Truncated { .. })));
    for end in 0..bytes.len() {
        assert!(Catalog::from_bytes(&bytes[..end]).is_err(), "cut at {end}");
    }
}
