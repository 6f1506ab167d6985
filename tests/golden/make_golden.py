#!/usr/bin/env python3
"""Makes the golden values of this folder (see README.md) with transformers and PEFT.

    make_golden.py tiny [--only BEGINNING]               the tiny models, their adapters, what they compute
    make_golden.py kinds                                 of these the sums, and the adapters of other kinds, alone
    make_golden.py peft                                  of these the adapters of PEFT's other types, alone
    make_golden.py combinations                          what PEFT makes of two adapters by each type of combination
    make_golden.py real --gguf FILE [--adapter NAME=DIR] what the real model computes
    make_golden.py gemma --gguf FILE                     what Gemma 3 270M computes
    make_golden.py embeddings                            what tiny models and adapters make of prompts

The tiny models are written the way a publisher would (configuration and tensors by hand) and then read back by
transformers, so that the expected values follow from the files alone.
"""

import argparse
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

import peft_types
import torch
from peft import IA3Config, LoraConfig, PeftModel, PeftType, PrefixTuningConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
GREEDY_TOKENS = 32
PROMPT_LENGTHS = (1, 7, 40)
MIN_MARGIN = 0.02
MIN_DISTINCT = 8
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FUSED_LINEAR = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


# --- What every golden consists of ------------------------------------------------------------------------------


@torch.inference_mode()
def greedy(model, prompt):
    """First-step logits, the greedy tokens that follow `prompt`, and the top-1 minus top-2 logit of each step."""
    first, tokens, margins = None, [], []
    tasks = tasks_of(model)
    out = model(torch.tensor([prompt]), use_cache=True, **tasks)
    offsets = offsets_of(model, prompt)
    if has_prefix(model):
        tasks = {}
        # PEFT would put the prefix before every call: only the base model goes on from a cache.
        model = model.get_base_model()
    for _ in range(GREEDY_TOKENS):
        logits = out.logits[0, -1]
        first = logits if first is None else first
        top = torch.topk(logits, 2)
        tokens.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        # What follows an invocation is adapted; nothing is, where there was none.
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True, **offsets, **tasks)
    return first, tokens, margins


def invocation_of(model):
    """The tokens that invoke an activated adapter."""
    return getattr(model.active_peft_config, "alora_invocation_tokens", None) if isinstance(model, PeftModel) else None


def offsets_of(model, prompt):
    """How PEFT is told from where an activated adapter applies, once the prompt is no longer in its sight."""
    invocation = invocation_of(model)
    if not invocation:
        return {}
    size = len(invocation)
    is_invoked = any(prompt[at : at + size] == invocation for at in range(len(prompt) - size + 1))
    return {"alora_offsets": [1 if is_invoked else None]}


def tasks_of(model):
    """The task of a model whose adapter is for several; here there is one."""
    with_tasks = (PeftType.POLY, PeftType.MULTITASK_PROMPT_TUNING)
    is_one = isinstance(model, PeftModel) and model.active_peft_config.peft_type in with_tasks
    return {"task_ids": torch.tensor([0])} if is_one else {}


def has_prefix(model):
    """True for a model with virtual tokens."""
    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def short(values):
    """Floats with nine significant digits: enough to give every f32 back exactly."""
    return [float(f"{float(v):.9g}") for v in values]


def write_json(path, value):
    """One list of numbers a line: readable, and small in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1)
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda m: re.sub(r"\s+", " ", m.group()), text)
    path.write_text(text + "\n")


# --- Tiny models ------------------------------------------------------------------------------------------------


def llama_config(**changes):
    """A configuration in the style of Llama's published files."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 320,
    }
    return {**config, **changes}


def qwen_config(family, **changes):
    """The same for Qwen; the window is set but switched off, as in the published Qwen2 files."""
    own = {
        "architectures": [f"Qwen{family}ForCausalLM"],
        "model_type": f"qwen{family}",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 8,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    }
    return llama_config(**{**own, **changes})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

QWEN3 = qwen_config(3, head_dim=32, attention_bias=False, sliding_window=None)
del QWEN3["rope_theta"]
QWEN3["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}


def gemma3_config(**changes):
    """A configuration in the style of Gemma 3: one layer of three sees everything, the others have a window."""
    config = llama_config(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        head_dim=32,
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=3,
        query_pre_attn_scalar=20,
        rms_norm_eps=1e-6,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    )
    del config["hidden_act"], config["rope_theta"]
    return {**config, **changes}


# As files before transformers 5 have it, and as it writes it.
GEMMA3_OLD = gemma3_config(
    rope_theta=1000000.0, rope_local_base_freq=10000.0, rope_scaling={"rope_type": "linear", "factor": 8.0}
)
GEMMA3_NEW = gemma3_config(
    num_key_value_heads=1,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
)

GRANITE = llama_config(
    architectures=["GraniteForCausalLM"],
    model_type="granite",
    num_hidden_layers=3,
    embedding_multiplier=1.5,
    attention_multiplier=0.2,
    residual_multiplier=0.6,
    logits_scaling=0.7,
)

OLMO2 = llama_config(architectures=["Olmo2ForCausalLM"], model_type="olmo2", num_hidden_layers=3, pad_token_id=0)


def phi3_config(**changes):
    """A configuration in the style of Phi-3."""
    return llama_config(**{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0, **changes})


# Rotates 12 of 16 features of a head, more slowly beyond 96 tokens, which none of the cases has.
PHI3_LONGROPE = phi3_config(
    partial_rotary_factor=0.75,
    tie_word_embeddings=True,
    original_max_position_embeddings=96,
    rope_scaling={
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.4, 1.9, 2.6],
        "long_factor": [1.0, 1.3, 2.0, 4.0, 8.0, 16.0],
    },
)


def gemma2_config(**changes):
    """A configuration in the style of Gemma 2: every second layer sees everything, the others have a window."""
    config = llama_config(
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        head_dim=32,
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=3,
        query_pre_attn_scalar=20,
        rms_norm_eps=1e-6,
        sliding_window=8,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=9.0,
        tie_word_embeddings=True,
    )
    del config["hidden_act"]
    return {**config, **changes}


