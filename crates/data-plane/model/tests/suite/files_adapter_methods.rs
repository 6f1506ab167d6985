//! IA3, prefix tuning and VeRA are read exactly as PEFT defines them, and everything else is rejected by
//! name.

use crate::files_support::{assert_says, f16_bytes, f32_bytes, hf_name, numbers, safetensors, tiny};
use model::{
    adapter::{Adapter, AdapterError, AdapterKind, AnyAdapter, MethodWeights, ScaledSide, limits},
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
};
use serde_json::{Value, json};

type MethodTensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

/// PEFT's configuration for its default layers.
fn ia3_config() -> Value {
    json!({
        "auto_mapping": null, "base_model_name_or_path": "org/tiny", "exclude_modules": null, "fan_in_fan_out": false,
        "feedforward_modules": ["down_proj"], "inference_mode": true, "init_ia3_weights": true,
        "modules_to_save": null, "peft_type": "IA3", "peft_version": "0.21.2", "revision": null,
        "target_modules": ["v_proj", "down_proj", "k_proj"], "task_type": "CAUSAL_LM",
    })
}

/// PEFT's configuration for a prefix of three virtual tokens.
fn prefix_config() -> Value {
    json!({
        "auto_mapping": null, "base_model_name_or_path": "org/tiny", "encoder_hidden_size": 24, "inference_mode": true,
        "init_weights": null, "modules_to_save": null, "num_attention_heads": 2, "num_layers": 2,
        "num_transformer_submodules": 1, "num_virtual_tokens": 3, "peft_type": "PREFIX_TUNING",
        "peft_version": "0.21.2", "prefix_projection": true, "revision": null, "task_type": "CAUSAL_LM",
        "token_dim": 16,
    })
}

fn with(mut config: Value, changes: &Value) -> Value {
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config
}

fn seed(layer: usize, target: Target) -> usize {
    layer * 20 + target.index_in_block().unwrap_or(7)
}

fn vector(layer: usize, target: Target, side: ScaledSide) -> (String, &'static str, Vec<usize>, Vec<u8>) {
    let [rows, cols] = linear_shape(&tiny(), target);
    let shape = match side {
        ScaledSide::Input => vec![1, cols],
        ScaledSide::Output => vec![rows, 1],
    };
    let values = numbers(shape.iter().product(), seed(layer, target));
    (format!("base_model.model.{}.ia3_l", hf_name(layer, target)), "F32", shape, f32_bytes(&values))
}

fn vectors() -> MethodTensors {
    let of = |layer| {
        [
            vector(layer, Target::Down, ScaledSide::Input),
            vector(layer, Target::K, ScaledSide::Output),
            vector(layer, Target::V, ScaledSide::Output),
        ]
    };
    (0..2).flat_map(of).collect()
}

/// Prefix of `tokens` virtual tokens; two layers, key and value, two heads of eight.
fn embeddings(tokens: usize) -> MethodTensors {
    let values = numbers(tokens * 64, 7);
    vec![("prompt_embeddings".to_owned(), "F32", vec![tokens, 64], f32_bytes(&values))]
}

fn read_for(model: &ModelConfig, config: &Value, entries: &MethodTensors) -> Result<Adapter, AdapterError> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    let adapter = Adapter::read(directory.path(), model);
    assert_eq!(AnyAdapter::problems(directory.path(), model).is_empty(), adapter.is_ok());
    adapter
}

fn read(config: &Value, entries: &MethodTensors) -> Result<Adapter, AdapterError> {
    read_for(&tiny(), config, entries)
}

fn ia3(changes: &Value, entries: &MethodTensors) -> Result<Adapter, AdapterError> {
    read(&with(ia3_config(), changes), entries)
}

fn prefix(changes: &Value, entries: &MethodTensors) -> Result<Adapter, AdapterError> {
    read(&with(prefix_config(), changes), entries)
}

