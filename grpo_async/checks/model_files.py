"""Reads what a model's folder says of it, headers and config.json only, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_async.errors import ConfigError

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


def model_problem(path: str) -> str | None:
    """Why the folder `path` cannot be loaded as a Hugging Face model, without the setting that names it: None, it can be, as far as
    its names and headers say."""
    folder = Path(path)
    if not folder.exists():
        return f"{path} does not exist (working directory: {Path.cwd()})"
    if not folder.is_dir():
        return f"{path} is a file; name the folder with config.json, the tokenizer and *.safetensors"
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json, so it is no Hugging Face model folder"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors file"
    try:
        text_config(folder)
        for file in weight_files(folder):
            read_shapes(file)
    except ConfigError as error:
        return str(error).removeprefix("model.path: ")
    return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, else all.

    Raises:
        ConfigError: the index is broken.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"model.path: {index} is broken: {error!r}; copy the model again") from error
        return [folder / str(name) for name in names]
    return sorted(folder.glob("*.safetensors"))


def read_shapes(file: Path) -> dict[str, list[int]]:
    """Shapes of the floating-point tensors of a safetensors file: 8 bytes length, then so many bytes of JSON.

    Raises:
        ConfigError: it is no whole safetensors file.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError(f"its header would be {length} bytes long")
            text = stream.read(length)
        if len(text) < length:
            raise ValueError(f"it ends within its header, after {len(text)} of {length} bytes")
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole, size = 8 + length + max(ends, default=0), file.stat().st_size
        if size < whole:
            raise ValueError(f"it ends after {size} of {whole} bytes")
        return {
            name: [int(size) for size in entry["shape"]]
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] in _FLOATS
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} is no whole safetensors file: {error}; copy the model again") from error


def text_config(folder: Path) -> Mapping[str, Any]:
    """config.json, or the part of it that is about text (vision-language models); empty when there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {file} is no mapping; copy the model again")
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config
    for key, kind in (("model_type", str), ("layer_types", list), ("vocab_size", int)):
        if not isinstance(text.get(key), kind | None):
            raise ConfigError(f"model.path: {file} has {key}: {text[key]!r}; copy the model again")
    if not all(isinstance(name, str) for name in text.get("layer_types") or ()):
        raise ConfigError(f"model.path: {file} has layer_types: {text['layer_types']!r}; copy the model again")
    return text
