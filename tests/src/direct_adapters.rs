//! Writes IA3, prefix, draft and classification adapters for the tests' model; a seed gives the same files.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

use crate::repeats::LAYERS;

const HIDDEN: usize = 576;
const KEY_WIDTH: usize = 192;
const INTERMEDIATE: usize = 1536;

/// Writes an IA3 adapter of PEFT's default layers into `into`. The factors are between 0.6 and 1.4, so that
/// answers change and stay text.
pub fn write_ia3(seed: u32, into: &Path) {
    let config = json!({
        "peft_type": "IA3", "task_type": "CAUSAL_LM", "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    });
    let vectors = (0..LAYERS.number()).flat_map(|layer| {
        let name = |module: &str| format!("base_model.model.model.layers.{layer}.{module}.ia3_l");
        [
            (name("self_attn.k_proj"), [KEY_WIDTH, 1]),
            (name("self_attn.v_proj"), [KEY_WIDTH, 1]),
            (name("mlp.down_proj"), [1, INTERMEDIATE]),
        ]
    });
    write(&config, vectors, into, numbers(seed).map(|number| 1.0 + 0.8 * number));
}

/// Writes a prefix of `tokens` virtual tokens into `into`, with keys and values between -1 and 1.
pub fn write_prefix(seed: u32, tokens: usize, into: &Path) {
    let config =
        json!({"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": tokens});
    let embeddings = ("prompt_embeddings".to_owned(), [tokens, LAYERS.count() * 2 * KEY_WIDTH]);
    write(&config, [embeddings], into, numbers(seed).map(|number| 2.0 * number));
}

/// Writes a draft adapter of all base layers without changes into `into`, which drafts the base's own tokens.
pub fn write_draft(into: &Path) {
    let layers = LAYERS.number();
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 0, "target_modules": ["q_proj"],
        "holobiont_draft": {"layers": layers},
    });
    let factors = (0..layers).flat_map(|layer| {
        let name =
            |side: char| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight");
        [(name('A'), [1, HIDDEN]), (name('B'), [HIDDEN, 1])]
    });
    write(&config, factors, into, numbers(1));
}

/// Writes a LoRA of the keys with a classification head of these `labels` into `into`, such that the classes
/// of texts differ.
pub fn write_classifier(seed: u32, labels: &[&str], into: &Path) {
    let names: Map<String, Value> =
        labels.iter().enumerate().map(|(id, name)| (id.to_string(), (*name).into())).collect();
    let config = json!({
        "peft_type": "LORA", "task_type": "SEQ_CLS", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj"],
        "modules_to_save": ["classifier", "score"], "id2label": names,
    });
    let factors = (0..LAYERS.number()).flat_map(|layer| {
        let name =
            |side: char| format!("base_model.model.model.layers.{layer}.self_attn.k_proj.lora_{side}.weight");
        [(name('A'), [4, HIDDEN]), (name('B'), [KEY_WIDTH, 4])]
    });
    let head = [("base_model.model.score.weight".to_owned(), [labels.len(), HIDDEN])];
    write(&config, factors.chain(head), into, numbers(seed).map(|number| 0.2 * number));
}

/// Writes PEFT's two files, with 32-bit tensors filled from `numbers`.
fn write(
    config: &Value,
    tensors: impl IntoIterator<Item = (String, [usize; 2])>,
    into: &Path,
    mut numbers: impl Iterator<Item = f32>,
) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape) in tensors {
        let begin = data.len();
        numbers.by_ref().take(shape.iter().product()).for_each(|number| data.extend(number.to_le_bytes()));
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    let weights = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::create_dir_all(into).expect("a directory for the adapter");
    fs::write(into.join("adapter_config.json"), config.to_string()).expect("the adapter's configuration");
    fs::write(into.join("adapter_model.safetensors"), weights).expect("the adapter's weights");
}

/// Returns pseudo-random values between -0.5 and 0.5 for `seed`.
fn numbers(seed: u32) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        #[expect(clippy::cast_precision_loss, reason = "24 bits are exact")]
        let number = (state >> 8) as f32;
        number / (1 << 24) as f32 - 0.5
    })
}
