//! Adapters are read exactly as PEFT defines them, and everything else is rejected by name.

use std::path::Path;

use crate::files_support::{
    GgufWriter, assert_says, bf16_bytes, f16_bytes, f32_bytes, gguf_name, hf_name, interleave, numbers,
    safetensors, tensor, tiny,
};
use model::{
    adapter::{Adapter, AdapterError, AnyAdapter, LoraModule, limits},
    shape::{
        config::ModelConfig,
        layout::{BLOCK_TARGETS, linear_shape},
        source::Target,
    },
};
use serde_json::{Value, json};
use tempfile::TempDir;

type Encoding = (&'static str, fn(&[f32]) -> Vec<u8>);
type AdapterTensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

/// PEFT's configuration for rank 4 on q and v, with the options that it always writes.
fn config() -> Value {
    json!({
        "alora_invocation_tokens": null, "alpha_pattern": {}, "auto_mapping": null,
        "base_model_name_or_path": "org/tiny", "bias": "none", "eva_config": null, "exclude_modules": null,
        "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "layer_replication": null,
        "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8,
        "lora_bias": false, "lora_dropout": 0.05, "megatron_config": null, "megatron_core": "megatron.core",
        "modules_to_save": null, "peft_type": "LORA", "peft_version": "0.17.0", "qalora_group_size": 16, "r": 4,
        "rank_pattern": {}, "revision": null, "target_modules": ["v_proj", "q_proj"], "target_parameters": null,
        "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_dora": false, "use_qalora": false,
        "use_rslora": false,
    })
}

fn config_with(changes: &Value) -> Value {
    let mut config = config();
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config
}

fn seed(layer: usize, target: Target) -> usize {
    layer * 20 + target.index_in_block().unwrap_or(7) * 2
}

fn matrices(layer: usize, target: Target, rank: usize) -> (Vec<f32>, Vec<f32>) {
    let [rows, cols] = linear_shape(&tiny(), target);
    (numbers(rank * cols, seed(layer, target)), numbers(rows * rank, seed(layer, target) + 1))
}

fn pair(layer: usize, target: Target, rank: usize) -> AdapterTensors {
    let name = if target == Target::LmHead { "lm_head".to_owned() } else { hf_name(layer, target) };
    let [rows, cols] = linear_shape(&tiny(), target);
    let (a, b) = matrices(layer, target, rank);
    let full = |part| format!("base_model.model.{name}.lora_{part}.weight");
    vec![
        (full("A"), "F32", vec![rank, cols], f32_bytes(&a)),
        (full("B"), "F32", vec![rows, rank], f32_bytes(&b)),
    ]
}

fn pairs(list: &[(usize, Target, usize)]) -> AdapterTensors {
    list.iter().flat_map(|&(layer, target, rank)| pair(layer, target, rank)).collect()
}

fn entries() -> AdapterTensors {
    pairs(&[(0, Target::Q, 4), (0, Target::V, 4), (1, Target::Q, 4), (1, Target::V, 4)])
}

fn write(config: &Value, entries: &AdapterTensors) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    directory
}

fn read(config: &Value, entries: &AdapterTensors) -> Result<Adapter, AdapterError> {
    Adapter::read(write(config, entries).path(), &tiny())
}

#[track_caller]
fn refused(changes: &Value, parts: &[&str]) {
    assert_says(read(&config_with(changes), &entries()), parts);
}

fn shape_of(adapter: &Adapter) -> Vec<(usize, Target, usize, f32)> {
    adapter.modules().iter().map(|m| (m.layer, m.target, m.rank, m.scale)).collect()
}

#[test]
fn an_adapter_reads_as_its_matrices_in_the_order_of_the_layers() {
    let mut shuffled = entries();
    shuffled.reverse();
    for entries in [entries(), shuffled] {
        let adapter = read(&config(), &entries).unwrap();
        let expected: Vec<LoraModule> = [(0, Target::Q), (0, Target::V), (1, Target::Q), (1, Target::V)]
            .into_iter()
            .map(|(layer, target)| {
                let (a, b) = matrices(layer, target, 4);
                LoraModule { layer, target, rank: 4, scale: 2.0, a, b }
            })
            .collect();
        assert_eq!(adapter.modules(), expected);
        assert_eq!(adapter.base_model.as_deref(), Some("org/tiny"));
        assert!(!adapter.stored_in_16_bits);
    }
}

