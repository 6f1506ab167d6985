//! An adapter with its own embedding or head (`modules_to_save`) is read exactly as PEFT defines it (values
//! by PEFT: `golden.rs`), and rejected by name where it is not supported.

use crate::files_support::{assert_says, f32_bytes, hf_name, numbers, safetensors, tiny};
use half::{bf16, f16};
use model::{
    adapter::{
        Adapter, AdapterError, AdapterKind, AnyAdapter, EmbeddingChange, SavedMatrix, VocabularyAdapter,
        by_name::NamedLora,
        merge::{AdapterMergeError, sum},
    },
    shape::{config::ModelConfig, source::Target},
};
use serde_json::{Value, json};

type SavedTensor = (String, &'static str, Vec<usize>, Vec<u8>);

const EMBEDDING: &str = "base_model.model.model.embed_tokens";
const HEAD: &str = "base_model.model.lm_head";

fn config(changes: &Value) -> Value {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
    });
    for (option, value) in changes.as_object().unwrap() {
        config[option] = value.clone();
    }
    config
}

fn both() -> Value {
    config(&json!({ "modules_to_save": ["embed_tokens", "lm_head"] }))
}

fn floats(name: &str, shape: [usize; 2], seed: usize) -> SavedTensor {
    (name.to_owned(), "F32", shape.to_vec(), f32_bytes(&numbers(shape[0] * shape[1], seed)))
}

fn shape() -> [usize; 2] {
    [tiny().vocab_size, tiny().hidden_size]
}

fn entries(copies: &[&str]) -> Vec<SavedTensor> {
    let layer = |layer| {
        let name = format!("base_model.model.{}", hf_name(layer, Target::Q));
        [
            floats(&format!("{name}.lora_A.weight"), [2, 32], 3),
            floats(&format!("{name}.lora_B.weight"), [32, 2], 4),
        ]
    };
    let copies = (5..).zip(copies).map(|(seed, module)| floats(&format!("{module}.weight"), shape(), seed));
    (0..2).flat_map(layer).chain(copies).collect()
}

fn in_directory<T>(config: &Value, entries: &[SavedTensor], use_it: impl FnOnce(&std::path::Path) -> T) -> T {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(entries)).unwrap();
    use_it(directory.path())
}

fn read_for(
    model: &ModelConfig,
    config: &Value,
    entries: &[SavedTensor],
) -> Result<VocabularyAdapter, AdapterError> {
    in_directory(config, entries, |path| {
        let adapter = AnyAdapter::read(path, model);
        assert_eq!(AnyAdapter::problems(path, model).is_empty(), adapter.is_ok());
        adapter.map(|adapter| {
            assert_eq!(adapter.kind(), AdapterKind::Saved);
            let AnyAdapter::Vocabulary(vocabulary) = adapter else { panic!("{adapter:?}") };
            vocabulary
        })
    })
}

fn read(config: &Value, entries: &[SavedTensor]) -> Result<VocabularyAdapter, AdapterError> {
    read_for(&tiny(), config, entries)
}

fn embedding(adapter: &VocabularyAdapter) -> &SavedMatrix {
    let Some(EmbeddingChange::Saved(matrix)) = &adapter.changes.embedding else { panic!("{adapter:?}") };
    matrix
}

fn all_rows(matrix: &SavedMatrix) -> Vec<f32> {
    (0..u32::try_from(shape()[0]).unwrap()).flat_map(|token| matrix.row(token)).collect()
}

#[test]
fn embedding_and_head_are_those_of_the_file() {
    let [vocab, hidden] = shape();
    let adapter = read(&both(), &entries(&[EMBEDDING, HEAD])).unwrap();
    assert_eq!((adapter.adapter.modules().len(), adapter.changes.modules()), (2, 2));
    assert_eq!(adapter.changes.saved(), ["embed_tokens", "lm_head"]);
    assert_eq!(all_rows(embedding(&adapter)), numbers(vocab * hidden, 5));
    assert_eq!(all_rows(adapter.changes.own_head().unwrap()), numbers(vocab * hidden, 6));
    for (module, tensor) in
        [("embed_tokens", EMBEDDING), ("model.embed_tokens", EMBEDDING), ("lm_head", HEAD)]
    {
        let alone = config(&json!({ "modules_to_save": [module] }));
        let adapter = read(&alone, &entries(&[tensor])).unwrap();
        assert_eq!(adapter.changes.saved(), [module.trim_start_matches("model.")]);
    }
}

