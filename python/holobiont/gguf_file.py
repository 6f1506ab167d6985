"""A model's GGUF file in transformers' words: its configuration, and its tensors that are no linear layers.

Written out for the architectures of whose GGUF files the executor rents layers: ``llama`` (Mistral's files say that too),
``qwen2`` and ``qwen3``.
"""

from __future__ import annotations

import math
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape
from torch import Tensor
from transformers import AutoConfig

from .client_weights import is_given
from .errors import UnsupportedModel
from .gguf_header import read_header
from .protocol import SkeletonFile

__all__ = ["GgufFile"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_NAMES_IN_BLOCKS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Dequantized at once: an embedding is large, and need not be here twice.
_ROWS = 4096


class GgufFile:
    """The file at `path`, of which `file` says what was given out."""

    def __init__(self, path: FilePath, file: SkeletonFile) -> None:
        self._path = path
        self._file = file
        self._header = read_header(path, file)
        self._architecture = str(self._said("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            why = f"{file.name} is of the architecture {self._architecture!r}, and {known} are read"
            raise UnsupportedModel(f"{why}; load the model from files of your own, then holobiont.attach(model, ...)")

    def config(self) -> Any:
        """The configuration that its metadata call for."""
        of, tensors = self._of, self._header.tensors
        hidden, heads = of("embedding_length"), of("attention.head_count")
        window = of("attention.sliding_window")
        return AutoConfig.for_model(
            "mistral" if window and self._architecture == "llama" else self._architecture,
            vocab_size=tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=of("feed_forward_length"),
            num_hidden_layers=of("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=of("attention.head_count_kv", heads),
            head_dim=of("attention.key_length", hidden // heads),
            rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=of("context_length"),
            rope_theta=of("rope.freq_base", 10_000.0),
            rope_scaling=self._rope_scaling(),
            attention_bias="blk.0.attn_q.bias" in tensors,
            tie_word_embeddings="output.weight" not in tensors,
            bos_token_id=self._said("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._said("tokenizer.ggml.eos_token_id"),
            pad_token_id=self._said("tokenizer.ggml.padding_token_id"),
            **({"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0} if window else {}),
        )

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """What transformers calls `name`; none if it was not given out."""
        module, _, kind = name.rpartition(".")
        return self._dequantized(f"{_name_of(module)}.{kind}", dtype)

    def _dequantized(self, name: str, dtype: torch.dtype) -> Tensor | None:
        stored = self._header.tensors.get(name)
        if stored is None:
            return None
        kind = GGMLQuantizationType(stored.kind)
        shape = quant_shape_to_byte_shape(stored.shape, kind)
        if not is_given(self._file, stored.offset, math.prod(shape)):
            return None
        data = np.memmap(self._path, np.uint8, "r", stored.offset, shape)
        tensor = torch.empty(stored.shape, dtype=dtype)
        for rows, given in zip(tensor.split(_ROWS), np.split(data, range(_ROWS, len(data), _ROWS))):
            rows.copy_(torch.from_numpy(np.array(dequantize(given, kind))))
        return tensor

    def _said(self, key: str, otherwise: Any = None) -> Any:
        return self._header.metadata.get(key, otherwise)

    def _of(self, key: str, otherwise: Any = None) -> Any:
        """What the architecture's own metadata say."""
        return self._said(f"{self._architecture}.{key}", otherwise)

    def _rope_scaling(self) -> dict[str, Any] | None:
        """Divisors of the rotary frequencies: one for all, or one each, which transformers knows as LongRoPE."""
        factors = self._dequantized(_ROPE_FACTORS, torch.float32)
        if factors is not None:
            each, context = factors.tolist(), self._of("context_length")
            lengths = {"original_max_position_embeddings": context, "factor": 1.0, "attention_factor": 1.0}
            return {"rope_type": "longrope", "short_factor": each, "long_factor": each, **lengths}
        factor = self._of("rope.scaling.factor", self._of("rope.scale_linear"))
        if factor is None or self._of("rope.scaling.type") == "none":
            return None
        return {"rope_type": "linear", "factor": factor}


def _name_of(module: str) -> str:
    """What GGUF files call a module; itself if they have no name for it."""
    words = module.split(".", 3)
    if words[:2] == ["model", "layers"] and words[-1] in _NAMES_IN_BLOCKS:
        return f"blk.{words[2]}.{_NAMES_IN_BLOCKS[words[3]]}"
    return _NAMES.get(module, module)