#[test]
fn names_without_the_prefix_of_peft_mean_the_same() {
    let mut bare = entries();
    for entry in &mut bare {
        entry.0 = entry.0.strip_prefix("base_model.model.").unwrap().to_owned();
    }
    assert_eq!(read(&config(), &bare).unwrap(), read(&config(), &entries()).unwrap());
    let twice = [entries(), bare].concat();
    assert_says(
        read(&config(), &twice),
        &["hold the same weights", "`base_model.model.model.layers.0.self_attn.q_proj"],
    );
}

#[test]
fn every_target_is_adapted_at_its_own_shape() {
    let mut list: Vec<_> = (0..2).flat_map(|layer| BLOCK_TARGETS.map(|target| (layer, target, 3))).collect();
    let config = |targets: Value| config_with(&json!({"r": 3, "target_modules": targets}));
    let all = read(&config(json!("all-linear")), &pairs(&list)).unwrap();
    assert_eq!(all.modules().len(), 14);
    let attention = list.iter().copied().filter(|(_, target, _)| *target < Target::Gate).collect::<Vec<_>>();
    let some = read(&config(json!("all-linear")), &pairs(&attention)).unwrap();
    assert_eq!(some.modules().len(), 8, "all that the file has factors of");
    assert_says(read(&config(json!("all-linear")), &pairs(&list[1..])), &["layers.0", "missing"]);
    list.push((0, Target::LmHead, 3));
    let names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"];
    let with_head = read(&config(json!(names)), &pairs(&list)).unwrap();
    let head = with_head.modules().iter().find(|module| module.target == Target::LmHead).unwrap();
    assert_eq!((head.layer, head.a.len(), head.b.len()), (0, 3 * 32, 10 * 3));
    assert_eq!(read(&config(json!("all-linear")), &pairs(&list)).unwrap(), with_head);
}

#[test]
fn sixteen_bit_matrices_are_exact_and_known_as_such() {
    let stored = |first: Encoding, second: Encoding| {
        let mut entries = pairs(&[(0, Target::Q, 4), (1, Target::Q, 4)]);
        for (index, entry) in entries.iter_mut().enumerate() {
            let values: Vec<f32> =
                entry.3.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
            let (dtype, encode) = if index % 2 == 0 { first } else { second };
            (entry.1, entry.3) = (dtype, encode(&values));
        }
        read(&config_with(&json!({"target_modules": ["q_proj"]})), &entries).unwrap()
    };
    let single: Encoding = ("F32", f32_bytes);
    let half: Encoding = ("F16", f16_bytes);
    let brain: Encoding = ("BF16", bf16_bytes);
    let exact = stored(single, single);
    for (first, second, in_16_bits) in [(half, half, true), (brain, half, true), (half, single, false)] {
        let adapter = stored(first, second);
        assert_eq!(adapter.method, exact.method);
        assert_eq!(adapter.stored_in_16_bits, in_16_bits);
        assert_ne!(adapter.generation, exact.generation, "the stored type is part of the content");
    }
}

#[test]
fn ranks_and_alphas_follow_their_patterns() {
    let entries = pairs(&[(0, Target::Q, 2), (0, Target::V, 4), (1, Target::Q, 16), (1, Target::V, 4)]);
    let changes = json!({
        "rank_pattern": {"layers.1.self_attn.q_proj": 16, "q_proj": 2},
        "alpha_pattern": {r"layers\.\d+\.self_attn\.v_proj": 3.5, "^model.layers.1.self_attn.q_proj": 32},
        "lora_alpha": 6,
    });
    let plain = read(&config_with(&changes), &entries).unwrap();
    // `^` follows an optional prefix, so it still matches a whole name.
    let expected =
        [(0, Target::Q, 2, 3.0), (0, Target::V, 4, 0.875), (1, Target::Q, 16, 2.0), (1, Target::V, 4, 0.875)];
    assert_eq!(shape_of(&plain), expected);

    let mut rooted = config_with(&changes);
    rooted["use_rslora"] = json!(true);
    let scales: Vec<f32> =
        read(&rooted, &entries).unwrap().modules().iter().map(|module| module.scale).collect();
    assert_eq!(scales, [(6.0 / 2f64.sqrt()) as f32, 1.75, 8.0, 1.75]);

    assert_says(read(&config(), &entries), &["layers.0.self_attn.q_proj.lora_A", "[4, 32]", "[2, 32]"]);
    refused(&json!({"rank_pattern": {"(": 4}}), &["rank_pattern", "cannot be compiled"]);
    refused(&json!({"rank_pattern": {"q_proj": "4"}}), &["rank_pattern", "q_proj"]);
    refused(&json!({"alpha_pattern": ["q_proj"]}), &["alpha_pattern", "map"]);
}

