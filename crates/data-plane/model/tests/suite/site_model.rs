//! Bases of any architecture of which only the linear layers are served.

use std::path::Path;

use crate::files_support::{
    assert_says, bf16_bytes, f16_bytes, f32_bytes, numbers, safetensors, tiny_entries, tiny_gguf, tiny_json,
    write_model,
};
use kernels::{Activations, reference};
use model::{
    linear_sites::{EvaluateSites, SiteCall, SiteId, SiteOp, SitePath},
    precision::BaseNumerics,
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    site_model::{SiteModel, SiteModelError},
    sources::{identity, open::open},
};
use serde_json::{Value, json};

type SiteTensor = (String, &'static str, Vec<usize>, Vec<u8>);

fn matrix(name: &str, shape: [usize; 2], seed: usize) -> SiteTensor {
    (name.to_owned(), "F32", shape.to_vec(), f32_bytes(&numbers(shape[0] * shape[1], seed)))
}

fn vector(name: &str, length: usize, seed: usize) -> SiteTensor {
    (name.to_owned(), "F32", vec![length], f32_bytes(&numbers(length, seed)))
}

fn open_with(config: &Value, entries: &[SiteTensor]) -> Result<SiteModel, SiteModelError> {
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), config, entries);
    SiteModel::open(directory.path(), &[])
}

fn evaluate(base: &mut impl EvaluateSites, site: usize, op: SiteOp, path: SitePath, x: &[f32]) -> Vec<f32> {
    let (inputs, outputs) = base.sites()[site].widths(None, op).unwrap();
    let mut rows = Activations::default();
    rows.reshape(0, inputs);
    rows.append(x);
    let mut out = vec![f32::NAN; rows.rows() * outputs];
    let call = SiteCall { site: SiteId(u32::try_from(site).unwrap()), part: None, op, path };
    base.evaluate(call, &mut rows, &mut out).unwrap();
    out
}

fn names(model: &SiteModel) -> Vec<&str> {
    let name = |site: &'_ model::linear_sites::Site| {
        assert_eq!(site.parts.len(), 1, "every linear layer is a site of its own");
    };
    model.sites().iter().for_each(name);
    model.sites().iter().map(|site| site.parts[0].name.as_str()).collect()
}

fn site(model: &SiteModel, name: &str) -> usize {
    names(model).iter().position(|found| *found == name).unwrap_or_else(|| panic!("there is no site {name}"))
}

/// Compares all ways to evaluate a site with plain loops over `weights`, `[out, in]`, and `biases`.
#[track_caller]
fn agrees(model: &mut SiteModel, name: &str, weights: &[f32], biases: Option<&[f32]>, tolerance: f32) {
    let site = site(model, name);
    let shape = model.sites()[site].clone();
    let (inputs, outputs) = (shape.columns, shape.parts[0].rows);
    assert_eq!((weights.len(), shape.parts[0].has_bias), (inputs * outputs, biases.is_some()), "{name}");
    let close = |found: Vec<f32>, expected: Vec<f32>, what: &str| {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{name}, {what}: {a} instead of {b}");
        }
    };
    let (x, g) = (numbers(3 * inputs, 3), numbers(2 * outputs, 4));
    let without = reference::linear(&x, weights, 3, outputs, inputs);
    let bias = |i: usize| biases.map_or(0.0, |biases| biases[i % outputs]);
    let with: Vec<f32> = without.iter().enumerate().map(|(i, value)| value + bias(i)).collect();
    for path in [SitePath::Fast, SitePath::Linear] {
        close(evaluate(model, site, SiteOp::Forward, path, &x), with.clone(), "forward");
        close(evaluate(model, site, SiteOp::ForwardNoBias, path, &x), without.clone(), "without bias");
    }
    let gradient = (0..2 * inputs).map(|i| {
        let (row, k) = (i / inputs, i % inputs);
        (0..outputs).map(|o| g[row * outputs + o] * weights[o * inputs + k]).sum()
    });
    close(evaluate(model, site, SiteOp::Backward, SitePath::Linear, &g), gradient.collect(), "backward");
}

