//! Valid and hostile messages of split clients.

use shmproto::{
    codec::Wire,
    layer::{
        CallClass, CallHeader, CallStatus, Dtype, ReplyHeader, RowSource, SiteOp, SitePath,
        control::{
            AdapterDtype, Catalog, ChannelReady, ClientFileEntry, Fetch, Fetched, FromLayers, KvDtype,
            ModularWeights, RefusalCode, SessionOpen, SessionOpened, SessionRefused, SessionStats, Site,
            SiteLayer, ToLayers,
        },
        seeded_rows::DRAW_BYTES,
    },
    zmtp::put_message,
};

use super::{
    Maker, Seed,
    gguf::OFFSETS,
    wire::{COUNTS, FORMAT},
};

const FLOODS: &str = "resource exhaustion before authentication (CVE-2020-15166 and its like)";

fn call() -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 3,
        part: None,
        source: RowSource::Rows,
        sequence: 1,
        rows: 1,
        input: 64,
        output: 256,
    }
}

pub(super) fn calls() -> Vec<Seed> {
    let mut make = Maker::new("layer_call");
    make.valid("forward", call().to_bytes().to_vec());
    let backward = CallHeader { op: SiteOp::Backward, class: CallClass::Training, part: Some(1), ..call() };
    make.valid("backward", backward.to_bytes().to_vec());
    let drawn =
        CallHeader { op: SiteOp::ForwardNoBias, path: SitePath::Ring, source: RowSource::Draw, ..call() };
    make.valid("a draw through the ring path", drawn.to_bytes().to_vec());
    let with = |at: usize, bytes: &[u8]| {
        let mut header = call().to_bytes().to_vec();
        header[at..at + bytes.len()].copy_from_slice(bytes);
        header
    };
    make.refused("2^32 - 1 rows", COUNTS, with(24, &[255; 4]), "above 65536");
    make.refused("no rows", COUNTS, with(24, &[0; 4]), "rows is 0");
    make.refused("an operation there is not", FORMAT, with(4, &[3]), "names nothing");
    make.refused("a path there is not", FORMAT, with(5, &[3]), "names nothing");
    make.refused("a source of rows there is not", FORMAT, with(13, &[2]), "names nothing");
    make.refused("a class there is not", FORMAT, with(6, &[5]), "names nothing");
    make.refused("reserved bytes in use", FORMAT, with(63, &[1]), "reserved");
    make.refused(
        "a reply",
        FORMAT,
        ReplyHeader::refusal(&call(), CallStatus::Busy, 5).to_bytes().to_vec(),
        "begins with",
    );
    make.refused("half a header", FORMAT, call().to_bytes()[..32].to_vec(), "64 bytes");
    make.seeds
}

pub(super) fn replies() -> Vec<Seed> {
    let mut make = Maker::new("layer_reply");
    let reply = ReplyHeader::refusal(&call(), CallStatus::Quota, 250).to_bytes();
    make.valid("a refusal", reply.to_vec());
    let with = |at: usize, byte: u8| {
        let mut header = reply.to_vec();
        header[at] = byte;
        header
    };
    make.refused("a status there is not", FORMAT, with(4, 10), "names nothing");
    make.refused("reserved bytes in use", FORMAT, with(32, 1), "reserved");
    make.refused("a call", FORMAT, call().to_bytes().to_vec(), "begins with");
    make.seeds
}

fn open() -> SessionOpen {
    let [key, name, masking] = ["hb-key", "laptop", "off"].map(str::to_owned);
    SessionOpen { version: 1, layout_hash: 2, key, name, masking, session: 0 }
}

pub(super) fn to_layers() -> Vec<Seed> {
    let mut make = Maker::new("to_layers");
    make.valid("an opening", ToLayers::Open(open()).to_bytes());
    make.valid("a fetch", ToLayers::Fetch(Fetch { blob: 0, offset: 0, bytes: 4096 }).to_bytes());
    make.valid("a slab", ToLayers::Channel(1 << 20).to_bytes());
    make.valid("figures, please", ToLayers::GetStats.to_bytes());
    make.valid("the end", ToLayers::Close.to_bytes());
    let mut long = ToLayers::Open(open()).to_bytes();
    long[13..17].copy_from_slice(&[255; 4]);
    make.refused("a key of 2^32 - 1 bytes", COUNTS, long, "ends early");
    make.refused("nothing", COUNTS, Vec::new(), "ends early");
    make.refused("an unknown message", FORMAT, vec![200], "no variant 200");
    make.refused("a pickle", FORMAT, b"\x80\x04\x95cos\nsystem\n".to_vec(), "no variant 128");
    let trailing = [ToLayers::Close.to_bytes(), vec![0]].concat();
    make.refused("bytes behind the end", FORMAT, trailing, "follow the end");
    make.seeds
}