#[test]
fn layers_are_selected_by_index_and_pattern() {
    let first = pairs(&[(0, Target::Q, 4), (0, Target::V, 4)]);
    let with = |changes: Value| read(&config_with(&changes), &first);
    for layers in [json!(0), json!([0]), json!([0, 7])] {
        let adapter = with(json!({"layers_to_transform": layers})).unwrap();
        assert_eq!(adapter.modules().len(), 2);
    }
    assert!(with(json!({"layers_to_transform": [0], "layers_pattern": "layers"})).is_ok());
    assert!(with(json!({"layers_to_transform": [0], "layers_pattern": ["h", "layers"]})).is_ok());
    assert!(with(json!({"target_modules": r".*layers\.0\..*\.(q|v)_proj"})).is_ok());
    assert!(
        with(json!({"exclude_modules": ["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"]})).is_ok()
    );
    assert!(with(json!({"exclude_modules": r".*\.1\..*"})).is_ok());

    let missing = "model.layers.1.self_attn.q_proj.lora_A.weight` is missing";
    assert_says(with(json!({})), &[missing]);
    assert_says(with(json!({"layers_to_transform": []})), &[missing]);
    assert_says(with(json!({"layers_to_transform": [1]})), &["layers.0.self_attn.q_proj`", "target_modules"]);
    assert_says(with(json!({"layers_to_transform": [0], "layers_pattern": "h"})), &["target_modules"]);
    assert_says(
        with(json!({"layers_pattern": "layers"})),
        &["layers_pattern", "without layers_to_transform"],
    );
    let expression = json!({"layers_to_transform": [0], "target_modules": ".*q_proj"});
    assert_says(with(expression), &["layers_to_transform", "target_modules"]);
}

