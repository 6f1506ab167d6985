//! LoRAs of experts: the three forms of files mean the same adapter, and every other form is refused by name.

use std::{collections::BTreeMap, path::Path};
use testkit::paths::golden;

use crate::files_support::{assert_says, f32_bytes, numbers, safetensors};
use model::{
    adapter::{
        Adapter, AdapterError, AnyAdapter, LoraModule,
        by_name::{MergeError, NamedLora},
        merge::sum,
    },
    shape::{
        config::ModelConfig,
        experts::{ExpertId, ExpertTarget},
        layout::linear_shape,
        source::Target,
    },
    sources::open::open,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const RANK: usize = 2;
const EXPERTS: usize = 8;
/// The blocks of `qwen3moe` that have experts.
const LAYERS: [usize; 2] = [0, 2];

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn config() -> ModelConfig {
    open(&golden("models/qwen3moe")).unwrap().config().clone()
}

fn options(changes: &Value) -> Value {
    let mut options = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 4, "target_modules": [],
        "target_parameters": null,
    });
    for (option, value) in changes.as_object().unwrap() {
        options[option] = value.clone();
    }
    options
}

fn write(changes: &Value, tensors: &Tensors) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let entries: Vec<_> = tensors
        .iter()
        .map(|(name, (shape, values))| (name.clone(), "F32", shape.clone(), f32_bytes(values)))
        .collect();
    std::fs::write(directory.path().join("adapter_config.json"), options(changes).to_string()).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), safetensors(&entries)).unwrap();
    directory
}

fn read(changes: &Value, tensors: &Tensors) -> Result<Adapter, AdapterError> {
    Adapter::read(write(changes, tensors).path(), &config())
}

/// Factors of one expert: A `[rank, in]` and B `[out, rank]`, of one linear layer.
fn factors(layer: usize, expert: usize, target: ExpertTarget) -> (Vec<f32>, Vec<f32>) {
    let [outputs, inputs] = linear_shape(&config(), Target::Expert(ExpertId(0), target));
    let seed = (layer * EXPERTS + expert) * 8 + 2 * target as usize;
    (numbers(RANK * inputs, seed), numbers(outputs * RANK, seed + 1))
}

fn name(layer: usize, module: &str, part: &str) -> String {
    format!("base_model.model.model.layers.{layer}.mlp.experts.{module}lora_{part}.weight")
}

const PARTS: [(&str, &str, ExpertTarget); 3] = [
    ("gate_proj", "w1", ExpertTarget::Gate),
    ("up_proj", "w3", ExpertTarget::Up),
    ("down_proj", "w2", ExpertTarget::Down),
];

/// Each expert's layers apart, as in transformers 4.
fn modules() -> Tensors {
    let mut tensors = Tensors::new();
    for layer in LAYERS {
        for expert in 0..EXPERTS {
            for (part, _, target) in PARTS {
                let (a, b) = factors(layer, expert, target);
                let module = format!("{expert}.{part}.");
                tensors.insert(name(layer, &module, "A"), (vec![RANK, a.len() / RANK], a));
                tensors.insert(name(layer, &module, "B"), (vec![b.len() / RANK, RANK], b));
            }
        }
    }
    tensors
}

/// All experts of a layer in one tensor, as in Tinker's files.
fn stacks() -> Tensors {
    let mut tensors = Tensors::new();
    for layer in LAYERS {
        for (_, stack, target) in PARTS {
            let each: Vec<_> = (0..EXPERTS).map(|expert| factors(layer, expert, target)).collect();
            let (a, b) = (each[0].0.len() / RANK, each[0].1.len() / RANK);
            let of_a = each.iter().flat_map(|(a, _)| a.clone()).collect();
            let of_b = each.iter().flat_map(|(_, b)| b.clone()).collect();
            tensors.insert(name(layer, &format!("{stack}."), "A"), (vec![EXPERTS, RANK, a], of_a));
            tensors.insert(name(layer, &format!("{stack}."), "B"), (vec![EXPERTS, b, RANK], of_b));
        }
    }
    tensors
}