#[test]
fn numbers_stay_as_they_are_stored() {
    let [vocab, hidden] = shape();
    let values = numbers(vocab * hidden, 5);
    let halves = |to_bits: fn(f32) -> u16| values.iter().flat_map(|&x| to_bits(x).to_le_bytes()).collect();
    let with = |kind: &'static str, bytes: Vec<u8>| {
        let mut all = entries(&[HEAD]);
        let name = all.pop().unwrap().0;
        all.push((name, kind, vec![vocab, hidden], bytes));
        read(&config(&json!({ "modules_to_save": ["lm_head"] })), &all).unwrap()
    };
    let bf16s = with("BF16", halves(|x| bf16::from_f32(x).to_bits()));
    let f16s = with("F16", halves(|x| f16::from_f32(x).to_bits()));
    let rounded: Vec<f32> = values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(all_rows(bf16s.changes.own_head().unwrap()), rounded);
    let rounded: Vec<f32> = values.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    assert_eq!(all_rows(f16s.changes.own_head().unwrap()), rounded);
    let singles = with("F32", f32_bytes(&values));
    // Rows are packed in groups of sixteen.
    let packed = vocab.next_multiple_of(16) * hidden;
    assert_eq!(
        [&bf16s, &f16s, &singles].map(|adapter| adapter.changes.bytes()),
        [2 * packed, 2 * packed, 4 * packed]
    );
    let any = AnyAdapter::Vocabulary(singles);
    assert_eq!(any.least_bytes(), any.adapter().method.least_bytes() + 4 * packed as u64);
}

#[test]
fn what_it_does_is_its_generation() {
    let generation =
        |config: &Value, entries: &[SavedTensor]| read(config, entries).unwrap().adapter.generation;
    let saving = |module: &str| config(&json!({ "modules_to_save": [module] }));
    let mut other = entries(&[EMBEDDING, HEAD]);
    other[5].3[..4].copy_from_slice(&1.5f32.to_le_bytes());
    let mut wider = both();
    wider["lora_alpha"] = json!(5);
    let generations = [
        generation(&both(), &entries(&[EMBEDDING, HEAD])),
        generation(&wider, &entries(&[EMBEDDING, HEAD])),
        generation(&both(), &other),
        generation(&saving("embed_tokens"), &entries(&[EMBEDDING])),
        generation(&saving("lm_head"), &entries(&[HEAD])),
    ];
    assert!((0..5).all(|one| (0..one).all(|two| generations[one] != generations[two])), "{generations:?}");
    let elsewhere = saving("model.embed_tokens");
    assert_eq!(generation(&elsewhere, &entries(&[EMBEDDING])), generations[3], "names are no part of it");
}

#[test]
fn a_base_that_ties_both_has_one_matrix_where_peft_was_told_to_tie_them() {
    let tied = ModelConfig { tied_head: true, ..tiny() };
    let changes = json!({ "modules_to_save": ["embed_tokens"], "ensure_weight_tying": true });
    let mut all = entries(&[EMBEDDING]);
    let same = (format!("{HEAD}.weight"), all[4].1, all[4].2.clone(), all[4].3.clone());
    assert_says(read_for(&tied, &config(&changes), &all), &["lm_head.weight", "missing"]);
    all.push(same);
    let adapter = read_for(&tied, &config(&changes), &all).unwrap();
    assert_eq!(adapter.changes.saved(), ["embed_tokens", "lm_head"]);
    assert_eq!(
        adapter.changes.bytes(),
        read(&both(), &entries(&[EMBEDDING, HEAD])).unwrap().changes.bytes() / 2
    );
    // Otherwise the unnamed module is unchanged, and a copy of it is an error.
    let untold = config(&json!({ "modules_to_save": ["embed_tokens"] }));
    let adapter = read_for(&tied, &untold, &all[..5]).unwrap();
    assert_eq!(adapter.changes.saved(), ["embed_tokens"]);
    assert_says(read_for(&tied, &untold, &all), &["lm_head.weight", "copy"]);
    assert_says(read(&config(&changes), &all), &["lm_head.weight", "copy"]);
    let adapted = config(&json!({ "ensure_weight_tying": true }));
    assert_says(read_for(&tied, &adapted, &entries(&[])), &["ensure_weight_tying"]);
}