#[test]
fn options_that_are_not_supported_are_refused_by_name() {
    for (option, value) in [
        ("bias", json!("all")),
        ("bias", json!("lora_only")),
        ("fan_in_fan_out", json!(true)),
        ("layer_replication", json!([[0, 1]])),
        ("use_qalora", json!(true)),
        ("use_bdlora", json!({"nblocks": 2})),
        ("megatron_config", json!({"hidden_size": 1})),
        ("arrow_config", json!({"top_k": 3})),
        ("ensure_weight_tying", json!(true)),
        ("peft_type", json!("TYPE_OF_TOMORROW")),
        ("task_type", json!("TOKEN_CLS")),
        ("task_type", json!("SEQ_2_SEQ_LM")),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("olora")),
        ("init_lora_weights", json!("loftq")),
        ("an_option_of_tomorrow", json!(1)),
    ] {
        let text = value.as_str().map_or_else(|| value.to_string(), |text| format!("{text:?}"));
        let shown = &text[..text.len().min(60)];
        refused(&json!({option: value}), &[&format!("`{option}`"), shown, "adapter_config.json"]);
    }
    let parameter = "mlp.experts.gate_up_proj";
    refused(
        &json!({"target_parameters": [parameter]}),
        &["`target_parameters`", parameter, "this base's experts"],
    );
    for harmless in [json!(false), json!("gaussian"), json!("eva"), json!("orthogonal"), json!(null)] {
        assert!(read(&config_with(&json!({"init_lora_weights": harmless})), &entries()).is_ok());
    }
    assert!(read(&config_with(&json!({"an_option_of_tomorrow": false})), &entries()).is_ok());
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    refused(&json!({"peft_type": null}), &["`peft_type` is missing"]);
    refused(&json!({"target_modules": null}), &["`target_modules` is missing"]);
    refused(&json!({"target_modules": [1]}), &["`target_modules`"]);
    refused(&json!({"target_modules": "("}), &["`target_modules`", "cannot be compiled"]);
    refused(&json!({"target_modules": "a)|(.*q_proj"}), &["`target_modules`", "cannot be compiled"]);
    refused(
        &json!({"target_modules": r"(?=(.*.*.*.*.*.*.*.*)*z)\1"}),
        &["`target_modules`", "takes too long"],
    );
    refused(&json!({"r": "4"}), &["`r`", "count"]);
    refused(&json!({"r": 4.5}), &["`r`", "count"]);
    refused(&json!({"r": 1e300}), &["`r`", "count"]);
    refused(&json!({"r": -4}), &["`r`", "count"]);
    refused(&json!({"r": 0}), &["self_attn.q_proj", "rank 0"]);
    refused(&json!({"r": limits::MAX_RANK + 1}), &["rank 1025", "1024"]);
    refused(&json!({"lora_alpha": "8"}), &["`lora_alpha`", "number"]);
    refused(&json!({"lora_alpha": 1e300}), &["`lora_alpha`", "too large"]);
    refused(&json!({"use_rslora": 1}), &["`use_rslora`"]);
    let many: serde_json::Map<_, _> = (0..=limits::MAX_PATTERNS).map(|i| (i.to_string(), json!(4))).collect();
    refused(&json!({"rank_pattern": many}), &["`rank_pattern`", "1025 entries"]);
    let names: Vec<_> = (0..=limits::MAX_PATTERNS).map(|i| i.to_string()).collect();
    refused(&json!({"target_modules": names}), &["`target_modules`", "1025 entries"]);
}

#[test]
fn tensors_that_adapt_nothing_are_refused_by_name() {
    for name in [
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.embed_tokens.lora_magnitude_vector",
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
    ] {
        let mut entries = entries();
        entries.push((name.to_owned(), "F32", vec![1], f32_bytes(&[0.0])));
        assert_says(read(&config(), &entries), &[name, "adapter_model.safetensors"]);
    }
}

#[test]
fn half_an_adapted_layer_is_refused() {
    for index in 0..2 {
        let mut entries = entries();
        let (name, ..) = entries.remove(index);
        let bare = name.strip_prefix("base_model.model.").unwrap();
        assert_says(read(&config(), &entries), &[bare, "missing"]);
    }
}

#[test]
fn an_adapter_that_adapts_nothing_is_refused() {
    assert_says(
        read(&config_with(&json!({"target_modules": ["query"]})), &Vec::new()),
        &["no tensor adapts"],
    );
}

#[test]
fn matrices_of_another_base_model_are_refused_with_both_shapes() {
    let directory = write(&config(), &entries());
    let wider = ModelConfig { hidden_size: 64, ..tiny() };
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    assert_says(Adapter::read(directory.path(), &wider), &[name, "[4, 64]", "[4, 32]"]);
    let taller = ModelConfig { heads: 8, ..tiny() };
    assert_says(Adapter::read(directory.path(), &taller), &["q_proj.lora_B", "[64, 4]", "[32, 4]"]);
    let shallower = ModelConfig { layers: 1, ..tiny() };
    assert_says(Adapter::read(directory.path(), &shallower), &["layers.1.self_attn.q_proj"]);
    let mut flat = entries();
    flat[0].2 = vec![128];
    assert_says(read(&config(), &flat), &["q_proj.lora_A", "[128]"]);
}

#[test]
fn numbers_that_are_none_are_refused_by_name() {
    let encoders: [Encoding; 3] = [("F32", f32_bytes), ("F16", f16_bytes), ("BF16", bf16_bytes)];
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (dtype, encode) in encoders {
            let mut entries = entries();
            let (_, mut b) = matrices(1, Target::V, 4);
            b[17] = value;
            let last = entries.last_mut().unwrap();
            (last.1, last.3) = (dtype, encode(&b));
            let name = last.0.clone();
            assert_says(read(&config(), &entries), &[&name, "element 17", &value.to_string()]);
        }
    }
}