MIXTRAL = llama_config(
    architectures=["MixtralForCausalLM"],
    model_type="mixtral",
    intermediate_size=64,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_theta=1000000.0,
    sliding_window=None,
)


def qwen3_moe_config(**changes):
    """A configuration in the style of Qwen3's mixtures."""
    return qwen_config(
        3,
        **{
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 32,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "sliding_window": None,
            "tie_word_embeddings": False,
            **changes,
        },
    )


# Windows of 8 tokens in the first and third layer; YaRN's ramp covers three of a head's 16 pairs.
GPT_OSS = llama_config(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    attention_bias=True,
    experts_per_token=2,
    head_dim=32,
    intermediate_size=32,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    num_experts_per_tok=2,
    num_hidden_layers=3,
    num_local_experts=4,
    pad_token_id=0,
    rope_theta=150000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    sliding_window=8,
    swiglu_limit=7.0,
)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}

GEMMA2_TYPES = ["full_attention", "sliding_attention", "full_attention"]

MODELS = {
    "llama-tied": (llama_config(num_hidden_layers=3, tie_word_embeddings=True), torch.float32, 1),
    "llama-rope3": (llama_config(vocab_size=333, rope_scaling=LLAMA3_ROPE), torch.float32, 1),
    "mistral-window": (
        llama_config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8),
        torch.float32,
        1,
    ),
    "qwen2-bias": (qwen_config(2), torch.float32, 1),
    "qwen3-qknorm": (QWEN3, torch.float32, 1),
    "llama-bf16": (llama_config(tie_word_embeddings=True), torch.bfloat16, 1),
    "qwen2-f16": (qwen_config(2), torch.float16, 1),
    "llama-sharded": (llama_config(), torch.float32, 3),
    "gemma3": (GEMMA3_OLD, torch.float32, 1),
    "gemma3-bf16": (GEMMA3_NEW, torch.bfloat16, 1),
    "granite": (GRANITE, torch.float32, 1),
    "olmo2": (OLMO2, torch.float32, 1),
    "olmo2-bf16": ({**OLMO2, "tie_word_embeddings": True}, torch.bfloat16, 1),
    "phi3": (phi3_config(sliding_window=8), torch.float32, 1),
    "phi3-longrope": (PHI3_LONGROPE, torch.float32, 1),
    "phi3-bf16": (PHI3_LONGROPE, torch.bfloat16, 1),
    "gemma2": (gemma2_config(), torch.float32, 1),
    "gemma2-bf16": (gemma2_config(num_key_value_heads=1, layer_types=GEMMA2_TYPES), torch.bfloat16, 1),
    "mixtral": (MIXTRAL, torch.float32, 1),
    "mixtral-bf16": (MIXTRAL, torch.bfloat16, 1),
    "qwen3moe": (qwen3_moe_config(mlp_only_layers=[1]), torch.float32, 1),
    "qwen3moe-steps": (qwen3_moe_config(decoder_sparse_step=2, norm_topk_prob=False), torch.float32, 1),
    "gptoss": (GPT_OSS, torch.float32, 1),
    "gptoss-mxfp4": ({**GPT_OSS, "quantization_config": MXFP4}, torch.bfloat16, 1),
}

# Whose experts lie in one tensor for each block, as transformers 5 has them in memory and saves them if it is told to.
STACKED = ["mixtral-bf16"]