#[test]
fn a_lora_of_the_embedding_goes_with_a_head_of_its_own() {
    let [vocab, hidden] = shape();
    let both =
        config(&json!({ "target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"] }));
    let mut all = entries(&[HEAD]);
    all.push(floats(&format!("{EMBEDDING}.lora_embedding_A"), [2, vocab], 8));
    all.push(floats(&format!("{EMBEDDING}.lora_embedding_B"), [hidden, 2], 9));
    let adapter = read(&both, &all).unwrap();
    assert!(matches!(adapter.changes.embedding, Some(EmbeddingChange::Factors(_))));
    assert_eq!((adapter.changes.saved(), adapter.changes.rank()), (vec!["lm_head"], 2));
}

#[test]
fn peft_adapts_nothing_that_it_saves() {
    let [vocab, hidden] = shape();
    let named_twice =
        config(&json!({ "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"] }));
    assert_eq!(read(&named_twice, &entries(&[HEAD])).unwrap().adapter.modules().len(), 2);
    let mut all = entries(&[HEAD]);
    all.push(floats(&format!("{HEAD}.lora_A.weight"), [2, hidden], 8));
    all.push(floats(&format!("{HEAD}.lora_B.weight"), [vocab, 2], 9));
    assert_says(read(&named_twice, &all), &["lm_head.lora_A.weight", "modules_to_save"]);
    let mut all = entries(&[EMBEDDING]);
    all.push(floats(&format!("{EMBEDDING}.lora_embedding_A"), [2, vocab], 8));
    let embedding =
        config(&json!({ "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["embed_tokens"] }));
    assert_says(read(&embedding, &all), &["lora_embedding_A", "modules_to_save"]);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let [vocab, hidden] = shape();
    let refused = |changes: Value, entries: &[SavedTensor], said: &[&str]| {
        assert_says(read(&config(&changes), entries), said);
    };
    for (named, shown) in [
        (json!(["norm"]), "`norm`"),
        (json!(["embed_tokens", "model.norm"]), "`model.norm`"),
        (json!(["tokens"]), "`tokens`"),
        (json!(["experts"]), "`experts`"),
        (json!("score"), "`score`"),
    ] {
        let said = ["modules_to_save", shown, "embed_tokens", "lm_head"];
        refused(json!({ "modules_to_save": named }), &entries(&[EMBEDDING]), &said);
    }
    refused(json!({ "modules_to_save": [1] }), &entries(&[]), &["modules_to_save"]);
    let saving = json!({ "modules_to_save": ["embed_tokens", "lm_head"] });
    refused(saving.clone(), &entries(&[EMBEDDING]), &["lm_head.weight", "missing"]);
    let mut larger = entries(&[EMBEDDING]);
    larger.push(floats(&format!("{HEAD}.weight"), [vocab + 8, hidden], 6));
    refused(saving.clone(), &larger, &["lm_head.weight", &(vocab + 8).to_string(), &vocab.to_string()]);
    let mut infinite = entries(&[EMBEDDING, HEAD]);
    infinite[5].3[4 * hidden..4 * hidden + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(saving.clone(), &infinite, &["lm_head.weight", "NaN", &format!("element {hidden}")]);
    for kind in [json!({ "use_dora": true }), json!({ "alora_invocation_tokens": [1] })] {
        let mut changes = saving.clone();
        changes.as_object_mut().unwrap().extend(kind.as_object().unwrap().clone());
        refused(changes, &entries(&[EMBEDDING, HEAD]), &["modules_to_save", "plain LoRA"]);
    }
    let draft = json!({ "modules_to_save": ["lm_head"], "holobiont_draft": { "layers": 1 } });
    refused(draft, &entries(&[HEAD]), &["modules_to_save", "draft"]);
}

#[test]
fn nothing_adds_up_with_it_and_nobody_trains_or_merges_it() {
    let all = entries(&[EMBEDDING, HEAD]);
    let adapter = AnyAdapter::Vocabulary(read(&both(), &all).unwrap());
    let kind = Err(AdapterMergeError::Kind(AdapterKind::Saved));
    assert_eq!(sum(vec![(adapter.clone(), 1.0), (adapter, 1.0)]), kind);
    let named = in_directory(&both(), &all, NamedLora::read);
    assert_says(named, &["head", "merged"]);
    let read = in_directory(&both(), &all, |path| Adapter::read(path, &tiny()));
    assert_says(read, &["head", "an executor"]);
}
