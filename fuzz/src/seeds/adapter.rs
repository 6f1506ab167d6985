//! PEFT adapters: a header that takes long to parse, shapes that overflow, patterns without end.

use serde_json::{Value, json};

use super::{Maker, Seed};
use crate::parts::join;

const HEADER: &str = "safetensors audit and reports (header)";
const RANKS: &str = "vllm#42008, adversarial ranks";
const PATTERNS: &str = "CVE-2026-55574, CVE-2025-71379 (patterns)";
const GROWTH: &str = "limits after allocation";

fn config() -> Value {
    json!({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
}

fn with(option: &str, value: Value) -> Value {
    let mut config = config();
    config[option] = value;
    config
}

/// Builds a safetensors file with this header as text and `data_bytes` zeros.
pub(super) fn safetensors(header: &str, data_bytes: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [length.as_slice(), header.as_bytes(), &vec![0; data_bytes]].concat()
}

fn tensor(kind: &str, shape: &[u64], begin: u64, end: u64) -> Value {
    json!({"dtype": kind, "shape": shape, "data_offsets": [begin, end]})
}

fn name(layer: usize, part: char) -> String {
    format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight")
}

fn weights() -> Vec<u8> {
    safetensors(&Value::from(layers()).to_string(), 512)
}

/// Returns the header of these weights, with 512 bytes of data.
fn layers() -> serde_json::Map<String, Value> {
    let mut header = serde_json::Map::new();
    for layer in 0..2 {
        let begin = layer as u64 * 256;
        header.insert(name(layer, 'A'), tensor("F32", &[4, 8], begin, begin + 128));
        header.insert(name(layer, 'B'), tensor("F32", &[8, 4], begin + 128, begin + 256));
    }
    header
}

/// Builds the weights with a copy of the head, of this shape and in 16 bits.
fn with_head(shape: &[u64]) -> Vec<u8> {
    let bytes = 2 * shape.iter().product::<u64>();
    let mut header = layers();
    let head = tensor("BF16", shape, 512, 512 + bytes);
    header.insert("base_model.model.lm_head.weight".to_owned(), head);
    safetensors(&Value::from(header).to_string(), 512 + bytes as usize)
}

/// Builds the weights with a magnitude of this shape for each layer.
fn with_magnitudes(shape: &[u64]) -> Vec<u8> {
    let bytes = 4 * shape.iter().product::<u64>();
    let mut header = serde_json::Map::new();
    for layer in 0..2 {
        let begin = layer as u64 * (256 + bytes);
        header.insert(name(layer, 'A'), tensor("F32", &[4, 8], begin, begin + 128));
        header.insert(name(layer, 'B'), tensor("F32", &[8, 4], begin + 128, begin + 256));
        let magnitude = name(layer, 'A').replace("lora_A.weight", "lora_magnitude_vector");
        header.insert(magnitude, tensor("F32", shape, begin + 256, begin + 256 + bytes));
    }
    safetensors(&Value::from(header).to_string(), 2 * (256 + bytes as usize))
}

fn adapter(config: &Value, weights: &[u8]) -> Vec<u8> {
    join(&[config.to_string().as_bytes(), weights])
}

pub(super) fn peft() -> Vec<Seed> {
    let mut make = Maker::new("peft");
    make.valid("an adapter", adapter(&config(), &weights()));
    let dora = |magnitude: &[u64]| adapter(&with("use_dora", json!(true)), &with_magnitudes(magnitude));
    make.valid("a DoRA", dora(&[8]));
    make.refused("a magnitude of two dimensions", RANKS, dora(&[2, 4]), "[2, 4]");
    make.refused("a magnitude for one output", RANKS, dora(&[1]), "[1]");
    let saved = |head: &[u64]| adapter(&with("modules_to_save", json!(["lm_head"])), &with_head(head));
    make.valid("a head of its own", saved(&[32, 8]));
    make.refused("a head for a larger vocabulary", RANKS, saved(&[48, 8]), "[48, 8]");
    make.refused("a head of one dimension", RANKS, saved(&[256]), "[256]");
    make.refused(
        "a norm of its own",
        RANKS,
        adapter(&with("modules_to_save", json!(["norm"])), &weights()),
        "`norm`",
    );
    headers(&mut make);
    tensors(&mut make);
    ranks(&mut make);
    patterns(&mut make);
    documents(&mut make);
    types(&mut make);
    make.seeds
}

/// Adds adapters of other types than LoRA, whose short files describe larger factors.
fn types(make: &mut Maker) {
    let of = |name: &str, options: Value, tensors: &[(&str, &str, &[u64])]| {
        let mut config = json!({"peft_type": name, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]});
        config["layers_to_transform"] = json!([0]);
        options.as_object().into_iter().flatten().for_each(|(name, value)| config[name] = value.clone());
        adapter(&config, &of_query(tensors))
    };
    let loha = |rank: u64| {
        let (tall, wide) = ([8, rank], [rank, 8]);
        let parts: [(&str, &str, &[u64]); 4] = [
            ("hada_w1_a", "F32", &tall),
            ("hada_w1_b", "F32", &wide),
            ("hada_w2_a", "F32", &tall),
            ("hada_w2_b", "F32", &wide),
        ];
        of("LOHA", json!({"r": rank, "alpha": 2}), &parts)
    };
    make.valid("a LoHa", loha(2));
    make.refused("a LoHa of a large rank", RANKS, loha(2000), "rank 2000");
    let sparse = |kind, entries| {
        of("SHIRA", json!({"r": 1}), &[("shira_weight", "F32", &[4]), ("shira_indices", kind, entries)])
    };
    make.valid("sparse elements", sparse("I32", &[2, 4]));
    make.refused("positions of half as many elements", RANKS, sparse("I32", &[2, 2]), "[2, 2]");
    let kernel = |size: u64| of("C3A", json!({"block_size": size}), &[("c3a_kernel", "F32", &[1, 1, 8])]);
    make.valid("a circulant matrix", kernel(8));
    make.refused("blocks of no size", RANKS, kernel(0), "must divide");
    let lokr = of("LOKR", json!({"r": 1}), &[("lokr_w1", "F32", &[0, 8]), ("lokr_w2", "F32", &[8, 1])]);
    make.refused("a Kronecker product of nothing", RANKS, lokr, "lokr_w1");
}

/// Builds the weights of the first query projection, all zeros.
fn of_query(tensors: &[(&str, &str, &[u64])]) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (part, kind, shape) in tensors {
        let begin = end;
        end += 4 * shape.iter().product::<u64>();
        let name = format!("base_model.model.model.layers.0.self_attn.q_proj.{part}");
        header.insert(name, tensor(kind, shape, begin, end));
    }
    safetensors(&Value::from(header).to_string(), end as usize)
}