def is_sparse(config, layer):
    """Whether a layer has experts."""
    if config["model_type"] == "mixtral":
        return True
    if config["model_type"] != "qwen3_moe":
        return False
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def expert_shapes(config):
    """Routers and experts of a layer, by the names that published files have."""
    hidden = config["hidden_size"]
    if config["model_type"] == "mixtral":
        at, (gate, up, down) = "block_sparse_moe", ("w1", "w3", "w2")
        count, width = config["num_local_experts"], config["intermediate_size"]
    else:
        at, (gate, up, down) = "mlp", ("gate_proj", "up_proj", "down_proj")
        count, width = config["num_experts"], config["moe_intermediate_size"]
    shapes = {f"{at}.gate": (count, hidden)}
    for expert in range(count):
        of = {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
        shapes.update({f"{at}.experts.{expert}.{part}": shape for part, shape in of.items()})
    return shapes


def stacked(tensors):
    """The tensors of a mixture in the style of Mixtral with those of all experts of a layer in one."""
    rest = {n.replace("block_sparse_moe", "mlp"): t for n, t in tensors.items() if ".experts." not in n}
    for at in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        count = sum(name.startswith(f"{at}.experts.") and name.endswith(".w1.weight") for name in tensors)
        of = {part: [tensors[f"{at}.experts.{e}.{part}.weight"] for e in range(count)] for part in ("w1", "w2", "w3")}
        to = at.replace("block_sparse_moe", "mlp")
        both = [torch.cat(pair) for pair in zip(of["w1"], of["w3"])]
        rest.update({f"{to}.experts.gate_up_proj": torch.stack(both), f"{to}.experts.down_proj": torch.stack(of["w2"])})
    return rest


def gpt_oss_layer(config, weight):
    """Sinks, biases, router and experts of a layer of gpt-oss; some gates and factors exceed their limit."""
    hidden, width, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    sizes = {"q": heads * head_dim, "k": config["num_key_value_heads"] * head_dim, "v": config["num_key_value_heads"] * head_dim}
    return {
        **{f"self_attn.{name}_proj.bias": weight(size, std=0.5) for name, size in {**sizes, "o": hidden}.items()},
        "self_attn.sinks": weight(heads, std=2.0),
        "mlp.router.weight": weight(count, hidden, std=1.4 / hidden**0.5),
        "mlp.router.bias": weight(count, std=0.5),
        "mlp.experts.gate_up_proj": weight(count, hidden, 2 * width, std=4 / hidden**0.5),
        "mlp.experts.gate_up_proj_bias": weight(count, 2 * width, std=1.0),
        "mlp.experts.down_proj": weight(count, width, hidden, std=0.5 / width**0.5),
        "mlp.experts.down_proj_bias": weight(count, hidden, std=0.2),
    }


def mxfp4(tensors):
    """The tensors of gpt-oss with experts as blocks of MXFP4, rounded to nearest."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    stored = {}
    for name, tensor in tensors.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            stored[name] = tensor
            continue
        rows = tensor.float().transpose(1, 2)
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        exponents = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        codes = (blocks / 2**exponents)[..., None].sub(values).abs().argmin(-1).to(torch.uint8)
        stored[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        stored[f"{name}_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
    return stored


def random_tensors(config, generator):
    """Weights of `config`: large enough that attention is sharp, logits spread and greedy output varies."""
    hidden, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def weight(*shape, std):
        return torch.randn(shape, generator=generator) * std

    is_gemma = config["model_type"].startswith("gemma")

    def norm(size):
        # Gemma stores what is added to 1.
        return (0 if is_gemma else 1) + 0.2 * torch.randn(size, generator=generator)

    tensors = {"model.embed_tokens.weight": weight(vocab, hidden, std=0.3), "model.norm.weight": norm(hidden)}
    if is_gemma:
        # Embeddings are multiplied with 8 and are the head, too: smaller, or each token would only say itself.
        tensors["model.embed_tokens.weight"] /= 6
        tensors["model.norm.weight"] += 4
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = weight(vocab, hidden, std=0.3)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (ff, hidden),
            "mlp.up_proj": (ff, hidden),
            "mlp.down_proj": (hidden, ff),
        }
        if config["model_type"] == "phi3":
            shapes = {
                "self_attn.qkv_proj": (q + 2 * kv, hidden),
                "self_attn.o_proj": (hidden, q),
                "mlp.gate_up_proj": (2 * ff, hidden),
                "mlp.down_proj": (hidden, ff),
            }
        if config["model_type"] == "gpt_oss":
            shapes = {n: shape for n, shape in shapes.items() if not n.startswith("mlp.")}
            tensors.update({f"{at}{name}": tensor for name, tensor in gpt_oss_layer(config, weight).items()})
        if is_sparse(config, layer):
            shapes = {n: shape for n, shape in shapes.items() if not n.startswith("mlp.")} | expert_shapes(config)
        for name, shape in shapes.items():
            tensors[f"{at}{name}.weight"] = weight(*shape, std=1.4 / shape[1] ** 0.5)
            if config["model_type"] == "qwen2" and name[-6] in "qkv":
                tensors[f"{at}{name}.bias"] = weight(shape[0], std=0.5)
        if config["model_type"] == "olmo2":
            for name, size in {"self_attn.q_norm": q, "self_attn.k_norm": kv}.items():
                tensors[f"{at}{name}.weight"] = norm(size)
            for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
                tensors[f"{at}{name}.weight"] = norm(hidden)
            continue
        tensors[f"{at}input_layernorm.weight"] = norm(hidden)
        tensors[f"{at}post_attention_layernorm.weight"] = norm(hidden)
        if is_gemma:
            tensors[f"{at}post_attention_layernorm.weight"] += 2
            tensors[f"{at}pre_feedforward_layernorm.weight"] = norm(hidden)
            tensors[f"{at}post_feedforward_layernorm.weight"] = 2 + norm(hidden)
        if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
            tensors[f"{at}self_attn.q_norm.weight"] = norm(head_dim)
            tensors[f"{at}self_attn.k_norm.weight"] = norm(head_dim)
    return tensors


def write_model(folder, config, dtype, shards, seed):
    """A model's folder: configuration, and weights in one file or in shards with an index."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: t.to(dtype) for name, t in random_tensors(config, generator).items()}
    if folder.name in STACKED:
        tensors = stacked(tensors)
    if config.get("quantization_config") == MXFP4:
        tensors = {name: tensor.contiguous() for name, tensor in mxfp4(tensors).items()}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {**config, "torch_dtype": str(dtype).removeprefix("torch.")})
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    homes = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: t for name, t in tensors.items() if homes[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def read_model(folder):
    """The folder's model as transformers reads it, computing in f32."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    # transformers dequantizes the experts to 16 bits first.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain).float().eval()


# --- Quantized tiny models --------------------------------------------------------------------------------------


def gptq(**changes):
    """`quantization_config` in the style of published files."""
    own = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    return {**own, **changes}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}

QUANTIZED = {
    "llama-gptq": (llama_config(), gptq()),
    "qwen2-gptq-order": (qwen_config(2), gptq(sym=False, desc_act=True, checkpoint_format="gptq_v2")),
    "llama-gptq-rows": (llama_config(tie_word_embeddings=True), gptq(sym=False, group_size=-1)),
    "llama-gptq8": (llama_config(), gptq(bits=8, group_size=64)),
    "llama-awq": (llama_config(), AWQ),
    "phi3-gptq": (phi3_config(), gptq(sym=False)),
    "qwen3moe-gptq": (qwen3_moe_config(num_hidden_layers=2), gptq(sym=False)),
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def rounded(weight, groups, about):
    """Codes, zero points and scales of a matrix `[out, in]`, rounded to nearest; `groups` is the group of each input."""
    bits, count = about["bits"], int(groups.max()) + 1
    top, symmetric = 2**bits - 1, about.get("sym", False)
    codes = torch.zeros(weight.shape, dtype=torch.int32)
    zeros = torch.zeros(count, weight.shape[0], dtype=torch.int32)
    scales = torch.zeros(count, weight.shape[0])
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.min(1).values.clamp(max=0), part.max(1).values.clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        # Seven bits each: what a scale and a zero point give is then a number of 16 bits.
        scale = ((high - low) / top).to(torch.bfloat16).float()
        zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round()
        codes[:, groups == group] = (part / scale[:, None] + zero[:, None]).round().clamp(0, top).int()
        zeros[group], scales[group] = zero.int(), scale
    return codes, zeros, scales


def words(codes, bits, order=None):
    """Rows of codes `[rows, n]` as words of 32 bits `[rows, n * bits / 32]`, the first in the lowest bits."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    grouped = codes.reshape(codes.shape[0], -1, per_word).long()
    packed = sum(grouped[:, :, from_] << (bits * place) for place, from_ in enumerate(order))
    return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32)


