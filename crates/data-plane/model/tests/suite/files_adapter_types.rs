//! Every type of PEFT is served, converted to a LoRA, or refused by name; conversions are bounded.

use std::path::Path;

use model::{
    adapter::{
        Adapter, AdapterError, AdapterKind, AdapterWarning, AnyAdapter, MethodWeights,
        by_name::{MergeError, NamedLora},
        combination::{Combination, CombinationMethod, MajoritySign},
        peft_types::{PEFT_TYPES, PeftTreatment},
    },
    shape::config::ModelConfig,
    sources::open::open,
};
use serde::Deserialize;
use serde_json::{Value, json};
use testkit::paths::golden;

use crate::{
    files_support::{assert_says, f32_bytes, numbers, safetensors, tiny},
    golden_support::read,
};

type StoredTensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

#[derive(Deserialize)]
struct PeftTypes {
    types: Vec<PeftTypeRow>,
}

#[derive(Deserialize)]
struct PeftTypeRow {
    #[serde(rename = "type")]
    name: String,
    /// Served adapters, as model and name.
    served: Vec<String>,
    /// Options of a refused type.
    options: Option<Value>,
}

fn try_read(
    config: &Value,
    entries: &StoredTensors,
    model: &ModelConfig,
) -> Result<AnyAdapter, AdapterError> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    let adapter = AnyAdapter::read(directory.path(), model);
    assert_eq!(AnyAdapter::problems(directory.path(), model).is_empty(), adapter.is_ok());
    adapter
}

fn path_of(served: &str) -> (ModelConfig, std::path::PathBuf) {
    let (model, name) = served.split_once('/').unwrap();
    let folder = golden("adapters");
    let home = [folder.join("peft").join(model).join(name), folder.join(model).join(name)];
    let path = home.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("{served} is missing"));
    (open(&golden("models").join(model)).unwrap().config().clone(), path)
}

#[test]
fn every_type_of_peft_is_served_or_refused_by_its_name_with_a_remedy() {
    let PeftTypes { types } = read(&golden("peft.json"));
    let known: Vec<&str> = PEFT_TYPES.iter().map(|known| known.name).collect();
    let mut of_peft: Vec<&str> = types.iter().map(|row| row.name.as_str()).collect();
    of_peft.sort_unstable();
    assert!(known.is_sorted());
    assert_eq!(known, of_peft);
    for (row, known) in
        types.iter().map(|row| (row, PEFT_TYPES.iter().find(|it| it.name == row.name).unwrap()))
    {
        assert_eq!(row.served.is_empty(), known.treatment == PeftTreatment::Refused, "{}", row.name);
        for served in &row.served {
            let (config, path) = path_of(served);
            let adapter =
                AnyAdapter::read(&path, &config).unwrap_or_else(|error| panic!("{served}: {error}"));
            let is_lora = adapter.kind() == AdapterKind::Lora && adapter.modules() > 0;
            assert!(is_lora || known.treatment != PeftTreatment::Converted, "{served}: {:?}", adapter.kind());
        }
        if let Some(options) = &row.options {
            let name =
                format!("base_model.model.model.layers.0.self_attn.q_proj.{}", row.name.to_lowercase());
            let tensor = vec![(name, "F32", vec![1], f32_bytes(&[1.0]))];
            let error = try_read(options, &tensor, &tiny()).unwrap_err().to_string();
            assert!(error.contains(&row.name) && error.contains(known.about), "{error}");
            assert!(["merge", "train"].iter().any(|remedy| known.about.contains(remedy)), "{}", row.name);
        }
    }
}

#[test]
fn the_reference_lists_every_type_of_peft() {
    let path = golden("../../docs/reference/adapter-types.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let row = |it: &model::adapter::peft_types::PeftAdapterType| {
        let treatment = match it.treatment {
            PeftTreatment::Served => "served",
            PeftTreatment::Converted => "as a LoRA",
            PeftTreatment::Refused => "refused",
        };
        format!("| `{}` | {treatment} | {} |\n", it.name, it.about)
    };
    let table = PEFT_TYPES.iter().map(row).collect::<String>();
    let table = format!("| `peft_type` | | How, or why not |\n|---|---|---|\n{table}");
    let (begin, end) = ("<!-- types: begin -->\n\n", "\n<!-- types: end -->");
    let from = text.find(begin).unwrap() + begin.len();
    let to = text.find(end).unwrap();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&path, format!("{}{table}{}", &text[..from], &text[to..])).unwrap();
    } else {
        assert_eq!(&text[from..to], table, "UPDATE_REFERENCE=1 writes it again");
    }
}