fn catalog() -> Catalog {
    let part = SiteLayer { name: "q_proj".to_owned(), rows: 64, has_bias: 1 };
    let ring = ModularWeights { weight_exponent: -24, l1: [1 << 40, 3], commitment: [9; 32] };
    let [model, architecture, name] = ["m", "llama", "model.gguf"].map(str::to_owned);
    Catalog {
        model,
        architecture,
        base_hash: [7; 32],
        context_length: 2048,
        kv_dtype: KvDtype::F16,
        adapter_dtype: AdapterDtype::F16,
        sites: vec![
            Site { columns: 64, paths: 3, ring: None, parts: vec![part.clone()] },
            Site { columns: 64, paths: 15, ring: Some(ring), parts: vec![part] },
        ],
        files: vec![ClientFileEntry { name, bytes: 1 << 20, ranges: vec![(0, 64)] }],
    }
}

pub(super) fn from_layers() -> Vec<Seed> {
    let mut make = Maker::new("from_layers");
    let opened = SessionOpened {
        session: 1,
        instance: 2,
        tenant: "acme".to_owned(),
        catalog_bytes: 3,
        max_rows: 4,
        max_waiting_rows: 5,
        max_bytes: 6,
    };
    make.valid("a session", FromLayers::Opened(opened).to_bytes());
    let refused = SessionRefused { code: RefusalCode::Busy, message: "why".to_owned(), retry_after_ms: 7 };
    make.valid("a refusal", FromLayers::Refused(refused).to_bytes());
    let fetched = Fetched { blob: 1, offset: 2, bytes: vec![3; 100] };
    make.valid("part of a blob", FromLayers::Fetched(fetched).to_bytes());
    let ready = ChannelReady { region_bytes: 1024, slab_bytes: 512, depth: 4 };
    make.valid("a channel", FromLayers::ChannelReady(ready).to_bytes());
    make.valid("figures", FromLayers::Stats(SessionStats::default()).to_bytes());
    make.valid("the end", FromLayers::Draining.to_bytes());
    make.valid("a catalog", catalog().to_bytes());
    let hostile = [&[2][..], &[0; 12], &[255; 4], b"x"].concat();
    make.refused("a blob of 2^32 - 1 bytes", COUNTS, hostile, "ends early");
    let mut sites = catalog().to_bytes();
    let at = 4 + 1 + 4 + 5 + 32 + 4 + 1;
    sites[at..at + 4].copy_from_slice(&[255; 4]);
    make.refused("a catalog of 2^32 - 1 sites", COUNTS, sites, "");
    make.refused("a refusal with an unknown reason", FORMAT, vec![1, 9], "RefusalCode");
    make.seeds
}

/// Returns a greeting and, with NULL, the properties of a DEALER.
fn greeting(mechanism: &str, properties: bool) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..12].copy_from_slice(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1]);
    bytes[12..12 + mechanism.len()].copy_from_slice(mechanism.as_bytes());
    if properties {
        bytes.extend_from_slice(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
    }
    bytes
}