def quantize(name, tensors, about):
    """A layer's stored parts by their names, and the weights that these stand for."""
    weight = tensors.pop(f"{name}.weight")
    inputs, bits = weight.shape[1], about["bits"]
    size = inputs if about["group_size"] == -1 else about["group_size"]
    groups = torch.arange(inputs) // size
    if about.get("desc_act"):
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    codes, zeros, scales = rounded(weight, groups, about)
    plain = scales[groups].T * (codes - zeros[groups].T)
    if about["quant_method"] == "awq":
        parts = {"qweight": words(codes.T, bits, AWQ_ORDER), "qzeros": words(zeros, bits, AWQ_ORDER)}
    else:
        less = 0 if about["checkpoint_format"] == "gptq_v2" else 1
        parts = {
            "qweight": words(codes, bits).T,
            "qzeros": words((zeros - less) % 2**bits, bits),
            "g_idx": groups.to(torch.int32),
        }
    parts["scales"] = scales.half()
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}, {f"{name}.weight": plain.contiguous()}


def write_quantized(folder, config, about, seed):
    """A model's folder with quantized layers; returns what transformers makes of their weights."""
    tensors = random_tensors(config, torch.Generator().manual_seed(seed))
    stored, plain = {}, {}
    for name in [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]:
        parts, weight = quantize(name, tensors, about)
        stored.update(parts)
        plain.update(weight)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as home:
        # Its name is written into adapters.
        twin = Path(home) / folder.name
        write_json(twin / "config.json", {**config, "torch_dtype": "float32"})
        save_file({**tensors, **plain}, twin / "model.safetensors", metadata={"format": "pt"})
        model = read_model(twin)
    write_json(folder / "config.json", {**config, "torch_dtype": "float16", "quantization_config": about})
    save_file({**tensors, **stored}, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def quantized(only):
    """The quantized models and their adapters, as `tiny` has the others; returns what the index has of them."""
    for seed, (name, (config, about)) in enumerate(QUANTIZED.items(), start=50):
        if not name.startswith(only):
            continue
        folder = HERE / "models" / name
        write_quantized(folder, config, about, seed)

        def model():
            return write_quantized(folder, config, about, seed)  # noqa: B023

        report(name, None, write_expected(model(), config["vocab_size"], name, None), None)
        for nth, (adapter, (lora_config, stored)) in enumerate(quantized_adapters(name).items()):
            home = HERE / "adapters" / name / adapter
            write_adapter(home, model(), lora_config, stored, 100 * seed + nth)
            peft = PeftModel.from_pretrained(model(), home).eval()
            report(name, adapter, write_expected(peft, config["vocab_size"], name, adapter), model())
    return [{"name": name, "adapters": list(quantized_adapters(name)), "sums": [], "others": []} for name in QUANTIZED]


# --- Tiny adapters ----------------------------------------------------------------------------------------------


def lora(rank, targets, **options):
    """A LoRA configuration with alpha twice its rank unless told otherwise."""
    return LoraConfig(r=rank, target_modules=targets, **{"lora_alpha": 2 * rank, "task_type": "CAUSAL_LM", **options})


def ia3(targets, feedforward, **options):
    """An IA3 configuration."""
    return IA3Config(target_modules=targets, feedforward_modules=feedforward, task_type="CAUSAL_LM", **options)


def vera(rank, targets, **options):
    """A configuration for VeRA, in the first block alone unless told otherwise, and how it is stored."""
    options = {"layers_to_transform": [0], "task_type": "CAUSAL_LM", **options}
    return VeraConfig(r=rank, target_modules=targets, **options), torch.float32


def prefix(tokens, **options):
    """A configuration for prefix tuning."""
    return PrefixTuningConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM", **options)


def direct_adapters():
    """Adapters without matrices, of every kind: on `llama-tied` and `qwen2-bias`, some on others."""
    f32, f16 = torch.float32, torch.float16
    return {
        "ia3": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), f32),
        "ia3-everything": (ia3([*ALL_LINEAR, "lm_head"], ["o_proj", "down_proj"]), f16),
        "ia3-patterns": (
            ia3(r".*\.(q_proj|o_proj|up_proj|down_proj)", r".*1\.(self_attn\.o|mlp\.down)_proj"),
            f32,
        ),
        "prefix": (prefix(5), f32),
        "prefix-projected": (prefix(20, prefix_projection=True, encoder_hidden_size=24), f16),
    }