/// A parameter of all experts, as PEFT saves it: `holder` is empty, or names the inner of two wrappers.
fn parameter(holder: &str, target: ExpertTarget) -> Tensors {
    let mut tensors = Tensors::new();
    for layer in LAYERS {
        let each: Vec<_> = (0..EXPERTS).map(|expert| factors(layer, expert, target)).collect();
        let (inputs, outputs) = (each[0].0.len() / RANK, each[0].1.len() / RANK);
        let of_a = each.iter().flat_map(|(a, _)| a.clone()).collect();
        let mut of_b = vec![0.0; outputs * RANK * EXPERTS];
        for (expert, (_, b)) in each.iter().enumerate() {
            for (at, &value) in b.iter().enumerate() {
                of_b[at * EXPERTS + expert] = value;
            }
        }
        tensors.insert(name(layer, holder, "A"), (vec![EXPERTS * RANK, inputs], of_a));
        tensors.insert(name(layer, holder, "B"), (vec![outputs, RANK * EXPERTS], of_b));
    }
    tensors
}

fn expected(targets: &[ExpertTarget]) -> Vec<LoraModule> {
    let places = LAYERS.into_iter().flat_map(|layer| (0..EXPERTS).map(move |expert| (layer, expert)));
    let modules = places.flat_map(|(layer, expert)| {
        targets.iter().map(move |&target| {
            let (a, b) = factors(layer, expert, target);
            let target = Target::Expert(ExpertId(expert as u16), target);
            LoraModule { layer, target, rank: RANK, scale: 2.0, a, b }
        })
    });
    modules.collect()
}

fn of_modules() -> Value {
    json!({"target_modules": ["gate_proj", "up_proj", "down_proj"], "layers_to_transform": LAYERS})
}

#[test]
fn one_adapter_in_the_forms_of_transformers_4_and_of_tinker_is_one_version() {
    let apart = read(&of_modules(), &modules()).unwrap();
    let together = read(&json!({"target_modules": "all-linear"}), &stacks()).unwrap();
    assert_eq!(apart.modules(), expected(&[ExpertTarget::Gate, ExpertTarget::Up, ExpertTarget::Down]));
    assert_eq!(apart, together);
    assert!(apart.changes_experts());
}

