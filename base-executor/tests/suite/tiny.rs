//! Files of a model of a few layers with meaningless weights.

use std::{fs, path::Path};

const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 128;
const LAYERS: usize = 2;
pub(crate) const VOCAB: usize = 256;

pub(crate) fn write_model(directory: &Path) {
    write_model_of(directory, LAYERS);
}

pub(crate) fn write_model_of(directory: &Path, layers: usize) {
    let config = format!(
        "{{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": {VOCAB}, \"hidden_size\": {HIDDEN}, \
         \"intermediate_size\": {INTERMEDIATE}, \"num_hidden_layers\": {layers}, \"num_attention_heads\": 2, \
         \"num_key_value_heads\": 1, \"max_position_embeddings\": 512, \"tie_word_embeddings\": true}}"
    );
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("config.json"), config).unwrap();
    fs::write(directory.join("model.safetensors"), safetensors(&tensors(layers))).unwrap();
}

/// Writes a LoRA adapter of rank 2 for the queries of all layers, with tensors named `also` besides.
pub(crate) fn write_adapter(directory: &Path, also: &[(&str, [usize; 2])]) {
    let config = "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"]}";
    let name =
        |layer, side| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight");
    let mut tensors: Vec<_> = (0..LAYERS)
        .flat_map(|layer| [(name(layer, 'A'), vec![2, HIDDEN]), (name(layer, 'B'), vec![HIDDEN, 2])])
        .collect();
    tensors.extend(also.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())));
    write_files(directory, config, &tensors);
}

/// Writes a DoRA of rank 2 for the queries of all layers, with these magnitudes.
pub(crate) fn write_dora(directory: &Path, magnitudes: &[String]) {
    let config = "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"], \
                  \"use_dora\": true}";
    let name =
        |layer, side| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight");
    let factors = |layer| [(name(layer, 'A'), vec![2, HIDDEN]), (name(layer, 'B'), vec![HIDDEN, 2])];
    let magnitudes = magnitudes.iter().map(|name| (name.clone(), vec![HIDDEN]));
    write_files(directory, config, &(0..LAYERS).flat_map(factors).chain(magnitudes).collect::<Vec<_>>());
}

/// Writes an IA3 adapter that scales the values' outputs and the inputs of `down_proj`.
pub(crate) fn write_ia3(directory: &Path) {
    let config = "{\"peft_type\": \"IA3\", \"target_modules\": [\"v_proj\", \"down_proj\"], \
                  \"feedforward_modules\": [\"down_proj\"]}";
    let name = |layer, module| format!("base_model.model.model.layers.{layer}.{module}.ia3_l");
    let vectors = |layer| {
        [
            (name(layer, "self_attn.v_proj"), vec![HIDDEN / 2, 1]),
            (name(layer, "mlp.down_proj"), vec![1, INTERMEDIATE]),
        ]
    };
    write_files(directory, config, &(0..LAYERS).flat_map(vectors).collect::<Vec<_>>());
}

pub(crate) fn write_prefix(directory: &Path, tokens: usize) {
    let config = format!("{{\"peft_type\": \"PREFIX_TUNING\", \"num_virtual_tokens\": {tokens}}}");
    let embeddings = ("prompt_embeddings".to_owned(), vec![tokens, LAYERS * 2 * HIDDEN / 2]);
    write_files(directory, &config, &[embeddings]);
}

fn write_files(directory: &Path, config: &str, tensors: &[(String, Vec<usize>)]) {
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("adapter_config.json"), config).unwrap();
    fs::write(directory.join("adapter_model.safetensors"), safetensors(tensors)).unwrap();
}

fn tensors(layers: usize) -> Vec<(String, Vec<usize>)> {
    let matrices = [
        ("self_attn.q_proj", [HIDDEN, HIDDEN]),
        ("self_attn.k_proj", [HIDDEN / 2, HIDDEN]),
        ("self_attn.v_proj", [HIDDEN / 2, HIDDEN]),
        ("self_attn.o_proj", [HIDDEN, HIDDEN]),
        ("mlp.gate_proj", [INTERMEDIATE, HIDDEN]),
        ("mlp.up_proj", [INTERMEDIATE, HIDDEN]),
        ("mlp.down_proj", [HIDDEN, INTERMEDIATE]),
    ];
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        tensors.extend(matrices.map(|(part, shape)| (name(part), shape.to_vec())));
        let norms = ["input_layernorm", "post_attention_layernorm"];
        tensors.extend(norms.map(|part| (name(part), vec![HIDDEN])));
    }
    tensors
}

/// File of 32-bit tensors with deterministic pseudo-random values.
fn safetensors(tensors: &[(String, Vec<usize>)]) -> Vec<u8> {
    safetensors_with(tensors, None)
}

fn safetensors_with(tensors: &[(String, Vec<usize>)], ids: Option<(&str, &[i64])>) -> Vec<u8> {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, shape) in tensors {
        let begin = data.len();
        let values = (0..shape.iter().product::<usize>()).map(|index| number(name, index));
        values.for_each(|value| data.extend(value.to_le_bytes()));
        header.push(format!(
            "\"{name}\": {{\"dtype\": \"F32\", \"shape\": {shape:?}, \"data_offsets\": [{begin}, {}]}}",
            data.len()
        ));
    }
    if let Some((name, ids)) = ids {
        let begin = data.len();
        data.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        let (count, end) = (ids.len(), data.len());
        header.push(format!(
            "\"{name}\": {{\"dtype\": \"I64\", \"shape\": [{count}], \"data_offsets\": [{begin}, {end}]}}"
        ));
    }
    let header = format!("{{{}}}", header.join(", "));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    file
}

fn number(name: &str, index: usize) -> f32 {
    let seed = name.bytes().fold(index as u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    let noise = (seed.wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0 - 0.5;
    if name.contains("norm") { 1.0 } else { noise / 2.0 }
}

/// Writes a draft adapter of the first `layers` layers that drafts from `shortlist`, if there is one. Its
/// low-rank factors are those of [`write_adapter`] times `strength`; with 0 the adapter changes nothing.
pub(crate) fn write_draft(directory: &Path, layers: usize, shortlist: Option<&[i64]>, strength: f32) {
    let config = format!(
        "{{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": {}, \"target_modules\": [\"q_proj\"], \
         \"holobiont_draft\": {{\"layers\": {layers}}}}}",
        4.0 * strength
    );
    let name =
        |layer, side| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight");
    let tensors: Vec<_> = (0..layers)
        .flat_map(|layer| [(name(layer, 'A'), vec![2, HIDDEN]), (name(layer, 'B'), vec![HIDDEN, 2])])
        .collect();
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("adapter_config.json"), config).unwrap();
    let ids = shortlist.map(|ids| ("draft.shortlist", ids));
    fs::write(directory.join("adapter_model.safetensors"), safetensors_with(&tensors, ids)).unwrap();
}

/// Gives the model in `directory` a vocabulary in which every token is called `PREFIX` and its number.
pub(crate) fn write_tokens(directory: &Path, prefix: &str) {
    let vocab: Vec<String> = (0..VOCAB).map(|id| format!("\"{prefix}{id}\": {id}")).collect();
    let json = format!("{{\"model\": {{\"type\": \"BPE\", \"vocab\": {{{}}}}}}}", vocab.join(", "));
    fs::write(directory.join("tokenizer.json"), json).unwrap();
}
