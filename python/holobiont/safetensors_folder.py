"""A model's safetensors folder: its configuration, and its tensors that are no linear layers."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from .client_weights import is_given
from .protocol import SkeletonFile

__all__ = ["SafetensorsFolder"]


class SafetensorsFolder:
    """The folder at `path`, of whose `files` the catalog says what was given out."""

    def __init__(self, path: FilePath, files: tuple[SkeletonFile, ...]) -> None:
        self._path = path
        weights = [file for file in files if file.name.endswith(".safetensors")]
        self._file_of = {name: path / file.name for file in weights for name in _given(path / file.name, file)}

    def config(self) -> Any:
        """The configuration in `config.json`."""
        return AutoConfig.from_pretrained(self._path)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The tensor of that name; none if it was not given out."""
        file = self._file_of.get(name)
        if file is None:
            return None
        with safe_open(file, "pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name).to(dtype)
        return tensor


def _given(path: FilePath, file: SkeletonFile) -> list[str]:
    """The tensors of which all bytes were given out: the others are holes, and read as zeros."""
    with open(path, "rb") as stored:
        length = int.from_bytes(stored.read(8), "little")
        header = json.loads(stored.read(length))
    begin = 8 + length
    spans = {name: stored["data_offsets"] for name, stored in header.items() if name != "__metadata__"}
    return [name for name, (start, end) in spans.items() if is_given(file, begin + start, end - start)]