#[test]
fn an_ia3_adapter_reads_as_its_vectors_in_the_order_of_the_layers() {
    let mut shuffled = vectors();
    shuffled.reverse();
    for entries in [vectors(), shuffled] {
        let adapter = ia3(&json!({}), &entries).unwrap();
        assert_eq!((adapter.method.kind(), adapter.method.linear_layers()), (AdapterKind::Ia3, 6));
        assert_eq!((adapter.method.rank(), adapter.method.virtual_tokens()), (0, 0));
        let MethodWeights::Ia3(scales) = &adapter.method else { panic!("{:?}", adapter.method) };
        let order: Vec<_> = scales.vectors().iter().map(|vector| (vector.layer, vector.target)).collect();
        let layer = |layer| [Target::K, Target::V, Target::Down].map(|target| (layer, target));
        assert_eq!(order, [layer(0), layer(1)].concat());
        let keys = scales.get(1, Target::K, ScaledSide::Output).unwrap();
        assert_eq!(keys, numbers(16, seed(1, Target::K)));
        assert_eq!(scales.get(1, Target::Down, ScaledSide::Input).unwrap().len(), 64);
        assert!(
            scales.get(1, Target::Down, ScaledSide::Output).is_none()
                && scales.get(0, Target::Q, ScaledSide::Output).is_none()
        );
        assert_eq!((adapter.base_model.as_deref(), adapter.stored_in_16_bits), (Some("org/tiny"), false));
    }
}

#[test]
fn feed_forward_layers_are_found_by_the_end_of_their_name_or_by_a_whole_expression() {
    let side = |changes: Value, side| {
        let entries = vec![vector(0, Target::Down, side), vector(1, Target::Down, side)];
        ia3(&with(json!({"target_modules": ["down_proj"]}), &changes), &entries)
    };
    for names in [json!(["down_proj"]), json!(["own_proj"]), json!([""]), json!(r".*\.mlp\.down_proj")] {
        assert!(side(json!({"feedforward_modules": names}), ScaledSide::Input).is_ok(), "{names}");
    }
    for names in [json!([]), json!(["mlp.down"]), json!("down_proj"), json!("all-linear")] {
        assert!(side(json!({"feedforward_modules": names}), ScaledSide::Output).is_ok(), "{names}");
        assert_says(
            side(json!({"feedforward_modules": names}), ScaledSide::Input),
            &["down_proj.ia3_l", "[1, 64]", "[32, 1]"],
        );
    }
}

