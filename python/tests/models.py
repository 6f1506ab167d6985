"""Tiny models of six architectures with random weights, and how they are served by the fake executor."""

from __future__ import annotations

import torch
from fake_executor import FakeExecutor, Weights
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 96
LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT_LIKE = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT_LIKE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA_LIKE, tie_word_embeddings=False)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**LLAMA_LIKE, head_dim=16)),
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**_GPT_LIKE)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**LLAMA_LIKE, tie_word_embeddings=False)),
}
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "qwen2": ["q_proj", "v_proj", "gate_proj"],
    "gemma": ["q_proj", "v_proj", "up_proj"],
    "gpt_bigcode": ["c_attn", "c_fc"],
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
}
LAYERS = 2
_GROUPS = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
# What is one layer in transformers, and the executor has as the layers of a group.
_FUSED = {"qkv_proj": (_GROUPS[0], (64, 32, 32)), "gate_up_proj": (_GROUPS[1], (96, 96))}


def make(architecture):
    """The same weights every time; biases and norms are not left at 0 and 1."""
    torch.manual_seed(7)
    model = MAKERS[architecture]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def sites(model, skip=()):
    """Every linear layer but those in `skip`; those that share their input as one site."""
    found: dict[tuple, list] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind not in ("Linear", "Conv1D") or name in skip:
            continue
        stem, _, last = name.rpartition(".")
        group = next((group for group in _GROUPS if last in group), last)
        weight = module.weight.detach().float()
        weight = (weight.T if kind == "Conv1D" else weight).contiguous().numpy().copy()
        bias = None if module.bias is None else module.bias.detach().float().numpy().copy()
        if last in _FUSED:
            parts, rows = _FUSED[last]
            ends = [sum(rows[: at + 1]) for at in range(len(rows))]
            for part, end, count in zip(parts, ends, rows):
                found.setdefault((stem, group), []).append(Weights(f"{stem}.{part}", weight[end - count : end], None))
            continue
        found.setdefault((stem, group), []).append(Weights(name, weight, bias))
    return list(found.values())


def serve(model, place, skip=(), socket="layers.zmq", **options):
    """A fake executor of the model's linear layers."""
    return FakeExecutor(place / socket, sites(model, skip), **options)
