#!/usr/bin/env python3
"""Makes the LoRAs of experts of this folder (see README.md) and what they compute, over the models as they lie here.

    make_experts.py

Three programs store factors of experts in three forms. PEFT's own form and that of transformers 4, which PEFT
converts, are read and computed by PEFT. Tinker's form is computed by adding `scale * B A` to each expert's weights.
"""

import json
import shutil

import torch
from make_golden import (
    EXPERTS,
    HERE,
    MODELS,
    REFUSED,
    is_sparse,
    lora,
    read_model,
    report,
    sort_sets,
    write_adapter,
    write_expected,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file

EFFECT = 0.4
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# Adapters that PEFT makes and saves: both parameters beside attention; one alone, without any linear layer; ranks and alphas by pattern.
BY_PEFT = {
    ("mixtral", "both"): (lora(4, ["q_proj", "o_proj"], target_parameters=PARAMETERS), F32),
    ("gptoss", "both"): (lora(4, ["q_proj", "o_proj"], target_parameters=PARAMETERS), F32),
    ("gptoss", "rows"): (lora(3, ["v_proj"], target_parameters=["gate_up_proj"]), F16),
    ("gptoss-mxfp4", "both"): (lora(4, ["q_proj", "o_proj"], target_parameters=PARAMETERS), F32),
    ("mixtral", "down-rslora"): (
        lora(6, [], target_parameters=["experts.down_proj"], use_rslora=True, lora_alpha=9),
        F16,
    ),
    ("qwen3moe", "gate-up"): (lora(5, ["v_proj"], target_parameters=["gate_up_proj"]), F32),
    ("qwen3moe", "patterns"): (
        lora(
            3,
            ["k_proj"],
            target_parameters=PARAMETERS,
            rank_pattern={"gate_up_proj": 5, r"model\.layers\.0\.mlp\.experts\.down_proj": 2},
            alpha_pattern={r".*experts\.down_proj": 9, "k_proj": 4},
        ),
        BF16,
    ),
}


class Factors:
    """Random factors such that a layer's delta is about `EFFECT` times its output."""

    def __init__(self, rank, scale, seed):
        self.rank, self.scale = rank, scale
        self.generator = torch.Generator().manual_seed(seed)

    def a(self, inputs, *experts):
        return torch.randn((*experts, self.rank, inputs), generator=self.generator) * inputs**-0.5

    def b(self, outputs, *experts):
        std = EFFECT / (self.scale * self.rank**0.5)
        return torch.randn((*experts, outputs, self.rank), generator=self.generator) * std


def write(folder, name, config, tensors, dtype):
    """A PEFT folder of tensors that are named without PEFT's prefix."""
    shutil.rmtree(folder, ignore_errors=True)
    config.base_model_name_or_path, config.inference_mode = f"holobiont/{name}", True
    config.save_pretrained(folder)
    sort_sets(folder / "adapter_config.json")
    tensors = {f"base_model.model.{key}.weight": t.to(dtype).contiguous() for key, t in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def modules():
    """A layer for each part of each expert, as transformers 4 names those of Mixtral, beside a layer of attention."""
    (config, _, _), rank = MODELS["mixtral"], 3
    hidden, width = config["hidden_size"], config["intermediate_size"]
    new, tensors = Factors(rank, 2, 71), {}
    for layer in range(config["num_hidden_layers"]):
        layers = {"self_attn.q_proj": (hidden, hidden)}
        for expert in range(config["num_local_experts"]):
            for part, shape in {"w1": (hidden, width), "w2": (width, hidden), "w3": (hidden, width)}.items():
                layers[f"block_sparse_moe.experts.{expert}.{part}"] = shape
        for part, (inputs, outputs) in layers.items():
            tensors[f"model.layers.{layer}.{part}.lora_A"] = new.a(inputs)
            tensors[f"model.layers.{layer}.{part}.lora_B"] = new.b(outputs)
    return lora(rank, ["q_proj", "w1", "w2", "w3"]), tensors


def stacks(name, rank, shared):
    """Tinker's form: w1 (gate) and w3 (up), and w2 (down), each of all experts; with `shared` the factors at the hidden
    side of an expert are one for all.
    """
    config, _, _ = MODELS[name]
    hidden = config["hidden_size"]
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    outer = 1 if shared else experts
    new, tensors = Factors(rank, 2, 72 + rank), {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp"
        if not is_sparse(config, layer):
            full = config["intermediate_size"]
            for part, (inputs, outputs) in {"gate_proj": (hidden, full), "down_proj": (full, hidden)}.items():
                tensors[f"{at}.{part}.lora_A"], tensors[f"{at}.{part}.lora_B"] = new.a(inputs), new.b(outputs)
            continue
        for part in ("w1", "w3"):
            tensors[f"{at}.experts.{part}.lora_A"] = new.a(hidden, outer)
            tensors[f"{at}.experts.{part}.lora_B"] = new.b(width, experts)
        tensors[f"{at}.experts.w2.lora_A"] = new.a(width, experts)
        tensors[f"{at}.experts.w2.lora_B"] = new.b(hidden, outer)
    return lora(rank, "all-linear"), tensors


@torch.no_grad()
def merged(model, folder):
    """The model with the deltas of a file in Tinker's form added to its weights."""
    options = json.loads((folder / "adapter_config.json").read_text())
    scale = options["lora_alpha"] / options["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        name = key.removesuffix(".lora_A.weight")
        delta = scale * tensors[f"{name}.lora_B.weight"].float() @ tensors[key].float()
        holder, _, part = name.removeprefix("base_model.model.").rpartition(".")
        module = model.get_submodule(holder)
        if part == "w2":
            module.down_proj += delta
        elif part in ("w1", "w3"):
            gate, up = module.gate_up_proj.chunk(2, dim=1)
            (gate if part == "w1" else up).add_(delta)
        else:
            getattr(module, part).weight += delta
    return model.eval()


def main():
    torch.set_num_threads(1)
    for name, adapters in EXPERTS.items():
        for nth, adapter in enumerate(adapters):
            folder, home = HERE / "models" / name, HERE / "adapters/experts" / name / adapter

            def base():
                return read_model(folder)  # noqa: B023

            if (name, adapter) in BY_PEFT:
                config, dtype = BY_PEFT[name, adapter]
                write_adapter(home, base(), config, dtype, 7100 + nth, 3 * EFFECT)
            elif adapter == "modules":
                write(home, name, *modules(), BF16)
            else:
                write(home, name, *stacks(name, 2 + nth, adapter == "shared"), F32)
            is_of_tinker = adapter in ("shared", "stacks")
            model = merged(base(), home) if is_of_tinker else PeftModel.from_pretrained(base(), home).eval()
            cases = write_expected(model, MODELS[name][0]["vocab_size"], name, f"experts/{adapter}")
            report(name, f"experts/{adapter}", cases, base())
    model, _, config = REFUSED["router"]
    write_adapter(HERE / "adapters/refused/router", read_model(HERE / "models" / model), config, F32, 7)


if __name__ == "__main__":
    main()