#[test]
fn equal_content_is_an_equal_generation_however_it_is_spelled() {
    let base = read(&config(), &entries()).unwrap().generation;
    let same = |changes: Value| read(&config_with(&changes), &entries()).unwrap().generation;
    assert_eq!(same(json!({"target_modules": ["self_attn.q_proj", "v_proj"]})), base);
    assert_eq!(same(json!({"target_modules": r".*\.[qv]_proj"})), base);
    assert_eq!(same(json!({"r": 8, "rank_pattern": {".*": 4}, "lora_dropout": 0.5})), base);
    assert_eq!(same(json!({"lora_alpha": 4, "use_rslora": true})), base);
    assert_eq!(same(json!({"base_model_name_or_path": "elsewhere"})), base);
}

#[test]
fn any_other_content_is_another_generation() {
    let mut seen = vec![read(&config(), &entries()).unwrap().generation];
    let mut add = |adapter: Result<Adapter, AdapterError>| {
        let generation = adapter.unwrap().generation;
        assert!(!seen.contains(&generation));
        seen.push(generation);
    };
    add(read(&config_with(&json!({"lora_alpha": 9})), &entries()));
    add(read(&config_with(&json!({"alpha_pattern": {"v_proj": 9}})), &entries()));
    let mut changed = entries();
    *changed[3].3.last_mut().unwrap() ^= 1;
    add(read(&config(), &changed));
    let on = |target, name| {
        let list = [(0, target, 4), (1, target, 4)];
        read(&config_with(&json!({"target_modules": [name]})), &pairs(&list))
    };
    add(on(Target::Q, "q_proj"));
    add(on(Target::V, "v_proj"));
    // The bytes of up under the names of gate: equal shapes, another target.
    let renamed = |name: &str| {
        let mut entries = pairs(&[(0, Target::Up, 4), (1, Target::Up, 4)]);
        entries.iter_mut().for_each(|entry| entry.0 = entry.0.replace("up_proj", name));
        read(&config_with(&json!({"target_modules": [name]})), &entries)
    };
    add(renamed("up_proj"));
    add(renamed("gate_proj"));
}

#[test]
fn a_generation_is_the_hash_of_the_documented_encoding() {
    let adapter = read(&config(), &entries()).unwrap();
    let mut encoding = 4u64.to_le_bytes().to_vec();
    for (layer, target, code) in
        [(0u64, Target::Q, 0u8), (0, Target::V, 2), (1, Target::Q, 0), (1, Target::V, 2)]
    {
        encoding.extend(layer.to_le_bytes());
        encoding.push(code);
        encoding.extend(4u64.to_le_bytes());
        encoding.extend(2f32.to_bits().to_le_bytes());
        let (a, b) = matrices(layer as usize, target, 4);
        for matrix in [f32_bytes(&a), f32_bytes(&b)] {
            encoding.push(0);
            encoding.extend((matrix.len() as u64).to_le_bytes());
            encoding.extend(matrix);
        }
    }
    let hash = blake3::derive_key("holobiont 2025 adapter generation v1", &encoding);
    assert_eq!(adapter.generation.0, hash);
    // Caches and registries rely on this value: change the encoding only together with its name.
    assert_eq!(format!("{:.16}", adapter.generation), "38ae56dc7e90be55");
}

#[test]
fn what_is_no_adapter_is_refused_with_what_to_do() {
    let directory = write(&config(), &entries());
    let path = |name: &str| directory.path().join(name);
    assert_says(Adapter::read(&path("missing"), &tiny()), &["missing", "cannot read"]);
    assert_says(Adapter::read(&path("adapter_model.safetensors"), &tiny()), &["not an adapter", "directory"]);
    std::fs::remove_file(path("adapter_model.safetensors")).unwrap();
    assert_says(Adapter::read(directory.path(), &tiny()), &["adapter_model.safetensors", "cannot read"]);
    std::fs::write(path("adapter_model.bin"), "pickle").unwrap();
    assert_says(Adapter::read(directory.path(), &tiny()), &["adapter_model.bin", "pickle", "safetensors"]);
    assert_says(Adapter::read(&path("adapter_model.bin"), &tiny()), &["pickle"]);
    std::fs::remove_file(path("adapter_config.json")).unwrap();
    assert_says(Adapter::read(directory.path(), &tiny()), &["not an adapter"]);
}