/// A tensor of layer 0's query projection, whose shape is `[32, 32]` in the tiny model.
fn of_q(part: &str, shape: &[usize], values: &[f32]) -> (String, &'static str, Vec<usize>, Vec<u8>) {
    let name = format!("base_model.model.model.layers.0.self_attn.q_proj.{part}");
    (name, "F32", shape.to_vec(), f32_bytes(values))
}

fn config_of(method: &str, options: &Value) -> Value {
    let mut config = json!({
        "peft_type": method, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "layers_to_transform": [0],
    });
    options.as_object().unwrap().iter().for_each(|(name, value)| config[name] = value.clone());
    config
}

fn convert(method: &str, options: &Value, entries: &StoredTensors) -> Result<Adapter, AdapterError> {
    try_read(&config_of(method, options), entries, &tiny()).map(|adapter| adapter.adapter().clone())
}

/// The change that the first module of a LoRA makes, `[out, in]`.
fn change(adapter: &Adapter, inputs: usize) -> Vec<f32> {
    let module = &adapter.modules()[0];
    let element = |row: usize, column: usize| {
        let b = &module.b[row * module.rank..][..module.rank];
        let products = b.iter().enumerate().map(|(at, b)| b * module.a[at * inputs + column]);
        module.scale * products.sum::<f32>()
    };
    let rows = module.b.len() / module.rank;
    (0..rows)
        .flat_map(|row| (0..inputs).map(move |column| (row, column)))
        .map(|(r, c)| element(r, c))
        .collect()
}

#[test]
fn an_adalora_that_lost_every_rank_of_its_layers_is_empty() {
    let entries = |rank: usize| {
        vec![
            of_q("lora_A", &[rank, 32], &numbers(rank * 32, 1)),
            of_q("lora_E", &[rank, 1], &numbers(rank, 2)),
            of_q("lora_B", &[32, rank], &numbers(32 * rank, 3)),
        ]
    };
    let options =
        json!({"lora_alpha": 4, "rank_pattern": {"anything": [true, false]}, "init_r": 12, "total_step": 3});
    let adapter = convert("ADALORA", &options, &entries(2)).unwrap();
    assert_eq!((adapter.method.kind(), adapter.method.rank()), (AdapterKind::Lora, 2));
    assert_says(convert("ADALORA", &options, &entries(0)), &["no tensor adapts a layer"]);
}

#[test]
fn a_kronecker_product_is_that_of_its_matrices() {
    let (one, two) = (numbers(4 * 8, 1), numbers(8 * 4, 2));
    let entries = vec![of_q("lokr_w1", &[4, 8], &one), of_q("lokr_w2", &[8, 4], &two)];
    let adapter = convert("LOKR", &json!({"r": 8, "alpha": 4}), &entries).unwrap();
    let expected: Vec<f32> = (0..32 * 32)
        .map(|at| (at / 32, at % 32))
        .map(|(row, column)| 0.5 * one[row / 8 * 8 + column / 4] * two[row % 8 * 4 + column % 4])
        .collect();
    let found = change(&adapter, 32);
    assert!(found.iter().zip(&expected).all(|(x, y)| (x - y).abs() < 1e-5));
    let wrong = vec![of_q("lokr_w1", &[4, 4], &one[..16]), of_q("lokr_w2", &[8, 4], &two)];
    assert_says(convert("LOKR", &json!({"r": 8}), &wrong), &["lokr_w1", "[32, 16]", "[32, 32]"]);
}

/// A Kronecker product whose first matrix is of rank one, but for `noise`, in a layer of 2048 x 2048.
fn wide_kronecker(noise: f32) -> (ModelConfig, StoredTensors, [Vec<f32>; 2]) {
    let mut model = tiny();
    (model.hidden_size, model.heads, model.kv_heads, model.head_dim) = (2048, 256, 256, 8);
    let (column, row, more) = (numbers(64, 1), numbers(64, 2), numbers(64 * 64, 3));
    let one = (0..64 * 64).map(|at| column[at / 64] * row[at % 64] + noise * more[at]).collect::<Vec<_>>();
    let two = numbers(32 * 32, 4);
    let entries = vec![of_q("lokr_w1", &[64, 64], &one), of_q("lokr_w2", &[32, 32], &two)];
    (model, entries, [one, two])
}