fn headers(make: &mut Maker) {
    let raw = |weights: &[u8]| adapter(&config(), weights);
    let declared = |length: u64| raw(&[&length.to_le_bytes()[..], b"{}"].concat());
    make.refused("a header of 2^64 - 1 bytes", HEADER, declared(u64::MAX), "the limit is");
    make.refused("a header longer than the file", HEADER, declared(1 << 19), "malformed");
    make.refused("a header of no bytes", HEADER, declared(0), "malformed");
    make.refused("a file of seven bytes", HEADER, raw(&[1; 7]), "malformed");
    let entries = |count: usize| {
        let tensors = (0..count)
            .map(|i| format!("\"{i:x}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}"));
        safetensors(&format!("{{{}}}", tensors.collect::<Vec<_>>().join(",")), 0)
    };
    make.refused("100,000 tensors", HEADER, raw(&entries(100_000)), "the limit is");
    make.refused("as many tensors as the header may hold", HEADER, raw(&entries(19_000)), "");
    let metadata = |count: usize| {
        let pairs = (0..count).map(|i| format!("\"{i:x}\":\"\"")).collect::<Vec<_>>().join(",");
        safetensors(&format!("{{\"__metadata__\":{{{pairs}}}}}"), 0)
    };
    make.refused("metadata of 90,000 empty texts", GROWTH, raw(&metadata(90_000)), "");
    let nested = safetensors(&"{\"a\":".repeat(100_000), 0);
    make.refused("a header 100,000 deep", HEADER, raw(&nested), "");
}

