//! Hugging Face directories.

use serde_json::{Value, json};

use super::{Expected, Maker, Seed, adapter::safetensors};
use crate::parts::join;

const SHAPES: &str = "CVE-2024-21802, CVE-2026-33298 (shapes and types)";
const PATHS: &str = "CVE-2024-37032, CVE-2026-103663 (paths)";
const GROWTH: &str = "limits after allocation";

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": 64,
        "tie_word_embeddings": true, "eos_token_id": [2],
    })
}

fn with(option: &str, value: Value) -> Value {
    let mut config = config();
    config[option] = value;
    config
}

fn weights() -> Vec<u8> {
    let block = |name: &str| format!("model.layers.0.{name}.weight");
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in [
        ("model.embed_tokens.weight".to_owned(), vec![32, 8]),
        ("model.norm.weight".to_owned(), vec![8]),
        (block("input_layernorm"), vec![8]),
        (block("post_attention_layernorm"), vec![8]),
        (block("self_attn.q_proj"), vec![8, 8]),
        (block("self_attn.k_proj"), vec![4, 8]),
        (block("self_attn.v_proj"), vec![4, 8]),
        (block("self_attn.o_proj"), vec![8, 8]),
        (block("mlp.gate_proj"), vec![16, 8]),
        (block("mlp.up_proj"), vec![16, 8]),
        (block("mlp.down_proj"), vec![8, 16]),
    ] {
        let begin = end;
        end += shape.iter().product::<usize>() * 4;
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}));
    }
    safetensors(&Value::from(header).to_string(), end)
}

pub(super) fn directories() -> Vec<Seed> {
    let mut make = Maker::new("directory");
    let model =
        |config: &Value, index: &str| join(&[config.to_string().as_bytes(), index.as_bytes(), &weights()]);
    make.valid("a whole model", model(&config(), ""));
    make.valid(
        "a whole model with its index",
        model(&config(), r#"{"weight_map":{"a":"model.safetensors"}}"#),
    );
    let code = model(&with("auto_map", json!({"AutoModel": "evil.Model"})), "");
    make.add("code to run, which is not run", "vLLM's auto_map, CVE-2026-41523", code, Expected::Accepted);
    let mut number =
        |name, option, value: Value, why| make.refused(name, SHAPES, model(&with(option, value), ""), why);
    number("no heads", "num_attention_heads", json!(0), "number of heads is 0");
    number("2^64 - 1 heads", "num_attention_heads", json!(u64::MAX), "not between 1 and");
    number("2^40 layers", "num_hidden_layers", json!(1u64 << 40), "not between 1 and");
    number("heads of an odd width", "head_dim", json!(3), "even width");
    number("heads that do not divide", "num_key_value_heads", json!(3), "do not divide");
    number("a vocabulary that is not there", "vocab_size", json!(1 << 24), "has the shape");
    number("an epsilon of -1", "rms_norm_eps", json!(-1.0), "not a positive finite number");
    number("an epsilon that overflows", "rms_norm_eps", json!(1e300), "not a positive finite number");
    number("a base of 0", "rope_theta", json!(0.0), "not a positive finite number");
    number("another architecture", "architectures", json!(["Evil"]), "architectures");
    let mut quantized = |name, option: &str, value: Value, why| {
        let mut about = json!({"quant_method": "gptq", "bits": 4, "group_size": 32});
        about[option] = value;
        make.refused(name, SHAPES, model(&with("quantization_config", about), ""), why);
    };
    quantized("codes of 2^40 bits", "bits", json!(1u64 << 40), "bits");
    quantized("groups of none", "group_size", json!(0), "group_size");
    quantized("groups of 2^40", "group_size", json!(1u64 << 40), "group_size");
    quantized("another method", "quant_method", json!("evil"), "evil");
    let mut index = |name, class, text: &str, why| make.refused(name, class, model(&config(), text), why);
    index(
        "a shard that leads out",
        PATHS,
        r#"{"weight_map":{"a":"../model.safetensors"}}"#,
        "not a plain file name",
    );
    index("a shard at the root", PATHS, r#"{"weight_map":{"a":"/etc/passwd"}}"#, "not a plain file name");
    index("a shard with a NUL", PATHS, "{\"weight_map\":{\"a\":\"m\\u0000\"}}", "cannot read");
    index("a shard named ..", PATHS, r#"{"weight_map":{"a":".."}}"#, "not a plain file name");
    index("no shards", GROWTH, r#"{"weight_map":{}}"#, "0 files");
    let many: Vec<String> = (0..200_000).map(|i| format!("\"{i:x}\":\"{i:x}\"")).collect();
    index("200,000 shards", GROWTH, &format!("{{\"weight_map\":{{{}}}}}", many.join(",")), "");
    let lists = format!("{{\"quantization_config\":[{}0]}}", "[0],".repeat(200_000));
    make.refused("250,000 lists in an option", GROWTH, join(&[lists.as_bytes(), b"", &weights()]), "");
    make.seeds
}