#[test]
fn a_change_of_too_many_ranks_is_cut_and_its_loss_is_reported_or_refused() {
    let config = config_of("LOKR", &json!({"r": 8, "alpha": 8}));
    let read = |noise| {
        let (model, entries, matrices) = wide_kronecker(noise);
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
        std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(&entries)).unwrap();
        AnyAdapter::read_with_notes(directory.path(), &model).map(|read| (read, matrices))
    };
    for (noise, is_lossy) in [(0.0, false), (0.01, true)] {
        let ((adapter, notes), [one, two]) = read(noise).unwrap();
        let module = &adapter.adapter().modules()[0];
        assert_eq!(module.rank, 1024);
        for (row, column) in [(0, 0), (77, 1999), (2047, 33)] {
            let b = &module.b[row * 1024..][..1024];
            let products = b.iter().enumerate().map(|(at, b)| b * module.a[at * 2048 + column]);
            let found = module.scale * products.sum::<f32>();
            let wanted = one[row / 32 * 64 + column / 32] * two[row % 32 * 32 + column % 32];
            assert!((found - wanted).abs() < 0.02, "{found} {wanted}");
        }
        match &notes[..] {
            [] => assert!(!is_lossy),
            [AdapterWarning::Approximation { module, rank: 1024, error }] => {
                assert!(is_lossy && module.ends_with("q_proj") && *error < 0.05, "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_says(read(2.0), &["rank 1024", "q_proj", "5 %", "merge_and_unload"]);
}

#[test]
fn sparse_positions_outside_the_layer_are_refused() {
    let values = of_q("shira_weight", &[2], &[1.0, 2.0]);
    let indices = |places: [i32; 4]| {
        let bytes = places.iter().flat_map(|place| place.to_le_bytes()).collect();
        let name = "base_model.model.model.layers.0.self_attn.q_proj.shira_indices".to_owned();
        (name, "I32", vec![2, 2], bytes)
    };
    let adapter = convert("SHIRA", &json!({"r": 1}), &vec![values.clone(), indices([3, 3, 31, 31])]).unwrap();
    let found = change(&adapter, 32);
    assert_eq!((found[3 * 32 + 31], found.iter().sum::<f32>()), (3.0, 3.0), "elements of one place add up");
    for bad in [[0, 32, 0, 0], [0, 0, 0, -1]] {
        let entries = vec![values.clone(), indices(bad)];
        assert_says(convert("SHIRA", &json!({"r": 1}), &entries), &["shira_indices", "outside the shape"]);
    }
    assert_says(convert("SHIRA", &json!({"r": 1}), &vec![values.clone()]), &["shira_indices", "missing"]);
    let unused = vec![of_q("miss_block", &[4, 32], &numbers(128, 1)), indices([0, 0, 0, 0])];
    assert_says(convert("MISS", &json!({"r": 4}), &unused), &["shira_indices"]);
}

#[test]
fn a_short_file_that_describes_large_factors_is_refused_before_they_are_made() {
    let mut model = tiny();
    (model.hidden_size, model.heads, model.kv_heads, model.head_dim) = (8192, 1024, 1024, 8);
    let large = |part: &str, shape: [usize; 2]| of_q(part, &shape, &vec![0.5; shape[0] * shape[1]]);
    let loha = |rank: usize| {
        let entries = vec![
            large("hada_w1_a", [8192, rank]),
            large("hada_w1_b", [rank, 8192]),
            large("hada_w2_a", [8192, rank]),
            large("hada_w2_b", [rank, 8192]),
        ];
        try_read(&config_of("LOHA", &json!({"r": rank})), &entries, &model)
    };
    assert_says(loha(250), &["more than", "limit of an adapter"]);
    assert_says(loha(40), &["q_proj", "rank 1600", "takes too long", "merge_and_unload"]);
    let kernel = vec![of_q("c3a_kernel", &[1, 1, 8192], &vec![0.5; 8192])];
    let c3a = try_read(&config_of("C3A", &json!({"block_size": 8192})), &kernel, &model);
    assert_says(c3a, &["q_proj", "rank 8192", "merge_and_unload"]);
}

#[test]
fn options_that_change_the_result_are_refused_by_name() {
    let q = |part: &str| vec![of_q(part, &[4, 32], &numbers(128, 1))];
    let says = |method: &str, options: Value, parts: &[&str]| {
        assert_says(convert(method, &options, &q("miss_block")), parts);
    };
    says("MISS", json!({"r": 4, "init_weights": "bat"}), &["`init_weights`", "bat", "merge_and_unload"]);
    says("POLY", json!({"r": 4, "n_tasks": 2}), &["`n_tasks`", "2", "one task"]);
    says("PVERA", json!({"sample_at_inference": true}), &["`sample_at_inference`"]);
    says("RANDLORA", json!({"save_projection": false}), &["`save_projection`"]);
    says("GRALORA", json!({"r": 4, "gralora_k": 3}), &["`gralora_k`", "3"]);
    says("VBLORA", json!({"topk": 300}), &["`topk`", "300"]);
    says("LOHA", json!({"r": 4, "modules_to_save": ["lm_head"]}), &["`modules_to_save`"]);
    says("LOKR", json!({"r": 0}), &["rank 0"]);
    says("FOURIERFT", json!({"n_frequency": 0}), &["fourierft_spectrum", "missing"]);
    says("NEW_TYPE", json!({}), &["`peft_type`", "NEW_TYPE"]);
    assert!(convert("MISS", &json!({"r": 4}), &q("miss_block")).is_ok());
}

fn prompt_config(changes: &Value) -> Value {
    let mut config = json!({
        "peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "token_dim": 32,
        "num_layers": 2, "num_attention_heads": 4, "num_transformer_submodules": 1,
    });
    changes.as_object().unwrap().iter().for_each(|(name, value)| config[name] = value.clone());
    config
}

#[test]
fn prompt_embeddings_are_as_wide_as_the_models_and_are_of_one_task() {
    let embeddings = |width: usize| {
        vec![("prompt_embeddings".to_owned(), "F32", vec![3, width], f32_bytes(&numbers(3 * width, 1)))]
    };
    let read = |changes: Value, width| try_read(&prompt_config(&changes), &embeddings(width), &tiny());
    let adapter = read(json!({}), 32).unwrap();
    assert_eq!((adapter.kind(), adapter.modules()), (AdapterKind::Prompt, 1));
    let MethodWeights::Prompt(prompt) = &adapter.adapter().method else { panic!("it is a prompt") };
    assert_eq!((prompt.tokens, prompt.row(2)), (3, &numbers(96, 1)[64..]));
    assert_eq!(adapter.adapter().method.virtual_tokens(), 3);
    assert_says(read(json!({}), 16), &["prompt_embeddings", "[3, 32]", "[3, 16]"]);
    assert_says(read(json!({"token_dim": 64}), 32), &["`token_dim`", "64", "32"]);
    assert_says(read(json!({"num_virtual_tokens": 5000}), 32), &["`num_virtual_tokens`", "1024"]);
    let tasks = json!({"peft_type": "MULTITASK_PROMPT_TUNING", "num_tasks": 2});
    assert_says(read(tasks, 32), &["`num_tasks`", "one task"]);
    let other = read(json!({"peft_type": "CPT", "cpt_token_ids": [1, 2, 3]}), 32).unwrap();
    assert_eq!(other.adapter().generation, adapter.adapter().generation, "equal embeddings are one version");
}

#[test]
fn trained_tokens_are_different_tokens_of_the_vocabulary() {
    let rows = |count: usize| {
        let name = "base_model.model.model.embed_tokens.trainable_tokens_delta".to_owned();
        vec![(name, "F32", vec![count, 32], f32_bytes(&numbers(count * 32, 1)))]
    };
    let read = |tokens: Value, count| {
        let config = json!({
            "peft_type": "TRAINABLE_TOKENS", "task_type": "CAUSAL_LM", "token_indices": tokens,
            "target_modules": "model.embed_tokens", "init_weights": true,
        });
        try_read(&config, &rows(count), &tiny())
    };
    let adapter = read(json!([7, 3]), 2).unwrap();
    assert_eq!((adapter.kind(), adapter.modules()), (AdapterKind::Tokens, 1));
    let Some(model::adapter::EmbeddingChange::Rows(own)) = &adapter.vocabulary().unwrap().embedding else {
        panic!("it has rows")
    };
    assert_eq!((own.row(7), own.row(4)), (Some(&numbers(64, 1)[..32]), None));
    assert_ne!(read(json!([3, 7]), 2).unwrap().adapter().generation, adapter.adapter().generation);
    for (tokens, part) in [
        (json!([]), "1 to 4096"),
        (json!([1, 1]), "twice"),
        (json!([-1, 2]), "no token id"),
        (json!([1, 1_000_000]), "no token id"),
        (json!("all"), "1 to 4096"),
    ] {
        assert_says(read(tokens, 2), &["`token_indices`", part]);
    }
    assert_says(read(json!([1, 2, 3]), 2), &["trainable_tokens_delta", "[3, 32]"]);
}

#[derive(Deserialize)]
struct Combinations {
    model: String,
    adapters: [String; 2],
    module: String,
    cases: Vec<CombinedCase>,
}

#[derive(Deserialize)]
struct CombinedCase {
    combination_type: String,
    density: Option<f64>,
    majority_sign_method: Option<String>,
    svd_rank: Option<usize>,
    weights: [f32; 2],
    a: Vec<f32>,
    b: Vec<f32>,
}

fn method_named(name: &str) -> CombinationMethod {
    CombinationMethod::NAMED.into_iter().find(|(known, _)| *known == name).expect(name).1
}

fn product(a: &[f32], b: &[f32], rank: usize) -> Vec<f32> {
    let inputs = a.len() / rank;
    let row = |b: &[f32]| -> Vec<f32> {
        (0..inputs).map(|at| b.iter().enumerate().map(|(nth, b)| b * a[nth * inputs + at]).sum()).collect()
    };
    b.chunks_exact(rank).flat_map(row).collect()
}

#[test]
fn combinations_of_adapters_are_those_of_peft() {
    let expected: Combinations = read(&golden("expected/llama-tied/combinations.json"));
    let named =
        |name: &String| NamedLora::read(&golden("adapters").join(&expected.model).join(name)).unwrap();
    let parts = expected.adapters.each_ref().map(named);
    for case in &expected.cases {
        let combination = Combination {
            method: method_named(&case.combination_type),
            rank: case.svd_rank,
            density: case.density.unwrap_or(1.0),
            sign: match case.majority_sign_method.as_deref() {
                Some("frequency") => MajoritySign::Frequency,
                _ => MajoritySign::Total,
            },
            seed: 0,
        };
        let weighted: Vec<_> = parts.iter().cloned().zip(case.weights).collect();
        let combined = NamedLora::combine(&weighted, &combination).unwrap();
        let module = &combined.modules[&expected.module];
        // The factors of a decomposition may differ where their product does not.
        let found = product(&module.a, &module.b, module.rank);
        let wanted = product(&case.a, &case.b, case.svd_rank.unwrap_or(module.rank));
        let far = found.iter().zip(&wanted).map(|(x, y)| (module.scale * x - y).abs()).fold(0.0, f32::max);
        assert!(far < 2e-4, "{}: {far}", case.combination_type);
    }
}

#[test]
fn factors_of_different_ranks_combine_only_by_cat_and_svd() {
    let named = |name: &str| NamedLora::read(&golden("adapters/llama-tied").join(name)).unwrap();
    let parts = [(named("rank8-f16"), 1.0), (named("rank16-all-linear"), 1.0)];
    let by = |method| Combination { method, rank: None, density: 0.5, sign: MajoritySign::Total, seed: 1 };
    let error = NamedLora::combine(&parts, &by(CombinationMethod::Ties)).unwrap_err();
    assert!(matches!(&error, MergeError::Ranks { one: 8, other: 16, .. }), "{error}");
    let cut = NamedLora::combine(&parts, &by(CombinationMethod::Svd)).unwrap();
    assert!(cut.modules.values().all(|module| module.rank == 16));
}

#[test]
fn fewer_ranks_have_the_reported_error_and_a_converted_adapter_is_written_as_a_lora() {
    let (config, path) = path_of("llama-tied/loha-wide");
    let adapter = Adapter::read(&path, &config).unwrap();
    let whole = NamedLora::of(&adapter, &config);
    let (cut, loss) = whole.truncated(8);
    let loss = loss.unwrap();
    let (module, other) = (&whole.modules[&loss.module], &cut.modules[&loss.module]);
    assert!((module.distance(other) / module.norm() - loss.error).abs() < 1e-3, "{loss:?}");
    let (same, none) = whole.truncated(1024);
    assert!(none.is_none() && same.modules == whole.modules);
    let directory = tempfile::tempdir().unwrap();
    let written = directory.path().join("lora");
    whole.write(&written).unwrap();
    let again = Adapter::read(&written, &config).unwrap();
    assert_eq!(again.generation, adapter.generation, "one version, however it is stored");
}

#[test]
fn parts_of_a_fused_layer_are_written_as_one_again() {
    let (config, path) = path_of("phi3/lokr");
    let adapter = Adapter::read(&path, &config).unwrap();
    let named = NamedLora::of(&adapter, &config);
    assert!(named.modules.keys().any(|name| name.ends_with("qkv_proj")));
    assert!(!named.modules.keys().any(|name| name.ends_with("q_proj") || name.ends_with("k_proj")));
    let directory = tempfile::tempdir().unwrap();
    named.write(&directory.path().join("lora")).unwrap();
    let again = Adapter::read(Path::new(&directory.path().join("lora")), &config).unwrap();
    assert_eq!(again.generation, adapter.generation);
}
