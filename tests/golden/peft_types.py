"""Every type of PEFT (`peft.PeftType`): configurations and random weights of the types that are served, and the options of the others.

`make_golden.py peft` writes the adapters, what they compute, and `peft.json`, which lists all types.
"""

import json
import re

import torch
from peft import (
    AdaLoraConfig,
    BeftConfig,
    C3AConfig,
    CartridgeConfig,
    CPTConfig,
    DeloraConfig,
    FourierFTConfig,
    GraloraConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    MultitaskPromptTuningConfig,
    PeftType,
    PolyConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    PveraConfig,
    RandLoraConfig,
    ShiraConfig,
    SupertuningConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
)
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SOME = ["q_proj", "down_proj"]

# Types with goldens elsewhere: the adapters of `make_golden.py tiny`.
ELSEWHERE = {"LORA": "rank4-attention", "IA3": "ia3", "PREFIX_TUNING": "prefix", "VERA": "vera"}


def of(config, dtype=F32, **options):
    """A configuration for text generation, and the data type it is stored in."""
    return config(task_type="CAUSAL_LM", **options), dtype


def first(config, dtype=F32, targets=SOME, **options):
    """The same for some layers of the first block."""
    return of(config, dtype, target_modules=targets, layers_to_transform=[0], **options)


# Served adapters by model: the name's part before a dash is PEFT's type in small letters.
SERVED = {
    "llama-tied": {
        "adalora": first(AdaLoraConfig, init_r=6, lora_alpha=6, total_step=10),
        "loha": first(LoHaConfig, r=3, alpha=6, rank_pattern={"q_proj": 2}),
        "loha-wide": first(LoHaConfig, F16, r=9, alpha=9),
        "lokr": of(LoKrConfig, target_modules=SOME, r=4, alpha=4, alpha_pattern={"down_proj": 6}),
        "lokr-both": first(LoKrConfig, r=2, alpha=2, decompose_both=True, decompose_factor=8),
        "vblora": first(VBLoRAConfig, r=2, topk=2, num_vectors=12, vector_length=16),
        "vblora-topk": first(VBLoRAConfig, r=2, topk=2, num_vectors=12, vector_length=16, save_only_topk_weights=True),
        "gralora": of(GraloraConfig, F16, target_modules=SOME, r=4, alpha=6, gralora_k=2, hybrid_r=2),
        "miss": first(MissConfig, r=20),
        "miss-mini": first(MissConfig, targets=["q_proj"], r=8, mini_r=16, init_weights="mini"),
        "delora": of(DeloraConfig, target_modules=SOME, r=4, rank_pattern={"q_proj": 2}),
        "randlora": first(RandLoraConfig, F16, targets=["v_proj", "o_proj"], r=8, randlora_alpha=8),
        "fourierft": first(FourierFTConfig, n_frequency=20),
        "c3a": first(C3AConfig, block_size=16),
        "shira": of(ShiraConfig, target_modules=["q_proj", "v_proj"], r=1, random_seed=3),
        "supertuning": of(SupertuningConfig, target_modules=["v_proj"], sparsity=0.98, r=2, lora_alpha=4),
        "pvera": first(PveraConfig, r=6),
        "poly": of(PolyConfig, F16, target_modules=["v_proj"], r=3, n_skills=3, n_splits=2),
        "prompt_tuning": of(PromptTuningConfig, num_virtual_tokens=5),
        "p_tuning": of(PromptEncoderConfig, num_virtual_tokens=4, encoder_hidden_size=16),
        "p_tuning-lstm": of(
            PromptEncoderConfig, F16, num_virtual_tokens=20, encoder_hidden_size=8, encoder_reparameterization_type="LSTM"
        ),
        "multitask_prompt_tuning": of(MultitaskPromptTuningConfig, num_virtual_tokens=4, num_tasks=1, num_ranks=2),
        "cpt": of(CPTConfig, cpt_token_ids=[4, 5, 6], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]),
        "cartridge": of(CartridgeConfig, F16, num_virtual_tokens=4),
        "trainable_tokens": of(TrainableTokensConfig, token_indices=[4, 9, 33, 120]),
        "lora-tokens": of(LoraConfig, r=2, target_modules=["q_proj"], trainable_token_indices=[9, 4, 250]),
        "beft": of(BeftConfig, target_modules=["v_proj", "down_proj"]),
    },
    "llama-rope3": {
        "trainable_tokens": of(TrainableTokensConfig, token_indices=[4, 9, 33]),
        "lora-tokens": of(
            LoraConfig, r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [9, 4], "lm_head": [8, 100]}
        ),
    },
    "qwen2-bias": {
        "lora-bias": of(LoraConfig, r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"], lora_bias=True),
        "beft": of(BeftConfig, F16, target_modules=["v_proj"]),
    },
    "phi3": {
        "lokr": of(LoKrConfig, target_modules=["qkv_proj", "down_proj"], r=2, alpha=2),
        "adalora": of(AdaLoraConfig, target_modules=["qkv_proj"], init_r=3, lora_alpha=3, total_step=10),
    },
    "gemma3": {"prompt_tuning": of(PromptTuningConfig, num_virtual_tokens=3)},
    "granite": {"prompt_tuning": of(PromptTuningConfig, num_virtual_tokens=3)},
}