#[test]
fn broken_files_are_refused() {
    let directory = write(&config(), &entries());
    let (config_path, weight_path) =
        (directory.path().join("adapter_config.json"), directory.path().join("adapter_model.safetensors"));
    let whole = std::fs::read(&weight_path).unwrap();
    let weights = |bytes: &[u8]| {
        std::fs::write(&weight_path, bytes).unwrap();
        Adapter::read(directory.path(), &tiny())
    };
    for length in [0, 7, 8, 100, whole.len() - 1] {
        assert_says(weights(&whole[..length]), &["adapter_model.safetensors", "not a usable"]);
    }
    let header = [&(limits::MAX_HEADER_BYTES + 1).to_le_bytes(), &whole[8..]].concat();
    assert_says(weights(&header), &["header", "limit"]);
    assert!(weights(&whole).is_ok());
    for text in ["", "{", "[]", "null", &"[".repeat(100_000)] {
        std::fs::write(&config_path, text).unwrap();
        assert_says(Adapter::read(directory.path(), &tiny()), &["adapter_config.json", "not a usable"]);
    }
    std::fs::write(&config_path, vec![b' '; limits::MAX_CONFIG_BYTES as usize + 1]).unwrap();
    assert_says(Adapter::read(directory.path(), &tiny()), &["adapter_config.json", "limit"]);
    std::fs::remove_file(&config_path).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &config_path).unwrap();
    assert_says(Adapter::read(directory.path(), &tiny()), &["not a regular file"]);
}

/// A draft adapter of one layer of two: q and the head.
fn draft_entries(ids: Option<&[i64]>) -> AdapterTensors {
    let ids = ids.map(|ids| {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        ("draft.shortlist".to_owned(), "I64", vec![ids.len()], bytes)
    });
    pairs(&[(0, Target::Q, 4), (0, Target::LmHead, 4)]).into_iter().chain(ids).collect()
}

fn draft_config(draft: &Value) -> Value {
    config_with(&json!({ "target_modules": ["q_proj", "lm_head"], "holobiont_draft": draft }))
}

fn read_any(config: &Value, entries: &AdapterTensors) -> Result<AnyAdapter, AdapterError> {
    AnyAdapter::read(write(config, entries).path(), &tiny())
}

#[test]
fn a_draft_says_what_it_computes_and_is_none_for_whoever_wants_answers() {
    let config = draft_config(&json!({ "layers": 1 }));
    let generations = [None, Some(&[0, 2, 5][..]), Some(&[0, 2, 6])].map(|ids| {
        let AnyAdapter::Drafts(draft) = read_any(&config, &draft_entries(ids)).unwrap() else {
            panic!("a draft")
        };
        let ids: Option<Vec<u32>> = ids.map(|ids| ids.iter().map(|&id| id as u32).collect());
        assert_eq!((draft.shape.layers, draft.shape.shortlist.as_deref()), (1, ids.as_deref()));
        assert_eq!(shape_of(&draft.adapter).iter().map(|module| module.1).collect::<Vec<_>>().len(), 2);
        let (_, b) = matrices(0, Target::LmHead, 4);
        let cut = draft.shortlisted();
        let head = cut.modules().iter().find(|module| module.target == Target::LmHead).unwrap();
        let rows = ids.unwrap_or_else(|| (0..tiny().vocab_size as u32).collect());
        let wanted: Vec<f32> = rows.iter().flat_map(|&id| b[id as usize * 4..][..4].to_vec()).collect();
        assert_eq!(head.b, wanted);
        assert_eq!(draft.shape.config(&tiny()).vocab_size, rows.len());
        draft.adapter.generation
    });
    let plain = read(
        &config_with(&json!({ "target_modules": ["q_proj", "lm_head"], "layers_to_transform": null })),
        &pairs(&[(0, Target::Q, 4), (1, Target::Q, 4), (0, Target::LmHead, 4)]),
    );
    let more = read_any(
        &draft_config(&json!({ "layers": 2 })),
        &pairs(&[(0, Target::Q, 4), (1, Target::Q, 4), (0, Target::LmHead, 4)]),
    );
    let mut all: Vec<_> = generations
        .into_iter()
        .chain([plain.unwrap().generation, more.unwrap().adapter().generation])
        .collect();
    all.sort_unstable_by_key(|generation| generation.0);
    all.dedup();
    assert_eq!(all.len(), 5, "layers and shortlist are part of what it is");
    let refused = read(&config, &draft_entries(None));
    assert_says(refused, &["is a draft adapter and answers no requests"]);
}