def standard_adapters():
    """Name -> (configuration, dtype it is stored in): on `llama-tied` and `qwen3-qknorm`."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    patterns = {
        "rank_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 3, "layers.0.self_attn.v_proj": 12},
        "alpha_pattern": {"k_proj": 20, "layers.0.self_attn.k_proj": 30, "layers.1.mlp.down_proj": 9},
    }
    return {
        "rank4-attention": (lora(4, ATTENTION), f32),
        "rank16-all-linear": (lora(16, ALL_LINEAR), f32),
        "rank64-all-linear": (lora(64, ALL_LINEAR), bf16),
        "rank16-rslora": (lora(16, ATTENTION, use_rslora=True, lora_alpha=8), f32),
        "patterns": (lora(5, ALL_LINEAR, lora_alpha=10, **patterns), f32),
        "some-layers": (lora(8, ["q_proj", "up_proj"], layers_to_transform=[1]), f32),
        "rank8-f16": (lora(8, ["q_proj", "v_proj", "down_proj"]), f16),
        "rank8-bf16": (lora(8, ["q_proj", "v_proj", "down_proj"]), bf16),
    }


def fused_adapters():
    """The same in small for a model whose files have q, k and v in one layer, and gate and up in another."""
    f32, f16 = torch.float32, torch.float16
    patterns = {
        "rank_pattern": {"qkv_proj": 8, "layers.1.mlp.down_proj": 3, "layers.0.mlp.gate_up_proj": 12},
        "alpha_pattern": {"o_proj": 20, "layers.0.self_attn.qkv_proj": 30},
    }
    return {
        "rank4-attention": (lora(4, FUSED_LINEAR[:2]), f32),
        "rank16-all-linear": (lora(16, FUSED_LINEAR), f16),
        "rank16-rslora": (lora(16, FUSED_LINEAR[:2], use_rslora=True, lora_alpha=8), f32),
        "patterns": (lora(5, FUSED_LINEAR, lora_alpha=10, **patterns), f32),
        "some-layers": (lora(8, ["qkv_proj", "gate_up_proj"], layers_to_transform=[1]), f32),
        "ia3": (ia3(["qkv_proj", "gate_up_proj", "down_proj"], ["down_proj"]), f32),
    }


def adapters_of(model):
    """The adapters made for a tiny model."""
    regular = {
        "rank_pattern": {r"model\.layers\.[02]\.self_attn\.q_proj": 6},
        "alpha_pattern": {r".*\.(k|v)_proj": 24},
    }
    direct = direct_adapters()
    if model == "llama-tied":
        own = {"patterns-regex": (lora(4, ATTENTION, **regular), torch.float32)}
        activated = {"activated": (lora(8, ALL_LINEAR, alora_invocation_tokens=[5, 17, 99]), torch.float32)}
        return {**standard_adapters(), **own, **direct, **activated, "vera": vera(12, ALL_LINEAR)}
    if model == "qwen3-qknorm":
        return {**standard_adapters(), "prefix": direct["prefix"]}
    if model == "qwen2-bias":
        return direct
    if model in ("gemma3", "granite", "olmo2", "gemma2"):
        chosen = ["rank4-attention", "rank16-all-linear", "rank16-rslora", "patterns", "some-layers"]
        standard = standard_adapters()
        return {**{name: standard[name] for name in chosen}, "ia3": direct["ia3"], "prefix": direct["prefix"]}
    if model in ("mixtral", "qwen3moe"):
        standard = standard_adapters()
        chosen = {name: standard[name] for name in ("rank4-attention", "rank16-rslora")}
        # A LoRA would be of experts as well; of IA3 `down_proj` is that of the one block without.
        own = {"ia3": direct["ia3"]} if model == "qwen3moe" else {}
        return {**chosen, **own, "prefix": direct["prefix"]}
    if model in ("gptoss", "gptoss-mxfp4"):
        return {"rank4-attention": standard_adapters()["rank4-attention"]}
    if model == "phi3":
        return {**fused_adapters(), "prefix": direct["prefix"], "vera": vera(6, FUSED_LINEAR)}
    if model == "mistral-window":
        return {"prefix": direct["prefix"]}
    if model == "llama-rope3":
        return {"lm-head": (lora(8, ["q_proj", "v_proj", "lm_head"]), torch.float32)}
    return {}


def quantized_adapters(model):
    """The adapters made for a quantized model."""
    return {"rank16-all-linear": standard_adapters()["rank16-all-linear"]} if model in ("llama-gptq", "llama-awq") else {}


# Several adapters at once, each with a weight behind its name, by model.
SUMS = {
    "llama-tied": [
        "rank4-attention:0.7+rank16-rslora:0.5",
        "rank16-all-linear+rank8-f16:-0.5+some-layers:1.5",
        "rank8-f16:0.5+rank8-bf16:0.5",
        "rank64-all-linear:0.25",
    ],
    "qwen3-qknorm": ["rank8-bf16:0.6+rank16-all-linear:0.4"],
    "gemma3": ["rank4-attention:1.25+rank16-all-linear:-0.5"],
}


def dora(rank, targets, **options):
    """A configuration of a DoRA."""
    return lora(rank, targets, use_dora=True, **options)


# DoRAs by model: over weights of 32 and of 16 bits, with biases, and at a head.
DORAS = {
    "llama-tied": {"everything": (dora(8, ALL_LINEAR), torch.float32)},
    "llama-rope3": {"head": (dora(4, ["q_proj", "down_proj", "lm_head"]), torch.float32)},
    "qwen2-bias": {"biased": (dora(4, ["q_proj", "k_proj", "v_proj", "up_proj"], use_rslora=True), torch.float32)},
    "gemma3": {"some": (dora(4, ["o_proj", "gate_proj"]), torch.float16)},
    "llama-bf16": {"attention": (dora(4, ATTENTION), torch.float32)},
}

# LoRAs of the token embedding by model: one with the copy of the base's that PEFT adds by itself, and one where embeddings are scaled.
EMBEDDED = {
    "llama-tied": {"with-layers": (lora(4, ["embed_tokens", "q_proj", "down_proj"]), torch.float32)},
    "gemma3": {"alone": (lora(8, ["embed_tokens"], use_rslora=True), torch.float16)},
}

# LoRAs with an embedding or a head of their own by model: on a tied base alone, where PEFT leaves the head to the base, and as one;
# where embeddings are scaled and logits divided, and where logits are capped.
SAVED = {
    "llama-rope3": {"both": (lora(4, ["q_proj", "down_proj"], modules_to_save=["embed_tokens", "lm_head"]), torch.float16)},
    "llama-tied": {
        "embedding": (lora(2, ["q_proj"], modules_to_save=["embed_tokens"]), torch.float32),
        "tied": (lora(4, ["v_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True), torch.bfloat16),
        "two": (lora(4, ["embed_tokens", "v_proj"], modules_to_save=["lm_head"]), torch.bfloat16),
    },
    "granite": {"both": (lora(4, ["q_proj"], modules_to_save=["embed_tokens", "lm_head"]), torch.bfloat16)},
    "gemma2": {"head": (lora(4, ["q_proj"], modules_to_save=["lm_head"]), torch.bfloat16)},
    "gemma3": {"embedding": (lora(4, ["q_proj"], modules_to_save=["embed_tokens"]), torch.float16)},
}

# VeRAs by model whose shared matrices are not in the file: with a head, wider than other layers, and of layers that are several here.
# PyTorch takes the lower 32 bits of a key.
DRAWN = {
    "llama-rope3": {
        "head": vera(
            6,
            ["q_proj", "down_proj", "lm_head"],
            layers_to_transform=None,
            save_projection=False,
            projection_prng_key=2**40 + 7,
        )
    },
    "phi3": {"fused": vera(5, ["qkv_proj", "down_proj"], save_projection=False, projection_prng_key=-3)},
}

# LoRAs of experts by model, which make_experts.py makes in the forms of several programs.
EXPERTS = {
    "mixtral": ["both", "down-rslora", "modules", "shared"],
    "qwen3moe": ["gate-up", "patterns", "stacks"],
    "gptoss": ["both", "rows"],
    "gptoss-mxfp4": ["both"],
}

# Kinds of adapters that have a folder of their own.
OTHERS = {"dora": DORAS, "embedding": EMBEDDED, "saved": SAVED, "vera": DRAWN, "peft": peft_types.SERVED}

REFUSED = {
    "modules-to-save": ("llama-tied", "modules_to_save", lora(2, ["q_proj"], modules_to_save=["norm"])),
    "embeddings": ("llama-tied", "lora_embedding_A", lora(2, ["q_proj", "embed_tokens"], use_dora=True)),
    "bias-all": ("llama-tied", "bias", lora(2, ["q_proj"], bias="all")),
    "ia3-shared-input": ("llama-tied", "feedforward_modules", ia3(["gate_proj"], ["gate_proj"])),
    "router": ("mixtral", "target_parameters", lora(2, ["q_proj"], target_parameters=["mlp.gate.weight"])),
}


def write_adapter(folder, base, config, dtype, seed, effect=0.4):
    """A PEFT folder with random numbers, such that a module's delta is about `effect` times its output; the keys and
    values of a prefix are about as large as those of tokens. PEFT is told to add no copy of the base model's head or
    embedding.
    """
    shutil.rmtree(folder, ignore_errors=True)
    peft = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    scales = {n: m.scaling["default"] for n, m in peft.named_modules() if isinstance(getattr(m, "scaling", None), dict)}
    for name, parameter in peft.named_parameters():
        if peft_types.randomize(name, parameter, generator):
            continue
        if ".lora_embedding_A." in name:
            std = 1.0
        elif ".lora_embedding_B." in name:
            module = name.split(".lora_embedding_B.")[0]
            size = base.get_input_embeddings().weight.std().item()
            std = effect * size / (scales[module] * parameter.shape[1] ** 0.5)
        elif re.search(r"(embed_tokens|lm_head)\.modules_to_save\.", name):
            size = parameter.data.std().item()
            parameter.data = parameter.data + effect * size * torch.randn(parameter.shape, generator=generator)
            continue
        elif ".lora_A." in name:
            std = parameter.shape[1] ** -0.5
        elif ".lora_B." in name:
            module = name.split(".lora_B.")[0]
            std = effect / (scales[module] * parameter.shape[1] ** 0.5)
        elif ".lora_magnitude_vector." in name:
            parameter.data = parameter.data * (1 + effect * torch.randn(parameter.shape, generator=generator) / 2)
            continue
        elif ".vera_lambda_" in name:
            std = effect / 2 if ".vera_lambda_b." in name else 1
        elif ".ia3_l." in name:
            parameter.data = 1 + effect * torch.randn(parameter.shape, generator=generator)
            continue
        elif name.startswith("prompt_encoder."):
            std = 2 * parameter.shape[-1] ** -0.5 if ".transform." in name else 1.0
        else:
            continue
        parameter.data = torch.randn(parameter.shape, generator=generator) * std
    peft.peft_config["default"].base_model_name_or_path = "holobiont/" + base.config.name_or_path.split("/")[-1]
    peft.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_model.safetensors"
    stored = {n: t.to(dtype) if t.is_floating_point() else t for n, t in load_file(file).items()}
    save_file({n: t.contiguous() for n, t in stored.items()}, file, metadata={"format": "pt"})
    sort_sets(folder / "adapter_config.json")


def sort_sets(path):
    """PEFT writes its sets in hash order; sorted, they are the same on every run."""
    config = json.loads(path.read_text())
    config = {k: sorted(v) if isinstance(v, list) else v for k, v in config.items()}
    path.write_text(json.dumps(config, indent=2) + "\n")


# --- The two commands -------------------------------------------------------------------------------------------


def case_of(model, vocab, length, seed):
    """One case of a tiny model or adapter; `None` if a greedy choice is too close to call or the output is dull."""
    prompt = torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    if length > 7 and (invocation := invocation_of(model)):
        # Twice: the last counts. What is shorter never invokes it.
        for at in (length // 4, 3 * length // 4):
            prompt[at : at + len(invocation)] = invocation
    is_long = length > 1 and isinstance(model, PeftModel)
    if is_long and (trained := peft_types.trained_tokens(model.active_peft_config)):
        prompt[::3] = [trained[nth % len(trained)] for nth in range(len(prompt[::3]))]
    logits, tokens, margins = greedy(model, prompt)
    if min(margins) < MIN_MARGIN or len(set(tokens)) < MIN_DISTINCT:
        return None
    return {"prompt": prompt, "logits": short(logits), "greedy": tokens, "margins": short(margins)}


def write_expected(model, vocab, name, adapter):
    """Tries prompts of each length until one is good, and writes what was computed."""
    cases = [next(c for seed in range(300) if (c := case_of(model, vocab, n, seed))) for n in PROMPT_LENGTHS]
    path = HERE / "expected" / name / f"{adapter or 'base'}.json"
    write_json(path, {"model": name, "adapter": adapter, "cases": cases})
    return cases


def report(name, adapter, cases, base):
    """One line for the eye: how far logits spread, how far the adapter moves them, how varied greedy output is."""
    spread = max(max(c["logits"]) - min(c["logits"]) for c in cases)
    distinct = min(len(set(c["greedy"])) for c in cases)
    moved = 0.0
    if adapter:
        with torch.inference_mode():
            for case in cases:
                plain = base(torch.tensor([case["prompt"]])).logits[0, -1]
                moved = max(moved, float((plain - torch.tensor(case["logits"])).abs().mean()))
    margin = min(min(c["margins"]) for c in cases)
    about = f"spread {spread:5.1f} moved {moved:4.2f} distinct {distinct} margin {margin:.3f}"
    print(f"{name:16} {adapter or 'base':20} {about}")


def tiny(only):
    """Every tiny model with its adapters, or those whose names begin as `only` says; the index is of all."""
    index = {"models": [], "refused": []}
    for seed, (name, (config, dtype, shards)) in enumerate(MODELS.items()):
        if not name.startswith(only):
            index["models"].append(indexed(name))
            continue
        folder = HERE / "models" / name
        write_model(folder, config, dtype, shards, seed)
        cases = write_expected(read_model(folder), config["vocab_size"], name, None)
        report(name, None, cases, None)
        for nth, (adapter, (lora_config, stored)) in enumerate(adapters_of(name).items()):
            home = HERE / "adapters" / name / adapter
            write_adapter(home, read_model(folder), lora_config, stored, 100 * seed + nth)
            model = PeftModel.from_pretrained(read_model(folder), home).eval()
            assert all(p.dtype == torch.float32 for p in model.parameters())
            cases = write_expected(model, config["vocab_size"], name, adapter)
            report(name, adapter, cases, read_model(folder))
        write_sums(name, config["vocab_size"])
        write_others(name, config["vocab_size"])
        index["models"].append(indexed(name))
    index["models"] += quantized(only)
    for name, (model, because, lora_config) in REFUSED.items():
        index["refused"].append({"name": name, "model": model, "because": because})
        if not model.startswith(only):
            continue
        base = read_model(HERE / "models" / model)
        write_adapter(HERE / "adapters/refused" / name, base, lora_config, torch.float32, 7)
    write_json(HERE / "index.json", index)


EMBEDDINGS = [
    ("llama-tied", None),
    ("llama-tied", "rank16-all-linear"),
    ("llama-tied", "ia3-everything"),
    ("llama-tied", "prefix"),
    ("qwen3-qknorm", None),
    ("gemma3", None),
    ("gemma3", "rank16-all-linear"),
    ("granite", None),
]


@torch.inference_mode()
def embeddings():
    """The last hidden state of a prompt behind the final norm, and the mean of all of them."""
    cases = []
    for name, adapter in EMBEDDINGS:
        model, vocab = read_model(HERE / "models" / name), MODELS[name][0]["vocab_size"]
        if adapter:
            model = PeftModel.from_pretrained(model, HERE / "adapters" / name / adapter).eval()
        prompt = torch.randint(3, vocab, (40,), generator=torch.Generator().manual_seed(len(cases))).tolist()
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        assert len(states) == len(prompt)
        pooled = {"last": short(states[-1]), "mean": short(states.double().mean(0))}
        cases.append({"model": name, "adapter": adapter, "prompt": prompt, **pooled})
    write_json(HERE / "expected" / "embeddings.json", {"cases": cases})


def summed(base, model, asked):
    """`base` with a sum of adapters of `model`, such as `a:0.7+b`, by PEFT: ranks side by side, so that nothing is approximated."""
    parts = [part.partition(":") for part in asked.split("+")]
    names, weights = [name for name, _, _ in parts], [float(weight or 1) for _, _, weight in parts]
    homes = [HERE / "adapters" / model / name for name in names]
    peft = PeftModel.from_pretrained(base, homes[0], adapter_name=names[0])
    for name, home in zip(names[1:], homes[1:]):
        peft.load_adapter(home, name)
    peft.add_weighted_adapter(names, weights, "sum", combination_type="cat")
    peft.set_adapter("sum")
    for module in peft.modules():
        if "sum" in getattr(module, "lora_A", {}):
            # The judge is judged: what PEFT made is the sum, whatever it does with patterns and scales.
            found = [(n, w) for n, w in zip(names, weights) if n in module.lora_A]
            expected = sum(weight * module.get_delta_weight(name) for name, weight in found)
            assert torch.allclose(module.get_delta_weight("sum"), expected, atol=1e-6)
    return peft.eval()


# Stored in 32 bits: of 16-bit values many have one magnitude, and pruning may take any of them.
COMBINED = ["rank16-all-linear", "rank16-rslora"]
COMBINATIONS = [
    {"combination_type": "linear"},
    {"combination_type": "svd", "svd_rank": 5},
    {"combination_type": "ties", "density": 0.6, "majority_sign_method": "total"},
    {"combination_type": "ties", "density": 0.3, "majority_sign_method": "frequency"},
    {"combination_type": "magnitude_prune", "density": 0.5},
    {"combination_type": "dare_ties", "density": 1.0, "majority_sign_method": "total"},
]


def combinations():
    """Two adapters of `llama-tied`, combined: the factors of one layer. Random choices are tried with a density of 1."""
    peft = PeftModel.from_pretrained(
        read_model(HERE / "models/llama-tied"), HERE / "adapters/llama-tied" / COMBINED[0], adapter_name="one"
    )
    peft.load_adapter(HERE / "adapters/llama-tied" / COMBINED[1], "two")
    module = "model.layers.0.self_attn.v_proj"
    cases = []
    for nth, options in enumerate(COMBINATIONS):
        weights = [0.7, -0.4]
        peft.add_weighted_adapter(["one", "two"], weights, f"combined{nth}", **options)
        layer = peft.get_submodule(f"base_model.model.{module}")
        assert layer.scaling[f"combined{nth}"] == 1
        weights_of = [of[f"combined{nth}"].weight.flatten() for of in (layer.lora_A, layer.lora_B)]
        factors = [[float(f"{float(value):.6g}") for value in values] for values in weights_of]
        cases.append({**options, "weights": weights, "a": factors[0], "b": factors[1]})
    of = {"model": "llama-tied", "adapters": COMBINED, "module": module}
    write_json(HERE / "expected/llama-tied/combinations.json", {**of, "cases": cases})


def write_sums(name, vocab):
    """What sums of adapters of a tiny model compute."""
    for nth, asked in enumerate(SUMS.get(name, [])):
        cases = write_expected(summed(read_model(HERE / "models" / name), name, asked), vocab, name, f"sum/{nth}")
        report(name, asked, cases, read_model(HERE / "models" / name))


def write_others(name, vocab, kinds=OTHERS):
    """Adapters of other kinds of a tiny model, and what they compute."""
    for kind, adapters in kinds.items():
        for nth, (adapter, (config, stored)) in enumerate(adapters.get(name, {}).items()):
            home, folder = HERE / "adapters" / kind / name / adapter, HERE / "models" / name
            write_adapter(home, read_model(folder), config, stored, 7000 + nth, adapter == "with-layers")
            model = PeftModel.from_pretrained(read_model(folder), home).eval()
            cases = write_expected(model, vocab, name, f"{kind}/{adapter}")
            report(name, f"{kind}/{adapter}", cases, read_model(folder))


def indexed(name):
    """What there is of a tiny model."""
    kinds = [(kind, adapters.get(name, {})) for kind, adapters in [*OTHERS.items(), ("experts", EXPERTS)]]
    return {
        "name": name,
        "adapters": list(adapters_of(name)),
        "sums": SUMS.get(name, []),
        "others": [f"{kind}/{adapter}" for kind, adapters in kinds for adapter in adapters],
    }


def kinds():
    """Sums, and adapters of other kinds, over models and adapters as they lie here."""
    for name, (config, _, _) in MODELS.items():
        write_sums(name, config["vocab_size"])
        write_others(name, config["vocab_size"])
    write_index()


def write_index():
    """The index, over everything as it lies here."""
    refused = [{"name": name, "model": model, "because": because} for name, (model, because, _) in REFUSED.items()]
    write_json(HERE / "index.json", {"models": [indexed(name) for name in MODELS] + quantized("none"), "refused": refused})
    write_json(HERE / "peft.json", {"types": peft_types.table()})


def peft(only):
    """The adapters of PEFT's other types whose names begin as `only` says, over models as they lie here."""
    for name, adapters in peft_types.SERVED.items():
        chosen = {adapter: of for adapter, of in adapters.items() if adapter.startswith(only)}
        write_others(name, MODELS[name][0]["vocab_size"], {"peft": {name: chosen}})
    write_index()


CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "Name three fruits."},
    ],
    [
        {"role": "user", "content": "My name is Ada and I like rivers."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "Write one sentence about what I like, as if it were 2026. Ünïcödé is welcome: 河流 🌊"},
    ],
]
PROBE_IDS = [0, 1, 2, 28, 198, 253, 504, 1000, 2683, 5000, 7042, 12345, 20000, 30000, 40000, 49151]


def real_case(model, tokenizer, messages):
    """What the real model computes after one chat."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    logits, tokens, margins = greedy(model, prompt)
    end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    return {
        "messages": messages,
        "text": text,
        "prompt": prompt,
        **said(logits, tokens, margins, PROBE_IDS),
        "greedy_text": tokenizer.decode(tokens[:end]),
    }


def said(logits, tokens, margins, probes):
    """What a model said: its first logits, the largest and the probes, and its greedy tokens."""
    top = torch.topk(logits, 32)
    return {
        "top": [[int(i), v] for i, v in zip(top.indices, short(top.values))],
        "probes": short(logits[probes]),
        "greedy": tokens,
        "margins": short(margins),
    }


def real(gguf, adapters):
    """The real model's base, then each adapter, from the dequantized GGUF file."""
    source = {"gguf_file": gguf.name}
    base = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    for adapter, folder in [(None, None), *adapters]:
        model = PeftModel.from_pretrained(base, folder).eval() if adapter else base
        assert all(p.dtype == torch.float32 for p in model.parameters())
        cases = [real_case(model, tokenizer, messages) for messages in CHATS]
        about = {"model": gguf.name, "sha256": sha256, "adapter": adapter, "eos": tokenizer.eos_token_id}
        golden = {**about, "probe_ids": PROBE_IDS, "cases": cases}
        write_json(HERE / "expected/smollm2-q4_1" / f"{adapter or 'base'}.json", golden)
        for case in cases:
            print(f"{adapter or 'base':10} margin {min(case['margins']):.4f} {case['greedy_text']!r}")
        if adapter:
            base = model.unload()


TEXTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "1, 2, 3, 4, 5,"]
GEMMA_PROBES = [0, 1, 2, 106, 107, 108, 236743, 1000, 5000, 20000, 50000, 100000, 150000, 200000, 250000, 262143]


def gemma(gguf):
    """The base model Gemma 3 270M, from its dequantized GGUF file; more tokens in one of the texts than its window has."""
    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    cases = []
    for text in [*TEXTS, " ".join(f"Line {i}: the river is {i * i % 89} metres deep." for i in range(45))]:
        prompt = tokenizer(text).input_ids
        logits, tokens, margins = greedy(model, prompt)
        told = said(logits, tokens, margins, GEMMA_PROBES)
        cases.append({"text": text, "prompt": prompt, **told, "greedy_text": tokenizer.decode(tokens)})
        print(f"{len(prompt):4} tokens, margin {min(margins):.4f} {cases[-1]['greedy_text']!r}")
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    golden = {"model": gguf.name, "sha256": sha256, "adapter": None, "probe_ids": GEMMA_PROBES, "cases": cases}
    write_json(HERE / "expected/gemma3-270m-q4_k_m/base.json", golden)


def named_folder(text):
    """`NAME=DIR` of the command line."""
    name, _, folder = text.partition("=")
    return name, Path(folder)


def main():
    """Parses the command line and runs one command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("tiny")
    command.add_argument("--only", default="", metavar="BEGINNING")
    commands.add_parser("kinds")
    commands.add_parser("combinations")
    command = commands.add_parser("peft")
    command.add_argument("--only", default="", metavar="BEGINNING")
    command = commands.add_parser("real")
    command.add_argument("--gguf", type=Path, required=True)
    command.add_argument("--adapter", type=named_folder, action="append", default=[], metavar="NAME=DIR")
    command = commands.add_parser("gemma")
    command.add_argument("--gguf", type=Path, required=True)
    commands.add_parser("embeddings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "tiny":
        tiny(arguments.only)
    elif arguments.command == "kinds":
        kinds()
    elif arguments.command == "combinations":
        combinations()
    elif arguments.command == "peft":
        peft(arguments.only)
    elif arguments.command == "gemma":
        gemma(arguments.gguf)
    elif arguments.command == "embeddings":
        embeddings()
    else:
        real(arguments.gguf, arguments.adapter)


if __name__ == "__main__":
    main()