fn transposed(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// A block of GPT-2, or of a variant with one key head: the same names, transposed matrices.
fn block(prefix: &str, layer: usize, shapes: [[usize; 2]; 4]) -> Vec<SiteTensor> {
    let of = |name: &str| format!("{prefix}h.{layer}.{name}");
    let kinds = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"];
    let mut entries = vec![vector(&of("ln_1.weight"), 8, 1), vector(&of("ln_1.bias"), 8, 2)];
    for (seed, (kind, shape)) in kinds.into_iter().zip(shapes).enumerate() {
        entries.push(matrix(&of(&format!("{kind}.weight")), shape, 10 * layer + seed));
    }
    entries
}

const GPT2: [[usize; 2]; 4] = [[8, 24], [8, 8], [8, 32], [32, 8]];

fn gpt2() -> (Value, Vec<SiteTensor>) {
    let config = json!({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 11});
    let mut entries = vec![matrix("wte.weight", [10, 8], 5), matrix("wpe.weight", [4, 8], 6)];
    for layer in [0, 2, 10] {
        entries.extend(block("", layer, GPT2));
        entries.push(vector(&format!("h.{layer}.attn.c_attn.bias"), 24, 7));
        // The causal mask, which old files contain.
        entries.push((format!("h.{layer}.attn.bias"), "U8", vec![1, 1, 4, 4], vec![1; 16]));
    }
    (config, entries)
}

#[test]
fn gpt2_stores_its_matrices_the_other_way_round_and_its_head_is_the_embedding() {
    let (config, entries) = gpt2();
    let mut model = open_with(&config, &entries).unwrap();
    let expected: Vec<String> = [0, 2, 10]
        .iter()
        .flat_map(|layer| {
            ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"].map(|kind| format!("h.{layer}.{kind}"))
        })
        .chain(["lm_head".to_owned()])
        .collect();
    assert_eq!(names(&model), expected);
    assert!(model.numerics() == BaseNumerics::Exact && model.sites().iter().all(|site| site.fast_is_linear));
    assert_eq!((model.info().architecture.as_str(), model.info().context_length), ("gpt2", None));
    let stored = |layer: usize, seed: usize, shape: [usize; 2]| {
        transposed(&numbers(shape[0] * shape[1], 10 * layer + seed), shape)
    };
    let biases = numbers(24, 7);
    for layer in [0, 2, 10] {
        let of = |kind: &str| format!("h.{layer}.{kind}");
        agrees(&mut model, &of("attn.c_attn"), &stored(layer, 0, GPT2[0]), Some(&biases), 1e-5);
        agrees(&mut model, &of("attn.c_proj"), &stored(layer, 1, GPT2[1]), None, 1e-5);
        agrees(&mut model, &of("mlp.c_fc"), &stored(layer, 2, GPT2[2]), None, 1e-5);
        agrees(&mut model, &of("mlp.c_proj"), &stored(layer, 3, GPT2[3]), None, 1e-5);
    }
    agrees(&mut model, "lm_head", &numbers(80, 5), None, 1e-5);
}

#[test]
fn gpt_bigcode_has_the_names_of_gpt2_and_its_matrices_the_usual_way_round() {
    let config = json!({"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"]});
    let shapes = [[12, 8], [8, 8], [32, 8], [8, 32]];
    let mut entries = block("transformer.", 0, shapes);
    entries
        .extend([matrix("transformer.wte.weight", [10, 8], 5), matrix("transformer.wpe.weight", [4, 8], 6)]);
    entries.push(vector("transformer.h.0.mlp.c_fc.bias", 32, 7));
    let mut model = open_with(&config, &entries).unwrap();
    let of = |kind: &str| format!("transformer.h.0.{kind}");
    agrees(&mut model, &of("attn.c_attn"), &numbers(96, 0), None, 1e-5);
    agrees(&mut model, &of("mlp.c_fc"), &numbers(256, 2), Some(&numbers(32, 7)), 1e-5);
    agrees(&mut model, &of("mlp.c_proj"), &numbers(256, 3), None, 1e-5);
    agrees(&mut model, "lm_head", &numbers(80, 5), None, 1e-5);
    assert_eq!(model.sites().len(), 5);
}