fn tensors(make: &mut Maker) {
    let header = |a: Value, b: Value, bytes| {
        let header = json!({name(0, 'A'): a, name(0, 'B'): b});
        adapter(&config(), &safetensors(&header.to_string(), bytes))
    };
    let good = || tensor("F32", &[4, 8], 0, 128);
    let overlap = header(good(), tensor("F32", &[8, 4], 64, 192), 192);
    make.refused("tensors that overlap", HEADER, overlap, "malformed");
    let hole = header(good(), tensor("F32", &[8, 4], 132, 260), 260);
    make.refused("a hole between tensors", HEADER, hole, "malformed");
    let short = header(good(), tensor("F32", &[8, 4], 128, 256), 200);
    make.refused("data that ends early", HEADER, short, "malformed");
    let long = header(good(), tensor("F32", &[8, 4], 128, 256), 300);
    make.refused("data of no tensor", HEADER, long, "malformed");
    let wrap = header(tensor("F32", &[(1 << 62) + 1, 4], 0, 16), tensor("F32", &[8, 4], 16, 144), 144);
    make.refused("a shape whose product wraps to 4", HEADER, wrap, "malformed");
    let empty = header(tensor("F32", &[0, 8], 0, 0), tensor("F32", &[8, 0], 0, 0), 0);
    make.refused("empty tensors at one offset", HEADER, empty, "");
    let backwards = header(tensor("F32", &[4, 8], 128, 0), tensor("F32", &[8, 4], 128, 256), 256);
    make.refused("an end before its begin", HEADER, backwards, "malformed");
    let kind = header(tensor("F16", &[4, 8], 0, 128), tensor("F32", &[8, 4], 128, 256), 256);
    make.refused("a type that is not the size's", HEADER, kind, "malformed");
    let other = header(tensor("I32", &[4, 8], 0, 128), tensor("F32", &[8, 4], 128, 256), 256);
    make.refused("integers", HEADER, other, "F32, F16 and BF16 are supported");
    let entry = format!("{}:{}", Value::from(name(0, 'A')), good());
    let twice = safetensors(&format!("{{{entry},{entry}}}"), 128);
    make.refused("a name that comes twice", HEADER, adapter(&config(), &twice), "appears twice");
    for (value, name) in [
        (f32::NAN, "a weight that is not a number"),
        (f32::INFINITY, "a weight that is infinite"),
        (f32::NEG_INFINITY, "a weight that is minus infinity"),
    ] {
        let mut weights = weights();
        let at = weights.len() - 4;
        weights[at..].copy_from_slice(&value.to_le_bytes());
        make.refused(name, RANKS, adapter(&config(), &weights), "the training went wrong");
    }
}

fn ranks(make: &mut Maker) {
    let mut option = |name, option, value: Value, why| {
        make.refused(name, RANKS, adapter(&with(option, value), &weights()), why);
    };
    option("a rank of 0", "r", json!(0), "has rank 0");
    option("a rank of 10^9", "r", json!(1_000_000_000), "has rank 1000000000");
    option("a rank of -1", "r", json!(-1), "is not a count");
    option("a rank of 2^64", "r", json!(18_446_744_073_709_551_616.0), "is not a count");
    option("a rank that is a text", "r", json!("4"), "is not a count");
    option("an alpha of 10^308", "lora_alpha", json!(1e308), "too large");
    option("a rank of 10^9 by pattern", "rank_pattern", json!({"q_proj": 1_000_000_000}), "has rank");
    option("a rank of 0 by pattern", "rank_pattern", json!({".*": 0}), "has rank 0");
    for (number, name) in
        [("NaN", "an alpha of NaN"), ("Infinity", "an alpha of Infinity"), ("1e999", "an alpha of 1e999")]
    {
        let text = config().to_string().replace("\"lora_alpha\":8", &format!("\"lora_alpha\":{number}"));
        make.refused(name, RANKS, join(&[text.as_bytes(), &weights()]), "not a usable configuration");
    }
}

