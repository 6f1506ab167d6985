"""`model` and `tokenizer`: of a base that this process never held, from the endpoint alone.

What an executor gives out besides calls, its *skeleton*, has all that is no linear layer. The model is built without weights
(on torch's meta device), attached, and what is then still missing is read from the skeleton.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path as FilePath
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .client_weights import cached_skeleton
from .errors import UnsupportedModel
from .patch import attach, sessions
from .pool import Pool
from .session import Session
from .verification import Checks

__all__ = ["model", "tokenizer"]


def model(
    endpoint: str | os.PathLike[str] | Session,
    *,
    api_key: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    certificate_key: str | os.PathLike[str] | None = None,
    path: str | None = None,
    masking: str = "off",
    second: str | os.PathLike[str] | Session | None = None,
    pads: str | os.PathLike[str] | Pool | None = None,
    verify: str | os.PathLike[str] | Checks | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """The executor's base as a transformers model for causal language modelling, whose linear layers are remote.

    Use it as one that ``from_pretrained`` gave: PEFT, ``generate``, trainers. Embedding, norms, and a head that is tied to the
    embedding are here, fetched once into ``$XDG_CACHE_HOME/holobiont``; a head that is not is remote.

    - `endpoint`, `path`, `masking`, `second`, `pads`, `verify` and who you are: as for `attach`. A `Session` brings its own masking mode.
    - `dtype`: of what is here, of activations, and (bf16 as such, all else as f32) on the wire; without it the one that the
      model's configuration says, else 32 bits.

    Raises a `HolobiontError`; `UnsupportedModel` if the base cannot be built from its skeleton.
    """
    given = {"api_key": api_key, "ca": ca, "certificate": certificate, "certificate_key": certificate_key}
    with contextlib.ExitStack() as opened:
        session, aside = sessions(opened, endpoint, second, pads, masking=masking, **given)
        built = _built(session, aside, path, dtype, verify)
        opened.pop_all()
    return built


def tokenizer(endpoint: str | os.PathLike[str] | Session, **session: Any) -> Any:
    """The tokenizer of the executor's base, as ``AutoTokenizer`` reads it from the skeleton; options as of `Session`."""
    with contextlib.nullcontext(endpoint) if isinstance(endpoint, Session) else Session(endpoint, **session) as opened:
        folder = cached_skeleton(opened)
        gguf = _gguf_name(opened)
    return AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))


class _Files(Protocol):
    """A skeleton that is read."""

    def config(self) -> Any: ...

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor | None: ...


def _built(
    session: Session,
    aside: Session | Pool | None,
    path: str | None,
    dtype: torch.dtype | None,
    verify: str | os.PathLike[str] | Checks | None,
) -> Any:
    folder = cached_skeleton(session)
    files = _files(session, folder)
    built = _empty(session, files, dtype)
    second, pads = (aside, None) if isinstance(aside, Session) else (None, aside)
    attach(built, session, path=path, second=second, pads=pads, verify=verify, strict=True)
    _fill(built, session, files)
    if (folder / "generation_config.json").is_file():
        built.generation_config = GenerationConfig.from_pretrained(folder)
    return built.eval()


def _gguf_name(session: Session) -> str | None:
    """The base's GGUF file, if it is one."""
    return next((file.name for file in session.catalog.files if file.name.endswith(".gguf")), None)


def _files(session: Session, folder: FilePath) -> _Files:
    files, gguf = session.catalog.files, _gguf_name(session)
    if gguf is None:
        from .safetensors_folder import SafetensorsFolder

        return SafetensorsFolder(folder, files)
    try:
        from .gguf_file import GgufFile
    except ModuleNotFoundError as error:
        raise ImportError(f"{gguf} needs {error.name} to be read; pip install 'holobiont[gguf]'") from error
    return GgufFile(folder / gguf, next(file for file in files if file.name == gguf))


def _empty(session: Session, files: _Files, dtype: torch.dtype | None) -> Any:
    """The model without weights. Buffers are no weights: rotary frequencies are computed, not stored."""
    try:
        config = files.config()
        config.name_or_path = session.catalog.model
        with init_empty_weights(include_buffers=False):
            built = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    except (ValueError, OSError) as error:  # what transformers raises for configurations that it does not know
        raise _unsupported(session, str(error)) from error
    built.tie_weights()
    return built


def _fill(built: Any, session: Session, files: _Files) -> None:
    """Reads what is neither remote nor here."""
    found: dict[str, Tensor | None] = {}
    prefix = f"{built.base_model_prefix}."  # which files of a bare model leave out
    for name, parameter in built.named_parameters():
        if parameter.is_meta:
            tensors = (files.tensor(known, parameter.dtype) for known in (name, name.removeprefix(prefix)))
            found[name] = next((tensor for tensor in tensors if tensor is not None), None)
            if found[name] is None:
                raise _unsupported(session, f"the executor does not give out {name}")
    built.load_state_dict(found, strict=False, assign=True)
    built.tie_weights()


def _unsupported(session: Session, why: str) -> UnsupportedModel:
    what = f"{session.catalog.model} ({session.catalog.architecture}) cannot be built from its skeleton: {why}"
    return UnsupportedModel(f"{what}; load the model from files of your own, then holobiont.attach(model, ...)")