#[test]
fn ia3_options_and_tensors_that_are_not_supported_are_refused_by_name() {
    let says = |changes: Value, parts: &[&str]| assert_says(ia3(&changes, &vectors()), parts);
    says(json!({"feedforward_modules": null}), &["`feedforward_modules` is missing"]);
    says(json!({"target_modules": null}), &["`target_modules` is missing"]);
    says(json!({"fan_in_fan_out": true}), &["`fan_in_fan_out`", "true"]);
    says(json!({"modules_to_save": ["lm_head"]}), &["`modules_to_save`", "lm_head"]);
    says(json!({"task_type": "SEQ_CLS"}), &["`task_type`", "SEQ_CLS"]);
    says(json!({"r": 4}), &["`r`", "4"]);
    says(json!({"feedforward_modules": [1]}), &["`feedforward_modules`"]);
    says(
        json!({"target_modules": ["v_proj", "down_proj"]}),
        &["layers.0.self_attn.k_proj`", "target_modules"],
    );
    let shared = json!({"feedforward_modules": ["down_proj", "k_proj"]});
    says(shared, &["`feedforward_modules`", "layers.0.self_attn.k_proj", "shares its inputs", "down_proj"]);

    let mut missing = vectors();
    missing.remove(4);
    assert_says(ia3(&json!({}), &missing), &["layers.1.self_attn.k_proj.ia3_l` is missing"]);
    let mut more = vectors();
    more.push(vector(0, Target::O, ScaledSide::Output));
    assert_says(ia3(&json!({}), &more), &["`model.layers.0.self_attn.o_proj`", "target_modules"]);
    more.last_mut().unwrap().0 = "base_model.model.model.embed_tokens.ia3_l".to_owned();
    assert_says(ia3(&json!({}), &more), &["embed_tokens.ia3_l`", "adapters cannot change"]);
    assert_says(ia3(&json!({"target_modules": ["query"]}), &Vec::new()), &["no tensor adapts"]);
    let mut turned = vectors();
    turned[1].2.reverse();
    assert_says(ia3(&json!({}), &turned), &["k_proj.ia3_l", "[1, 16]", "[16, 1]"]);
    let mut broken = vectors();
    broken[2].3[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    assert_says(ia3(&json!({}), &broken), &["layers.0.self_attn.v_proj.ia3_l", "element 2", "NaN"]);
}

#[test]
fn a_prefix_reads_as_keys_and_values_of_every_token_and_layer() {
    let adapter = prefix(&json!({}), &embeddings(3)).unwrap();
    assert_eq!((adapter.method.kind(), adapter.method.virtual_tokens()), (AdapterKind::Prefix, 3));
    assert_eq!((adapter.method.linear_layers(), adapter.method.least_bytes()), (4, 3 * 64 * 4));
    let MethodWeights::Prefix(read) = &adapter.method else { panic!("{:?}", adapter.method) };
    // Token 2, layer 1: keys of both heads, then values of both heads.
    assert_eq!(read.keys_and_values(2, 1), &numbers(3 * 64, 7)[2 * 64 + 32..]);
    for harmless in [
        json!({"prefix_projection": false, "encoder_hidden_size": null}),
        json!({"init_weights": "zero"}),
        json!({"token_dim": null}),
    ] {
        let same = prefix(&harmless, &embeddings(3)).unwrap();
        assert_eq!(same.generation, adapter.generation);
    }
}

#[test]
fn prefixes_that_do_not_fit_are_refused_by_name() {
    let says = |changes: Value, parts: &[&str]| assert_says(prefix(&changes, &embeddings(3)), parts);
    for count in [json!(null), json!(0), json!(limits::MAX_VIRTUAL_TOKENS + 1), json!(u64::MAX)] {
        says(json!({"num_virtual_tokens": count}), &["`num_virtual_tokens`", "1 to 1024"]);
    }
    says(json!({"num_virtual_tokens": -1}), &["`num_virtual_tokens`", "count"]);
    says(json!({"num_virtual_tokens": 4}), &["prompt_embeddings", "[3, 64]", "[4, 64]"]);
    says(json!({"num_layers": 3}), &["`num_layers`", "is 3 instead of 2"]);
    says(json!({"num_attention_heads": 4}), &["`num_attention_heads`", "is 4 instead of 2"]);
    says(json!({"token_dim": 32}), &["`token_dim`", "is 32 instead of 16"]);
    says(json!({"num_transformer_submodules": 2}), &["`num_transformer_submodules`"]);
    says(json!({"modules_to_save": ["norm"]}), &["`modules_to_save`"]);
    says(json!({"task_type": "SEQ_2_SEQ_LM"}), &["`task_type`"]);
    says(json!({"an_option_of_tomorrow": 1}), &["`an_option_of_tomorrow`"]);
    assert_says(prefix(&json!({}), &Vec::new()), &["`prompt_embeddings` is missing"]);
    let mut more = embeddings(3);
    more.push(("prompt_encoder.embedding.weight".to_owned(), "F32", vec![1], f32_bytes(&[0.0])));
    assert_says(prefix(&json!({}), &more), &["prompt_encoder.embedding.weight"]);
    let mut infinite = embeddings(3);
    infinite[0].3[40..44].copy_from_slice(&f32::INFINITY.to_le_bytes());
    assert_says(prefix(&json!({}), &infinite), &["prompt_embeddings", "element 10", "inf"]);
    let deeper = ModelConfig { layers: 3, ..tiny() };
    let bare = json!({"num_layers": null, "num_attention_heads": null, "token_dim": null});
    assert_says(
        read_for(&deeper, &with(prefix_config(), &bare), &embeddings(3)),
        &["prompt_embeddings", "[3, 64]", "[3, 96]"],
    );
}

#[test]
fn a_generation_tells_methods_and_contents_apart() {
    let mut seen = Vec::new();
    let mut add = |adapter: Result<Adapter, AdapterError>| {
        let generation = adapter.unwrap().generation;
        assert!(!seen.contains(&generation));
        seen.push(generation);
    };
    add(ia3(&json!({}), &vectors()));
    add(prefix(&json!({}), &embeddings(3)));
    add(prefix(&json!({"num_virtual_tokens": 2}), &embeddings(2)));
    let mut changed = vectors();
    *changed[5].3.last_mut().unwrap() ^= 1;
    add(ia3(&json!({}), &changed));
    let half = |count: usize| {
        vec![("prompt_embeddings".to_owned(), "F16", vec![3, 64], f16_bytes(&numbers(count, 7)))]
    };
    add(prefix(&json!({}), &half(3 * 64)));
    // As many values on the other side of the same layer.
    for side in [ScaledSide::Input, ScaledSide::Output] {
        let names = if side == ScaledSide::Input { json!(["o_proj"]) } else { json!([]) };
        let entries = vec![vector(0, Target::O, side), vector(1, Target::O, side)];
        add(ia3(&json!({"target_modules": ["o_proj"], "feedforward_modules": names}), &entries));
    }
    assert_eq!(
        ia3(&json!({"target_modules": r".*(k|v|down)_proj"}), &vectors()).unwrap().generation,
        seen[0]
    );
}

/// PEFT's configuration for a VeRA of rank 3.
fn vera_config() -> Value {
    json!({
        "auto_mapping": null, "base_model_name_or_path": "org/tiny", "bias": "none", "d_initial": 0.1, "fan_in_fan_out": false,
        "inference_mode": true, "init_weights": true, "layers_pattern": null, "layers_to_transform": [1],
        "modules_to_save": null, "peft_type": "VERA", "peft_version": "0.21.2", "projection_prng_key": 0, "r": 3,
        "revision": null, "save_projection": true, "target_modules": ["down_proj", "v_proj"], "task_type": "CAUSAL_LM",
        "vera_dropout": 0.0,
    })
}

/// Matrices as wide as the widest layer, and two vectors for each layer.
fn vera_entries() -> MethodTensors {
    let of = |name: &str, shape: Vec<usize>, seed: usize| {
        (name.to_owned(), "F32", shape.clone(), f32_bytes(&numbers(shape.iter().product(), seed)))
    };
    let mut entries = vec![of("base_model.vera_A", vec![3, 64], 1), of("base_model.vera_B", vec![32, 3], 2)];
    for target in [Target::V, Target::Down] {
        let [rows, _] = linear_shape(&tiny(), target);
        let name = |part: &str| format!("base_model.model.{}.vera_lambda_{part}", hf_name(1, target));
        entries.push(of(&name("d"), vec![3], 3 + target.index_in_block().unwrap_or(7)));
        entries.push(of(&name("b"), vec![rows], 20 + target.index_in_block().unwrap_or(7)));
    }
    entries
}

#[test]
fn a_vera_is_the_lora_of_its_scaled_factors() {
    let adapter = read(&vera_config(), &vera_entries()).unwrap();
    assert_eq!((adapter.method.kind(), adapter.modules().len()), (AdapterKind::Lora, 2));
    let (shared_a, shared_b) = (numbers(3 * 64, 1), numbers(32 * 3, 2));
    for (module, target) in adapter.modules().iter().zip([Target::V, Target::Down]) {
        let [rows, cols] = linear_shape(&tiny(), target);
        assert_eq!((module.layer, module.target, module.rank, module.scale), (1, target, 3, 1.0));
        let (d, b) = (
            numbers(3, 3 + target.index_in_block().unwrap_or(7)),
            numbers(rows, 20 + target.index_in_block().unwrap_or(7)),
        );
        let expected = |row: usize, col: usize| d[row] * shared_a[row * 64 + col];
        assert!((0..3 * cols).all(|at| module.a[at] == expected(at / cols, at % cols)), "{target:?}");
        assert!((0..rows * 3).all(|at| module.b[at] == b[at / 3] * shared_b[at]), "{target:?}");
    }
}

#[test]
fn a_vera_without_its_matrices_has_those_that_its_key_draws() {
    let vectors = &vera_entries().split_off(2);
    let drawn = |key: Value| {
        let changes = json!({"save_projection": false, "projection_prng_key": key});
        read(&with(vera_config(), &changes), vectors).unwrap()
    };
    let adapter = drawn(json!(0));
    let shapes = adapter.modules().iter().map(|module| (module.target, module.a.len(), module.b.len()));
    assert!(shapes.eq([Target::V, Target::Down].map(|target| {
        let [rows, cols] = linear_shape(&tiny(), target);
        (target, 3 * cols, rows * 3)
    })));
    assert_eq!(drawn(json!(1_u64 << 32)).generation, adapter.generation, "the lower half of a key counts");
    assert_ne!(drawn(json!(1)).generation, adapter.generation);
    let mut without_key = with(vera_config(), &json!({"save_projection": false}));
    without_key.as_object_mut().unwrap().remove("projection_prng_key");
    assert_eq!(read(&without_key, vectors).unwrap().generation, adapter.generation, "PEFT's default is 0");
}

#[test]
fn veras_that_cannot_be_drawn_are_refused_by_name() {
    let drawn = |changes: &Value| with(with(vera_config(), &json!({"save_projection": false})), changes);
    assert_says(read(&drawn(&json!({})), &vera_entries()), &["base_model.vera_A"]);
    let vectors = &vera_entries().split_off(2);
    for key in [json!("five"), json!(0.5), json!(1e30)] {
        let config = drawn(&json!({ "projection_prng_key": key }));
        assert_says(read(&config, vectors), &["projection_prng_key", "64 bits"]);
    }
    let wide = ModelConfig { intermediate_size: 1 << 20, ..tiny() };
    let refused = read_for(&wide, &drawn(&json!({ "r": limits::MAX_RANK })), vectors);
    assert!(matches!(refused, Err(AdapterError::TooLarge { .. })), "{refused:?}");
}

#[test]
fn veras_that_do_not_fit_are_refused_by_name() {
    let vera = |changes: Value, entries: &MethodTensors| read(&with(vera_config(), &changes), entries);
    for rank in [0, 2, 4, 5000] {
        assert!(vera(json!({ "r": rank }), &vera_entries()).is_err(), "{rank}");
    }
    assert_says(vera(json!({"bias": "vera_only"}), &vera_entries()), &["bias"]);
    assert_says(vera(json!({"modules_to_save": ["lm_head"]}), &vera_entries()), &["modules_to_save"]);
    for (missing, name) in ["base_model.vera_A", "base_model.vera_B"].iter().enumerate() {
        let mut entries = vera_entries();
        entries.remove(missing);
        assert_says(vera(json!({}), &entries), &[name, "missing"]);
    }
    let mut entries = vera_entries();
    entries[1] = (entries[1].0.clone(), "F32", vec![31, 3], f32_bytes(&numbers(93, 2)));
    assert_says(vera(json!({}), &entries), &["vera_B", "[32, 3]", "[31, 3]"]);
    let mut entries = vera_entries();
    entries[0] = (entries[0].0.clone(), "F32", vec![3, 63], f32_bytes(&numbers(189, 1)));
    assert_says(vera(json!({}), &entries), &["vera_A", "[3, 64]", "[3, 63]"]);
    assert_says(
        vera(json!({"target_modules": ["v_proj"]}), &vera_entries()),
        &["down_proj", "target_modules"],
    );
}