fn patterns(make: &mut Maker) {
    let mut option = |name, option, value: Value, why| {
        make.refused(name, PATTERNS, adapter(&with(option, value), &weights()), why);
    };
    let bomb = r"(?=(.*.*.*.*.*.*.*.*)*z)\1";
    option("targets that backtrack without end", "target_modules", json!(bomb), "takes too long");
    option("nested repetition", "target_modules", json!(r"(?:(?:(?:[a-z_.0-9]*)*)*)*(?=!)z"), "");
    // PEFT adds brackets around the pattern, so its first group becomes the second.
    let bomb = r"(?=(.*.*.*.*.*.*.*.*)*z)\3";
    option("a rank pattern that backtracks", "rank_pattern", json!({bomb: 4}), "takes too long");
    option(
        "a pattern that grows when compiled",
        "target_modules",
        json!("(?:a{1000}){1000}"),
        "cannot be compiled",
    );
    option("a pattern of a mebibyte", "target_modules", json!("a".repeat(900_000)), "more than");
    option("brackets 2,000 deep", "target_modules", json!(["(".repeat(2000), ")".repeat(2000)].concat()), "");
    let many = |pattern: &dyn Fn(usize) -> String, count: usize| {
        Value::from((0..count).map(|i| (pattern(i), json!(4))).collect::<serde_json::Map<_, _>>())
    };
    option("100,000 patterns", "rank_pattern", many(&|i| format!("{i:x}"), 60_000), "the limit is");
    let large = many(&|i| format!("{i}(?:\\w{{9}}){{9}}"), 1_000);
    option("1,000 patterns that grow", "rank_pattern", large, "");
    let ahead = many(&|i| format!("{i}{}", "(?=(?:a{99}){9})".repeat(200)), 100);
    option("patterns of 200 parts that grow", "rank_pattern", ahead, "");
    let names: Vec<String> = (0..50_000).map(|i| format!("{i:x}")).collect();
    option("50,000 targets", "target_modules", json!(names), "the limit is");
    let literal = many(&|i| format!("model.layers.{i}.self_attn.q_proj"), 1_000);
    make.valid("1,000 names with their ranks", adapter(&with("rank_pattern", literal), &weights()));
}

fn documents(make: &mut Maker) {
    let mut raw = |name, class, text: String, why| {
        make.refused(name, class, join(&[text.as_bytes(), &weights()]), why);
    };
    let inside = |value: &str| config().to_string().replacen('{', &format!("{{\"x\":{value},"), 1);
    raw("a configuration 100,000 deep", HEADER, inside(&"[".repeat(100_000)), "not a usable configuration");
    raw("half a million numbers", GROWTH, inside(&format!("[{}0]", "0,".repeat(400_000))), "");
    raw("250,000 short lists", GROWTH, inside(&format!("[{}0]", "[0],".repeat(200_000))), "");
    raw("100,000 small maps", GROWTH, inside(&format!("[{}0]", "{\"\":0},".repeat(100_000))), "");
    raw("a lone surrogate", HEADER, inside("\"\\ud800\""), "not a usable configuration");
    raw("an unknown option", "silent ignorance", inside("1"), "`x` is 1, which is not supported");
    raw(
        "a configuration of two mebibytes",
        GROWTH,
        inside(&format!("\"{}\"", "a".repeat(2 << 20))),
        "larger than the limit",
    );
    raw("a list for a configuration", HEADER, "[]".to_owned(), "not a usable configuration");
    raw("nothing", HEADER, String::new(), "not a usable configuration");
}