#[test]
fn a_draft_that_cannot_be_meant_is_refused_by_name() {
    let of = |draft: Value, entries: &AdapterTensors| read_any(&draft_config(&draft), entries);
    for layers in [0, 3] {
        let refused = of(json!({ "layers": layers }), &draft_entries(None));
        assert_says(refused, &[&format!("a draft of {layers} layers cannot be"), "the base has 2"]);
    }
    for draft in [json!({}), json!({ "layers": 1, "more": 1 }), json!({ "layers": "1" }), json!(1)] {
        assert_says(of(draft, &draft_entries(None)), &["holobiont_draft", "a count called `layers`"]);
    }
    let beyond = pairs(&[(0, Target::Q, 4), (1, Target::Q, 4), (0, Target::LmHead, 4)]);
    assert_says(
        of(json!({ "layers": 1 }), &beyond),
        &["layers.1.self_attn.q_proj", "only the first 1 layers"],
    );
    let vocab = tiny().vocab_size as i64;
    for (ids, index) in [(&[][..], 0), (&[3, 3], 1), (&[3, 2], 1), (&[-1], 0), (&[0, vocab], 1)] {
        let refused = of(json!({ "layers": 1 }), &draft_entries(Some(ids)));
        assert_says(refused, &[&format!("entry {index} of `draft.shortlist`"), "ids must ascend"]);
    }
    let answers = config_with(&json!({ "target_modules": ["q_proj", "lm_head"] }));
    let more = pairs(&[(1, Target::Q, 4)]).into_iter().chain(draft_entries(Some(&[1]))).collect();
    assert_says(read_any(&answers, &more), &["draft.shortlist", "adapters cannot change"]);
    let ia3 = json!({ "peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": [], "holobiont_draft": { "layers": 1 } });
    assert_says(read_any(&ia3, &Vec::new()), &["holobiont_draft", "not supported"]);
}

/// An equal adapter as a GGUF file for llama.cpp.
fn gguf() -> GgufWriter {
    let mut writer = GgufWriter::default()
        .text("general.type", "adapter")
        .text("adapter.type", "lora")
        .text("general.architecture", "llama")
        .f32("adapter.lora.alpha", 8.0);
    for layer in 0..2 {
        for target in [Target::Q, Target::V] {
            let name = gguf_name(layer, target);
            let [rows, cols] = linear_shape(&tiny(), target);
            let (a, b) = matrices(layer, target, 4);
            let b = if target == Target::Q { interleave(&b, 4, 8) } else { b };
            writer = writer.f32_tensor(&format!("{name}.weight.lora_a"), [4, cols], &a).f32_tensor(
                &format!("{name}.weight.lora_b"),
                [rows, 4],
                &b,
            );
        }
    }
    writer
}

fn read_gguf(writer: &GgufWriter) -> Result<Adapter, AdapterError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("adapter.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    let from_file = Adapter::read(&path, &tiny());
    let from_directory = Adapter::read(directory.path(), &tiny());
    assert_eq!(from_file.is_ok(), from_directory.is_ok());
    from_file
}

