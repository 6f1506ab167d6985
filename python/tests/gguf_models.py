"""Tiny GGUF files of the architectures that executors rent, as llama.cpp's converter writes them."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGUFWriter
from models import LLAMA_LIKE
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

_SHAPE = {**LLAMA_LIKE, "head_dim": 16}
GGUF_MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA_LIKE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=False)),
}
_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def make_gguf(architecture):
    """The same weights every time; biases and norms are not left at 0 and 1."""
    torch.manual_seed(7)
    model = GGUF_MAKERS[architecture]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_gguf(model, path, rope_factors=None):
    """The model as a file; `rope_factors` divide its rotary frequencies, there and in the model."""
    config = model.config
    architecture = config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_words(writer, config.vocab_size)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
        model.model.rotary_emb.inv_freq /= torch.tensor(rope_factors)
    for name, parameter in model.named_parameters():
        stored = parameter.detach().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = _interleaved(stored)
        writer.add_tensor(_name_of(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer, count):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"w{i}" for i in range(count)])
    writer.add_token_types([1] * count)
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _name_of(name):
    module, _, kind = name.rpartition(".")
    words = module.split(".")
    if words[:2] == ["model", "layers"]:
        return f"blk.{words[2]}.{_MODULES[words[-1]]}.{kind}"
    return f"{_MODULES[module]}.{kind}"


def _interleaved(rows):
    """Rotary pairs beside each other instead of half a head apart."""
    return np.ascontiguousarray(rows.reshape(-1, 2, 8, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))
