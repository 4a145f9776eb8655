"""Reads what a model's folder says of it, headers and config.json only, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.weights.weight_files import no_weights, open_weights, weight_files


def model_problem(path: str) -> str | None:
    """Why the folder `path` cannot be loaded as a Hugging Face model, without the setting that names it. None: it can be, as far as
    file names and headers say."""
    folder = Path(path)
    if not folder.exists():
        return f"{path} does not exist (working directory: {Path.cwd()})"
    if not folder.is_dir():
        return f"{path} is a file; name the folder with config.json, the tokenizer and *.safetensors"
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json, so it is no Hugging Face model folder"
    try:
        text_config(folder)
        files = weight_files(folder)
        for file in files:
            _read_shapes(file)
    except ConfigError as error:
        return str(error).removeprefix("model.path: ")
    return None if files else no_weights(folder)


def count_parameters(model_path: str) -> int | None:
    """Parameters of a model folder, from the headers of its safetensors files; None when unknown (a hub name, other formats).

    A head that is tied to the embedding counts once, also where the files hold it twice. Worked example: Qwen3-0.6B
    (tied, 151936 x 1024 embedding) -> 596,049,920. ConfigError: a file is missing or broken.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return None
    shapes: dict[str, list[int]] = {}
    for file in weight_files(folder):
        shapes |= _read_shapes(file)
    if text_config(folder).get("tie_word_embeddings") is True and any("embed" in name for name in shapes):
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("lm_head.weight")}
    return sum(math.prod(shape) for shape in shapes.values()) or None


def _read_shapes(file: Path) -> dict[str, list[int]]:
    """Shapes of the floating-point tensors of a safetensors file. Raises ConfigError: see `open_weights`."""
    with open_weights(file, "numpy") as tensors:
        found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
        return {name: each.get_shape() for name, each in found.items() if "F" in each.get_dtype()}


def text_config(folder: Path) -> Mapping[str, Any]:
    """config.json, or the part of it that is about text (vision-language models); empty when there is none. ConfigError: it is
    broken."""
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
    return {**config, **inner} if isinstance(inner, dict) else config
