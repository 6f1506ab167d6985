"""A model's GGUF file in transformers' words: its configuration, and its tensors that are no linear layers.

Written out for the architectures of whose GGUF files the executor rents layers: ``llama`` (Mistral's files say that too),
``qwen2`` and ``qwen3``.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from torch import Tensor
from transformers import AutoConfig

from .errors import UnsupportedModel
from .protocol import SkeletonFile
from .skeleton import is_given

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


class GgufFile:
    """The file at `path`, of which `file` says what was given out."""

    def __init__(self, path: FilePath, file: SkeletonFile) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._file = file
        self._architecture = str(self._said("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            why = f"{file.name} is of the architecture {self._architecture!r}, and {known} are read"
            raise UnsupportedModel(f"{why}; load the model from files of your own, then holobiont.attach(model, ...)")

    def config(self) -> Any:
        """The configuration that its metadata call for."""
        of = self._of
        hidden, heads = of("embedding_length"), of("attention.head_count")
        window = of("attention.sliding_window")
        return AutoConfig.for_model(
            "mistral" if window and self._architecture == "llama" else self._architecture,
            vocab_size=len(self._tensors["token_embd.weight"].data),
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
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            tie_word_embeddings="output.weight" not in self._tensors,
            bos_token_id=self._said("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._said("tokenizer.ggml.eos_token_id"),
            pad_token_id=self._said("tokenizer.ggml.padding_token_id"),
            **({"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0} if window else {}),
        )

    def tensor(self, name: str) -> Tensor | None:
        """What transformers calls `name`, in 32 bits; none if it was not given out."""
        module, _, kind = name.rpartition(".")
        return self._dequantized(f"{_name_of(module)}.{kind}")

    def _dequantized(self, name: str) -> Tensor | None:
        found = self._tensors.get(name)
        if found is None or not is_given(self._file, found.data_offset, found.n_bytes):
            return None
        return torch.from_numpy(np.array(dequantize(found.data, found.tensor_type), dtype=np.float32))

    def _said(self, key: str, otherwise: Any = None) -> Any:
        field = self._reader.get_field(key)
        return otherwise if field is None else field.contents()

    def _of(self, key: str, otherwise: Any = None) -> Any:
        """What the architecture's own metadata say."""
        return self._said(f"{self._architecture}.{key}", otherwise)

    def _rope_scaling(self) -> dict[str, Any] | None:
        """Divisors of the rotary frequencies: one for all, or one each, which transformers knows as LongRoPE."""
        factors = self._dequantized(_ROPE_FACTORS)
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