#[test]
fn parameters_of_peft_are_cut_to_the_factors_of_each_expert() {
    let both = json!({"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]});
    let mut tensors = parameter("base_layer.", ExpertTarget::GateUp);
    tensors.extend(parameter("", ExpertTarget::Down));
    let adapter = read(&both, &tensors).unwrap();
    assert_eq!(adapter.modules(), expected(&[ExpertTarget::GateUp, ExpertTarget::Down]));
    for (parameter_name, target) in
        [("experts.gate_up_proj", ExpertTarget::GateUp), ("down_proj", ExpertTarget::Down)]
    {
        let alone = read(&json!({"target_parameters": [parameter_name]}), &parameter("", target)).unwrap();
        assert_eq!(alone.modules(), expected(&[target]));
        assert_ne!(alone.generation, adapter.generation);
    }
    let other = json!({"target_parameters": ["down_proj"], "alpha_pattern": {r".*\.experts\.down_proj": 6}});
    let adapter = read(&other, &parameter("", ExpertTarget::Down)).unwrap();
    assert!(adapter.modules().iter().all(|module| module.scale.to_bits() == 3.0f32.to_bits()));
}

#[test]
fn a_factor_that_experts_share_is_the_factor_of_each() {
    let all = json!({"target_modules": "all-linear"});
    let (mut shared, mut repeated) = (stacks(), stacks());
    for layer in LAYERS {
        for (stack, part) in [("w1.", "A"), ("w2.", "B")] {
            let key = name(layer, stack, part);
            let (shape, values) = &shared[&key];
            let (first, size) = (values[..values.len() / EXPERTS].to_vec(), shape.clone());
            repeated.insert(key.clone(), (size.clone(), first.repeat(EXPERTS)));
            shared.insert(key, ([&[1], &size[1..]].concat(), first));
        }
    }
    assert_eq!(read(&all, &shared).unwrap(), read(&all, &repeated).unwrap());
}

#[test]
fn experts_without_a_layer_in_the_configuration_have_no_delta() {
    let gates = json!({"target_modules": r".*\.(0|5)\.gate_proj"});
    let mut tensors = modules();
    tensors.retain(|name, _| name.contains(".0.gate_proj") || name.contains(".5.gate_proj"));
    let adapter = read(&gates, &tensors).unwrap();
    let wanted = [0, 5].map(|expert| Target::Expert(ExpertId(expert), ExpertTarget::Gate));
    assert_eq!(adapter.modules().iter().map(|module| module.target).collect::<Vec<_>>(), wanted.repeat(2));
    let mut tensors = stacks();
    tensors.retain(|name, _| !name.contains(".w3."));
    let without_up = read(&json!({"target_modules": "all-linear"}), &tensors).unwrap();
    assert_eq!(without_up.modules(), expected(&[ExpertTarget::Gate, ExpertTarget::Down]));
}

#[test]
fn a_part_that_is_missing_or_has_the_factors_of_other_experts_is_refused_by_name() {
    let mut tensors = modules();
    tensors.remove(&name(2, "7.up_proj.", "B"));
    assert_says(read(&of_modules(), &tensors), &["layers.2.mlp.experts.7.up_proj.lora_B", "missing"]);
    let mut tensors = stacks();
    tensors.remove(&name(2, "w2.", "A"));
    let all = json!({"target_modules": "all-linear"});
    assert_says(read(&all, &tensors), &["layers.2.mlp.experts.w2.lora_A", "missing"]);
    let mut tensors = stacks();
    tensors.get_mut(&name(0, "w1.", "A")).unwrap().0 = vec![EXPERTS / 2, 2 * RANK, 64];
    assert_says(read(&all, &tensors), &["experts.w1.lora_A", "[4, 4, 64]", "[8, 2, 64]"]);
    let down = json!({"target_parameters": ["mlp.experts.down_proj"]});
    let turned = parameter("", ExpertTarget::GateUp);
    assert_says(read(&down, &turned), &["mlp.experts.lora_A", "[16, 64]", "[16, 32]"]);
    let wrapped = parameter("base_layer.", ExpertTarget::Down);
    assert_says(read(&down, &wrapped), &["mlp.experts.lora_A.weight", "missing"]);
}

#[test]
fn forms_that_are_mixed_or_unknown_are_refused_by_name() {
    let mut tensors = modules();
    tensors.extend(parameter("", ExpertTarget::Down));
    assert_says(
        read(&of_modules(), &tensors),
        &["`base_model.model.model.layers.0.mlp.experts.lora_A.weight`"],
    );
    let mut tensors = parameter("", ExpertTarget::Down);
    tensors.insert(name(0, "base_layer.base_layer.", "A"), (vec![1, 1], vec![1.0]));
    let down = json!({"target_parameters": ["mlp.experts.down_proj"]});
    assert_says(read(&down, &tensors), &["experts.base_layer.base_layer.lora_A", "experts in a form"]);
    for parameter_name in ["mlp.gate.weight", "q_proj.weight", "layers.1.mlp.experts.down_proj"] {
        let changes = json!({"target_parameters": [parameter_name]});
        let tensors = parameter("", ExpertTarget::Down);
        assert_says(read(&changes, &tensors), &["target_parameters", parameter_name, "gate_up_proj"]);
    }
    let mut magnitudes = modules();
    for layer in LAYERS {
        for (expert, (part, _, target)) in (0..EXPERTS).flat_map(|expert| PARTS.map(|part| (expert, part))) {
            let outputs = linear_shape(&config(), Target::Expert(ExpertId(0), target))[0];
            let tensor = name(layer, &format!("{expert}.{part}."), "A")
                .replace("lora_A.weight", "lora_magnitude_vector");
            magnitudes.insert(tensor, (vec![outputs], vec![1.0; outputs]));
        }
    }
    let mut dora = of_modules();
    dora["use_dora"] = json!(true);
    assert_says(read(&dora, &magnitudes), &["use_dora", "adapters of experts"]);
    let parameters = json!({"target_parameters": ["mlp.experts.down_proj"], "use_dora": true});
    assert_says(read(&parameters, &parameter("", ExpertTarget::Down)), &["target_parameters", "DoRA"]);
}

#[test]
fn routers_are_refused_by_name() {
    let mut tensors = modules();
    let router = "base_model.model.model.layers.0.mlp.gate.lora_A.weight".to_owned();
    tensors.insert(router.clone(), (vec![RANK, 64], vec![0.5; RANK * 64]));
    assert_says(read(&of_modules(), &tensors), &[&router, "adapts a router"]);
    let problems = AnyAdapter::problems(write(&of_modules(), &tensors).path(), &config());
    assert!(matches!(&problems[..], [AdapterError::Router { .. }]), "{problems:?}");
}

#[test]
fn a_header_of_thousands_of_experts_is_read() {
    // 128 experts in 48 blocks have 36,864 tensors, 442,368 values and separators.
    let many: Tensors = (0..36_864).map(|at| (format!("tensor.{at}"), (vec![0, 0], Vec::new()))).collect();
    let mut tensors = modules();
    tensors.extend(many);
    assert_says(read(&of_modules(), &tensors), &["tensor `tensor.0`"]);
    let too_many: Tensors =
        (0..44_000).map(|at| (format!("tensor.{at}"), (vec![0, 0], Vec::new()))).collect();
    assert_says(read(&of_modules(), &too_many), &["values and separators", "524288"]);
}

fn named(path: &str) -> NamedLora {
    NamedLora::read(&golden("adapters/experts").join(path)).unwrap()
}

#[test]
fn experts_are_compared_one_by_one_and_are_not_merged_into_files() {
    let both = named("mixtral/both");
    let layers = both.modules.keys().filter(|name| name.contains("experts")).count();
    assert_eq!((both.modules.len(), layers), (2 * (2 + 4 * 2), 2 * 4 * 2));
    let source = open(&golden("models/mixtral")).unwrap();
    let adapter = Adapter::read(&golden("adapters/experts/mixtral/both"), source.config()).unwrap();
    for module in adapter.modules().iter().filter(|module| module.target.is_of_expert()) {
        let Target::Expert(expert, target) = module.target else { unreachable!() };
        let part = if target == ExpertTarget::GateUp { "gate_up_proj" } else { "down_proj" };
        let name = format!("model.layers.{}.mlp.experts.{}.{part}", module.layer, expert.0);
        assert_eq!((&both.modules[&name].a, &both.modules[&name].b), (&module.a, &module.b), "{name}");
    }
    // The block without experts has two layers of its own.
    assert_eq!(named("qwen3moe/stacks").modules.len(), 2 + 2 * 8 * 3);
    for path in ["mixtral/both", "mixtral/shared", "mixtral/modules"] {
        let merged = NamedLora::merge(&[(named(path), 1.0)]);
        assert!(matches!(merged, Err(MergeError::Experts { .. })), "{merged:?}");
    }
}

#[test]
fn a_sum_has_the_experts_of_all_its_parts() {
    let source = open(&golden("models/mixtral")).unwrap();
    let read = |name: &str| {
        AnyAdapter::read(Path::new(&golden("adapters/experts/mixtral").join(name)), source.config()).unwrap()
    };
    let summed = sum(vec![(read("both"), 0.5), (read("down-rslora"), 2.0), (read("modules"), 1.0)]).unwrap();
    let ranks = |target| {
        let of =
            summed.modules().iter().filter(|module| module.target == Target::Expert(ExpertId(3), target));
        of.map(|module| module.rank).collect::<Vec<_>>()
    };
    assert_eq!(ranks(ExpertTarget::GateUp), [4, 4]);
    assert_eq!(ranks(ExpertTarget::Gate), [3, 3]);
    assert_eq!(ranks(ExpertTarget::Down), [4 + 6 + 3, 4 + 6 + 3]);
}