#[test]
fn gemma_in_16_bits_is_served_and_a_tied_head_that_is_stored_once_more_is_ignored() {
    let mut config = json!({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]});
    let q = numbers(64, 1);
    let mut entries = vec![
        ("model.embed_tokens.weight".to_owned(), "BF16", vec![10, 8], bf16_bytes(&numbers(80, 5))),
        ("model.layers.0.self_attn.q_proj.weight".to_owned(), "F16", vec![8, 8], f16_bytes(&q)),
        ("model.layers.0.self_attn.k_proj.weight".to_owned(), "BF16", vec![4, 8], bf16_bytes(&q[..32])),
        vector("model.layers.0.input_layernorm.weight", 8, 2),
    ];
    let mut model = open_with(&config, &entries).unwrap();
    assert_eq!(
        names(&model),
        ["model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.q_proj", "lm_head"]
    );
    let linear: Vec<bool> = model.sites().iter().map(|site| site.fast_is_linear).collect();
    assert_eq!((linear, model.numerics()), (vec![false, true, false], BaseNumerics::Rounded));
    agrees(&mut model, "model.layers.0.self_attn.q_proj", &q, None, 1e-5);
    // The fast path does not round rows that 16 bits hold exactly.
    agrees(&mut model, "model.layers.0.self_attn.k_proj", &q[..32], None, 1e-2);
    agrees(&mut model, "lm_head", &numbers(80, 5), None, 1e-2);

    entries.push(matrix("lm_head.weight", [10, 8], 9));
    let mut stored = open_with(&config, &entries).unwrap();
    agrees(&mut stored, "lm_head", &numbers(80, 9), None, 1e-5);
    config["tie_word_embeddings"] = json!(true);
    let mut tied = open_with(&config, &entries).unwrap();
    agrees(&mut tied, "lm_head", &numbers(80, 5), None, 1e-2);
    assert_ne!(stored.info().identity, tied.info().identity);
}

#[test]
fn heads_of_other_names_and_models_without_a_head_get_no_second_one() {
    let mut config = json!({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]});
    let mut entries = vec![
        matrix("gpt_neox.embed_in.weight", [10, 8], 1),
        matrix("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", [32, 8], 2),
        matrix("embed_out.weight", [10, 8], 3),
    ];
    assert_eq!(
        names(&open_with(&config, &entries).unwrap()),
        ["gpt_neox.layers.0.mlp.dense_h_to_4h", "embed_out"]
    );
    entries.pop();
    config["tie_word_embeddings"] = json!(false);
    assert_eq!(names(&open_with(&config, &entries).unwrap()).len(), 1);
    config["architectures"] = json!(["GPTNeoXModel"]);
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    assert_eq!(names(&open_with(&config, &entries).unwrap()).len(), 1);
}

#[test]
fn tables_norms_and_other_things_than_matrices_are_no_sites() {
    let config = json!({"model_type": "bert", "architectures": ["BertModel"]});
    let entries = vec![
        matrix("embeddings.word_embeddings.weight", [10, 8], 1),
        matrix("embeddings.position_embeddings.weight", [4, 8], 2),
        matrix("embeddings.token_type_embeddings.weight", [2, 8], 3),
        ("embeddings.position_ids".to_owned(), "I64", vec![1, 4], vec![0; 32]),
        vector("embeddings.LayerNorm.weight", 8, 4),
        matrix("encoder.relative_attention_bias.weight", [4, 2], 5),
        matrix("decoder.embed_positions.weight", [4, 8], 6),
        ("conv.weight".to_owned(), "F32", vec![2, 2, 2], f32_bytes(&numbers(8, 7))),
        matrix("a_table_without_its_name", [8, 8], 8),
        matrix("pooler.dense.weight", [8, 8], 9),
    ];
    assert_eq!(names(&open_with(&config, &entries).unwrap()), ["pooler.dense"]);
}

#[test]
fn a_known_architecture_is_served_by_groups_with_the_bits_of_the_resident_engine() {
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &tiny_json(), &tiny_entries(&[]));
    let gguf = directory.path().join("tiny.gguf");
    std::fs::write(&gguf, tiny_gguf("llama", &[]).bytes()).unwrap();
    for path in [directory.path(), &gguf] {
        let source = open(path).unwrap();
        let options = ResidentOptions { cores: vec![], kv_bytes: 1 << 20, kv_dtype: None };
        let mut resident = ResidentModel::new(LoadedWeights::load(&*source, 1).unwrap(), &options).unwrap();
        let mut model = SiteModel::open(path, &[0, 0]).unwrap();
        assert_eq!(model.sites(), resident.sites());
        let info = model.info().clone();
        assert_eq!(info.identity, identity::of_model(path).unwrap());
        assert_eq!(info.name, path.file_name().unwrap().to_str().unwrap());
        assert_eq!((info.architecture.as_str(), info.context_length), ("llama", Some(128)));
        for site in 0..9 {
            let x = numbers(2 * model.sites()[site].columns, site);
            let bits = |values: Vec<f32>| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let found = evaluate(&mut model, site, SiteOp::Forward, SitePath::Fast, &x);
            let expected = evaluate(&mut resident, site, SiteOp::Forward, SitePath::Fast, &x);
            assert_eq!(bits(found), bits(expected), "site {site}");
        }
    }
}