pub(super) fn zmtp() -> Vec<Seed> {
    let mut make = Maker::new("zmtp");
    // One additional byte is the number of bytes per read.
    let null = |rest: &[u8]| [&[255][..], &greeting("NULL", true), rest].concat();
    let plain = |rest: &[u8]| [&[3][..], &greeting("PLAIN", false), rest].concat();
    let mut message = Vec::new();
    put_message(&mut message, &[&call().to_bytes(), &[0; 2304]]);
    make.valid("a call", null(&message));
    let drawn =
        CallHeader { op: SiteOp::ForwardNoBias, path: SitePath::Ring, source: RowSource::Draw, ..call() };
    message.clear();
    put_message(&mut message, &[&drawn.to_bytes(), &[7; DRAW_BYTES]]);
    make.valid("a draw", null(&message));
    make.valid("a ping", null(b"\x04\x0b\x04PING\x00\x1ectxt"));
    let login = b"\x04\x0f\x05HELLO\x03key\x04good\x04\x1f\x08INITIATE\x0bSocket-Type\0\0\0\x06DEALER";
    make.valid("a login", plain(login));
    make.refused(
        "a frame of 2^62 bytes",
        COUNTS,
        null(b"\x02\x40\0\0\0\0\0\0\0"),
        "4611686018427387904 bytes",
    );
    make.refused("a frame of 2^64 - 1 bytes", COUNTS, null(&[&[3][..], &[255; 8]].concat()), "was announced");
    make.bounded(
        "a gibibyte that is announced and does not come",
        FLOODS,
        null(b"\x02\0\0\0\0\x40\0\0\0abc"),
    );
    make.refused("10,000 frames of a message", FLOODS, null(&b"\x01\0".repeat(10_000)), "more than 2 frames");
    make.bounded("10,000 pings", FLOODS, null(&b"\x04\x07\x04PING\0\0".repeat(10_000)));
    make.refused("a command of a mebibyte", FLOODS, null(b"\x06\0\0\0\0\0\x10\0\0"), "a command of");
    make.refused("a message before the handshake is over", FLOODS, plain(b"\0\x01a"), "before the handshake");
    make.refused(
        "a property of 2^32 - 1 bytes",
        COUNTS,
        plain(b"\x04\x0c\x05READY\x01X\xff\xff\xff\xff"),
        "READY",
    );
    make.refused("a password longer than its command", COUNTS, plain(b"\x04\x08\x05HELLO\0\xff"), "HELLO");
    make.refused("a subscription", FORMAT, null(b"\x04\x0a\x09SUBSCRIBE"), "SUBSCRIBE");
    make.refused("flags that mean nothing", FORMAT, null(&[0x80, 0]), "flags");
    make.refused("a command that goes on", FORMAT, null(&[5, 0]), "flags");
    make.refused("CURVE", FORMAT, [&[1][..], &greeting("CURVE", false)].concat(), "CURVE");
    make.refused("HTTP", FORMAT, b"\x10GET / HTTP/1.1\r\n\r\n".to_vec(), "does not speak ZMTP");
    make.refused(
        "TLS inside",
        FORMAT,
        b"\x10\x16\x03\x01\x02\0\x01\0\x01\xfc".to_vec(),
        "does not speak ZMTP",
    );
    make.seeds
}

/// Returns the words of a region: counts, and calls in the first ring.
fn region(submitted: u32, calls: &[CallHeader]) -> Vec<u8> {
    let mut bytes = vec![0; 448];
    bytes[64..68].copy_from_slice(&submitted.to_le_bytes());
    calls.iter().for_each(|call| bytes.extend_from_slice(&call.to_bytes()));
    bytes
}

pub(super) fn channels() -> Vec<Seed> {
    let mut make = Maker::new("channel");
    make.valid("a call", region(1, &[call()]));
    make.valid("four calls", region(4, &[call(); 4]));
    let drawn = CallHeader { op: SiteOp::Backward, path: SitePath::Ring, source: RowSource::Draw, ..call() };
    make.valid("a draw of rows that the executor makes", region(1, &[drawn]));
    make.refused("2^32 - 1 calls", COUNTS, region(u32::MAX, &[call()]), "close the channel");
    make.refused("a call more than there are places", COUNTS, region(5, &[call(); 4]), "close the channel");
    make.refused("a call that was not written", FORMAT, region(1, &[]), "begins with");
    let at = |input, output| region(1, &[CallHeader { input, output, ..call() }]);
    make.refused("rows past the end", OFFSETS, at(512, 0), "no place");
    make.refused("an end that overflows", OFFSETS, at(u64::MAX - 63, 0), "no place");
    make.refused("an answer that ends outside", OFFSETS, at(0, 1 << 32), "no place");
    make.refused("rows off a line", OFFSETS, at(4, 0), "no place");
    make.valid("rows over themselves", at(64, 64));
    let mut replies = region(0, &[]);
    replies[192..196].copy_from_slice(&3u32.to_le_bytes());
    make.refused("replies that were not written", FORMAT, replies, "begins with");
    make.seeds
}
