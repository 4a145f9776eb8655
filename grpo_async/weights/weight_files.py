"""Finds the files of a model's folder that hold its weights. Does not import torch: checks before a run use it, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from grpo_async.errors import ConfigError, message_of
from grpo_async.utils.text import shortlist

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_NOT_TEXT = re.compile(
    r"(^|\.)(visual|vision_\w+|audio_\w+|mm_projector|multi_modal_projector|embed_vision|embed_audio|mtp)\."
    r"|rotary_emb\.inv_freq$"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder: those of its index, or the single file; none if it has neither. Raises ConfigError
    for a broken index."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE] if (folder / SINGLE).is_file() else []
    files = [folder / name for name in _names_in(index)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"model.path: {index} names files that are not there: {shortlist(missing, ', ')}")
    return files


def find_weights(path: str, revision: str | None = None) -> list[Path]:
    """The safetensors files of a model's folder, or of a hub name that was downloaded before in that revision (None: `main`)."""
    if (folder := Path(path)).is_dir():
        if files := weight_files(folder):
            return files
        raise ConfigError(f"model.path: {no_weights(folder)}")
    from transformers.utils.hub import cached_file  # slow import

    in_cache: dict[str, Any] = {"revision": revision, "local_files_only": True}
    try:
        index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False, **in_cache)
        names = [SINGLE] if index is None else _names_in(Path(index))
        return [Path(cached_file(path, name, **in_cache)) for name in names]
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot find the weights of {path!r}: {error}") from error


def _names_in(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model.path: {index} is broken: {message_of(error)}; copy the model again") from error


def open_weights(file: Path, framework: Literal["numpy", "pt"]) -> Any:
    """Open a safetensors file: read its header, and memory-map its tensors. Raises ConfigError if it is not complete."""
    try:
        return safe_open(file, framework=framework)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.path: {file} is not a complete safetensors file: {error}; copy the model again"
        ) from error


def text_weights(names: Iterable[str], *, num_layers: int | None) -> list[str]:
    """Select the tensors of a checkpoint that a trainer of its text part has. The others stay as they are: towers for images and
    sounds, layers that predict further tokens (after the `num_layers`, or named mtp), and tables of old checkpoints."""
    found = []
    for name in names:
        layer = _LAYER.search(name)
        is_further = layer is not None and num_layers is not None and int(layer[1]) >= num_layers
        if not is_further and not _NOT_TEXT.search(name):
            found.append(name)
    return found


def no_weights(folder: Path) -> str:
    if any((folder / name).is_file() for name in _PICKLED):
        return (
            f"{folder} holds its weights as pickled .bin files, which can run code when they are read; convert them "
            "once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder) writes safetensors"
        )
    return f"{folder} holds no weights that can be loaded: neither {SINGLE} nor {INDEX} exists"