#[test]
fn an_option_that_the_resident_engine_lacks_makes_every_layer_a_site() {
    let mut config = tiny_json();
    config["hidden_act"] = json!("gelu");
    let model = open_with(&config, &tiny_entries(&[])).unwrap();
    assert_eq!(names(&model).len(), 2 * 7 + 1);
    assert_eq!(model.info().architecture, "llama");
    // A broken file is rejected even if parts of it would be usable.
    assert_says(open_with(&tiny_json(), &tiny_entries(&[])[1..]), &["model.embed_tokens.weight", "missing"]);
}

#[test]
fn a_sharded_model_is_served_whole_and_always_in_the_same_order() {
    let (config, entries) = gpt2();
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = entries.split_at(9);
    let mut map = serde_json::Map::new();
    for (file, part) in [("b.safetensors", first), ("a.safetensors", second)] {
        std::fs::write(directory.path().join(file), safetensors(part)).unwrap();
        map.extend(part.iter().map(|(name, ..)| (name.clone(), json!(file))));
    }
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let index = json!({"weight_map": map}).to_string();
    std::fs::write(directory.path().join("model.safetensors.index.json"), index).unwrap();
    let (sharded, whole) =
        (SiteModel::open(directory.path(), &[]).unwrap(), open_with(&config, &entries).unwrap());
    assert_eq!(sharded.sites(), whole.sites());
    assert_eq!(sharded.info().identity, whole.info().identity);
    assert_eq!(sharded.bytes(), whole.bytes());
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let (config, entries) = gpt2();
    let with = |changes: Value| {
        let mut config = config.clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        open_with(&config, &entries)
    };
    assert_says(
        with(json!({"quantization_config": {"quant_method": "gptq"}})),
        &["config.json", "quantized"],
    );
    assert_says(with(json!({"model_type": 7})), &["config.json", "model_type"]);
    let and = |entry: SiteTensor| open_with(&config, &[entries.clone(), vec![entry]].concat());
    let eight_bits = ("h.3.mlp.c_fc.weight".to_owned(), "I8", vec![8, 4], vec![0; 32]);
    assert_says(and(eight_bits), &["h.3.mlp.c_fc.weight", "I8"]);
    let bias = vector("h.2.mlp.c_fc.bias", 31, 0);
    assert_says(and(bias), &["h.2.mlp.c_fc.weight", "32 outputs", "[31]"]);
    let empty = ("h.3.mlp.c_fc.weight".to_owned(), "F32", vec![0, 8], Vec::new());
    assert_says(and(empty), &["h.3.mlp.c_fc.weight", "sizes from 1"]);
    let long = matrix(&format!("{}.weight", "x".repeat(300)), [8, 8], 0);
    assert_says(and(long), &["more than 256 bytes"]);
    let none = json!({"model_type": "gpt2", "architectures": ["GPT2Model"]});
    assert_says(open_with(&none, &entries[..2]), &["0 linear layers"]);
    assert_says(SiteModel::open(Path::new("/nowhere/at/all"), &[]), &["/nowhere/at/all"]);
}

#[test]
fn hostile_files_of_unknown_architectures_are_refused_like_those_of_known_ones() {
    let (config, entries) = gpt2();
    let directory = tempfile::tempdir().unwrap();
    write_model(directory.path(), &config, &entries);
    let path = directory.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], parts: &[&str]| {
        std::fs::write(&path, bytes).unwrap();
        assert_says(SiteModel::open(directory.path(), &[]), parts);
    };
    refused(&whole[..whole.len() - 1], &["model.safetensors"]);
    refused(&[&whole[..], &[0]].concat(), &["model.safetensors"]);
    refused(&u64::MAX.to_le_bytes(), &["model.safetensors", "limit"]);
    refused(&[], &["model.safetensors"]);
    std::fs::write(&path, &whole).unwrap();
    let index = directory.path().join("model.safetensors.index.json");
    std::fs::write(&index, json!({"weight_map": {"x": "../model.safetensors"}}).to_string()).unwrap();
    assert_says(SiteModel::open(directory.path(), &[]), &["not a plain file name"]);
}