def std_of(name, shape):
    """Standard deviation of a random parameter, such that a layer's change is about 0.4 times its output."""
    small = 0.05
    table = [
        (r"\.lora_A\.default$", shape[-1] ** -0.5),
        (r"\.lora_B\.default$", 0.4 * shape[-1] ** -0.5),
        (r"\.lora_E\.", 1),
        (r"\.hada_w1_a\.|\.hada_w2_a\.|\.lokr_w1\.|\.lokr_w1_a\.|\.lokr_w2_a\.", 1),
        (r"\.hada_w1_b\.|\.lokr_w1_b\.", shape[0] ** -0.5),
        (r"\.hada_w2_b\.|\.lokr_w2_b\.", small * shape[0] ** -0.5),
        (r"\.lokr_w2\.", small),
        (r"vblora_logits_", 1),
        (r"vblora_vector_bank", 0.26),
        (r"\.gralora_A\.|\.gralora_A_general\.", 0.15),
        (r"\.gralora_B\.|\.gralora_B_general\.", 0.15),
        (r"\.miss_block\.", small),
        (r"\.delora_A\.|\.delora_B\.", 1),
        (r"\.randlora_lambda\.", 1),
        (r"\.randlora_gamma\.", 0.006),
        (r"\.fourierft_spectrum\.", 0.5),
        (r"\.c3a_kernel\.", 3),
        (r"\.shira_weight\.|\.supertuning_values\.", 0.3),
        (r"\.supertuning_lora_[AB]\.", 0.2),
        (r"\.pvera_lambda_b\.", 0.2),
        (r"\.pvera_lambda_d\.|\.poly_router\.", 1),
        (r"\.poly_lora_A\.", 0.15),
        (r"\.poly_lora_B\.", 2),
        (r"\.beft_bias\.", 0.5),
        (r"mlp_head|lstm_head", (shape[-1] or 1) ** -0.5),
    ]
    return next((std for pattern, std in table if re.search(pattern, name)), None)


def randomize(name, parameter, generator):
    """Gives a parameter of one of these types random numbers; false for another."""
    if ".delora_lambda." in name:
        parameter.data = torch.full_like(parameter, 5.0)
        return True
    if "trainable_tokens_delta" in name:
        parameter.data = parameter.data + 0.2 * torch.randn(parameter.shape, generator=generator)
        return True
    if ".lora_B.default.bias" in name:
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        return True
    if "prefix_task_" in name:
        parameter.data = 0.5 + torch.randn(parameter.shape, generator=generator)
        return True
    if (std := std_of(name, parameter.shape)) is None:
        return False
    parameter.data = torch.randn(parameter.shape, generator=generator) * std
    return True


def type_of(name):
    """The type of PEFT that an adapter's name begins with."""
    return name.split("-")[0].upper()


def table():
    """Every type of PEFT: its served adapters as `model/name`, or the options that PEFT writes for a refused type."""
    rows = []
    for kind in sorted(kind.value for kind in PeftType):
        served = [f"{model}/{name}" for model, all_of in SERVED.items() for name in all_of if type_of(name) == kind]
        if kind in ELSEWHERE:
            served.append(f"llama-tied/{ELSEWHERE[kind]}")
        rows.append({"type": kind, "served": served, "options": None if served else options_of(kind)})
    return rows


def options_of(kind):
    """What PEFT writes into the configuration of a type; only the type where its configuration needs more packages."""
    options = {"target_modules": ["q_proj"]} if kind not in ("ADAPTION_PROMPT", "SHADOW", "XLORA") else {}
    try:
        written = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](task_type="CAUSAL_LM", **options).to_dict()
    except ImportError:
        written = options
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in written.items()}
    return json.loads(json.dumps({**plain, "peft_type": kind}, default=str))


def trained_tokens(config):
    """The tokens with rows of their own."""
    tokens = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or []
    return [token for part in tokens.values() for token in part] if isinstance(tokens, dict) else tokens