#[test]
fn a_gguf_adapter_is_the_same_adapter_and_the_same_generation() {
    let (from_gguf, from_peft) = (read_gguf(&gguf()).unwrap(), read(&config(), &entries()).unwrap());
    assert_eq!(from_gguf.method, from_peft.method);
    assert_eq!(from_gguf.generation, from_peft.generation);
    let mistral = ModelConfig { architecture: "mistral".to_owned(), ..tiny() };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("adapter.gguf");
    std::fs::write(&path, gguf().bytes()).unwrap();
    assert_eq!(Adapter::read(&path, &mistral).unwrap(), from_gguf);
    assert!(Adapter::read(Path::new("adapter.gguf"), &tiny()).is_err());
}

#[test]
fn an_activated_adapter_is_the_same_from_either_file_and_another_than_one_that_always_applies() {
    let activated =
        gguf().array("adapter.alora.invocation_tokens", 4, 2, [7u32, 9].map(u32::to_le_bytes).concat());
    let from_gguf = read_gguf(&activated).unwrap();
    let from_peft = read(&config_with(&json!({"alora_invocation_tokens": [7, 9]})), &entries()).unwrap();
    assert_eq!(from_gguf.method, from_peft.method);
    assert_eq!(from_gguf.generation, from_peft.generation);
    assert_eq!(from_gguf.method.invocation().unwrap().tokens(), [7, 9]);
    let always = read(&config(), &entries()).unwrap();
    assert_eq!(from_peft.modules(), always.modules());
    assert_ne!(from_peft.generation, always.generation);
}

#[test]
fn an_invocation_that_is_none_is_refused_by_name() {
    for bad in [json!([]), json!([100_000_000]), json!([-1]), json!("now"), json!(vec![1; 65])] {
        refused(
            &json!({"alora_invocation_tokens": bad}),
            &["`alora_invocation_tokens`", "adapter_config.json"],
        );
    }
}

#[test]
fn a_gguf_adapter_without_alpha_is_taken_as_trained() {
    let adapter = read_gguf(&gguf().without("adapter.lora.alpha")).unwrap();
    assert!(adapter.modules().iter().all(|module| module.scale == 1.0));
}

#[test]
fn gguf_adapters_that_do_not_fit_are_refused_by_name() {
    let refused = |writer: &GgufWriter, parts: &[&str]| assert_says(read_gguf(writer), parts);
    let set = |key: &str, value: &str| gguf().without(key).text(key, value);
    refused(&set("general.type", "model"), &["`general.type`", "\"model\""]);
    refused(&set("adapter.type", "control_vector"), &["`adapter.type`", "control_vector"]);
    refused(&set("general.architecture", "qwen2"), &["`general.architecture`", "qwen2"]);
    refused(&gguf().without("adapter.type"), &["`adapter.type`"]);
    let activated = gguf().array("adapter.alora.invocation_tokens", 4, 1, u32::MAX.to_le_bytes());
    refused(&activated, &["adapter.alora.invocation_tokens"]);
    refused(&gguf().without("adapter.lora.alpha").f32("adapter.lora.alpha", f32::NAN), &["alpha", "NaN"]);
    refused(
        &gguf().without_tensor("blk.1.attn_v.weight.lora_b"),
        &["`blk.1.attn_v.weight.lora_b` is missing"],
    );
    refused(
        &gguf().f32_tensor("token_embd.weight.lora_a", [1, 4], &[0.0; 4]),
        &["`token_embd.weight.lora_a`"],
    );
    let turned = gguf().bend("blk.0.attn_q.weight.lora_b", |t| t.dims.reverse());
    refused(&turned, &["`blk.0.attn_q.weight.lora_b`", "[32, 4]", "[4, 32]"]);
    let quantized = gguf().bend("blk.0.attn_q.weight.lora_a", |t| {
        t.kind = tensor::Q8_0;
        t.data = vec![0; 4 * 34];
    });
    refused(&quantized, &["`blk.0.attn_q.weight.lora_a`", "Q8_0"]);
    let infinite = gguf().bend("blk.0.attn_q.weight.lora_a", |t| t.data[..4].fill(0xff));
    refused(&infinite, &["`blk.0.attn_q.weight.lora_a`", "NaN"]);
    refused(&GgufWriter { version: 9, ..gguf() }, &["version 9"]);
    let empty = GgufWriter { tensors: Vec::new(), ..gguf() };
    refused(&empty, &["no tensor adapts"]);
}
