//! Deployment files, and answers of a server that is not a gateway.

use super::{Maker, Seed};

const BOMBS: &str = "TOML bombs";
const SILENCE: &str = "silent ignorance";
const STREAMS: &str = "streams without end";

const DEPLOYMENT: &str = r#"# Ours.
[model]
name = "smol.gguf"
context_length = 4096

[executor]
cores = "0-3,8"
kv_bytes = "1536 MiB"

[gateway]
listen = "127.0.0.1:0"
insecure = false
client_write_timeout_ms = 60_000

[deployment]
log_format = "json"
max_crashes_per_min = 5

[adapters]
mine = "adapters/mine"
'' = '''
adapters/yours'''
"#;

pub(super) fn deployment_files() -> Vec<Seed> {
    let mut make = Maker::new("deployment_file");
    make.valid("a deployment", DEPLOYMENT.into());
    make.valid("nothing", Vec::new());
    for (name, text, why) in [
        ("an unknown key", "[model]\nnmae = 'a'", "nmae"),
        ("an unknown section", "[exekutor]", "exekutor"),
        ("a key twice", "[model]\nname = 'a'\nname = 'b'", "duplicate key"),
        ("a section twice", "[model]\n[model]", "duplicate key"),
        ("a section that is a list", "[[model]]", "model"),
        ("a list that is a section", "model = [{name = 'a'}]", "model"),
        ("a key below a text", "[adapters]\na = 'b'\na.b = 'c'", "a"),
        ("a port of 65,536", "[gateway]\nlisten = '127.0.0.1:65536'", "listen"),
        ("a number of 2^32", "[executor]\nmax_running = 4294967296", "max_running"),
        ("a number of 2^64", "[executor]\nmax_running = 18446744073709551616", ""),
        ("a number of -1", "[gateway]\nthreads = -1", "threads"),
        ("a limit of 0 crashes", "[deployment]\nmax_crashes_per_min = 0", "max_crashes_per_min"),
        ("bytes without end", "[executor]\nkv_bytes = '999999999999 TiB'", "kv_bytes"),
        ("bytes that are no number", "[executor]\nkv_bytes = nan", "kv_bytes"),
        ("a date", "[model]\nname = 1979-05-27T07:32:00Z", "name"),
        ("a lone surrogate", "[model]\nname = \"\\ud800\"", ""),
        ("a text without end", "[model]\nname = \"a", ""),
        ("a NUL", "[model]\nname = \"a\0\"", ""),
    ] {
        make.refused(name, SILENCE, text.into(), why);
    }
    make.refused("bytes that are no text", BOMBS, vec![0xff; 64], "utf-8");
    make.refused("lists 100,000 deep", BOMBS, format!("a = {}", "[".repeat(100_000)).into(), "");
    make.refused("tables 100,000 deep", BOMBS, format!("a = {}", "{a=".repeat(100_000)).into(), "");
    make.refused("keys 100,000 deep", BOMBS, format!("{}a = 1", "a.".repeat(100_000)).into(), "");
    make.refused("a heading 100,000 deep", BOMBS, format!("[{}a]", "a.".repeat(100_000)).into(), "");
    let lines = |line: fn(usize) -> String| (0..30_000).map(line).collect::<String>();
    make.refused("30,000 sections", BOMBS, lines(|index| format!("[a{index}]\n")).into(), "");
    make.refused("30,000 lists of sections", BOMBS, lines(|_| "[[a]]\n".into()).into(), "");
    make.refused("30,000 keys", BOMBS, lines(|index| format!("a{index}=1\n")).into(), "");
    make.refused("30,000 broken lines", BOMBS, lines(|_| "=\n".into()).into(), "");
    let adapters = format!("[adapters]\n{}", lines(|index| format!("a{index} = 'adapters/a{index}'\n")));
    make.bounded("30,000 adapters", BOMBS, adapters.into());
    make.seeds
}

pub(super) fn events() -> Vec<Seed> {
    let mut make = Maker::new("events");
    let valid =
        "data: {\"choices\":[{\"text\":\" a\"}]}\n\n: wait\nid: 1\ndata: a\r\ndata:b\r\n\r\ndata: [DONE]\n\n";
    make.valid("a stream", valid.into());
    make.valid("nothing", Vec::new());
    make.valid("a stream that ends early", b"data: {\"choi".to_vec());
    make.refused("bytes that are no text", STREAMS, b"data: \xff\xfe\n\n".to_vec(), "utf-8");
    make.refused("a line without end", STREAMS, vec![b'a'; 5 << 20], "longer than 4 MiB");
    make.refused("an event without end", STREAMS, b"data: and so on\n".repeat(1 << 19), "longer than 4 MiB");
    make.refused(
        "data without end",
        STREAMS,
        [&b"data:"[..], &[b'a'; 5 << 20]].concat(),
        "longer than 4 MiB",
    );
    make.valid("a million empty lines", vec![b'\n'; 1 << 20]);
    make.valid("100,000 empty events", b"data\ndata:\n\n".repeat(100_000));
    make.seeds
}
