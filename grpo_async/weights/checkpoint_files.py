"""The safetensors files of a model: which tensors they hold, and any part of one.

Used at both ends: the trainer loads its shards from them, a server adds pushed adapters to them. Nothing is read before it is asked
for, and only as much as is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from grpo_async.errors import ConfigError
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.weight_files import INDEX, SINGLE, names_in, no_weights, open_weights, weight_files

_DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_SAMPLED_ROWS = 3


class CheckpointFiles:
    """Open files of one model. They are mapped: nothing is read before it is used.

    Raises:
        ConfigError: a file is missing, no whole safetensors file, or holds a tensor that another one holds too.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._handles: dict[str, Any] = {}  # by the name of the tensor
        self.specs: dict[str, ParameterSpec] = {}
        for file in files:
            handle = open_weights(file, "pt")
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._handles:
                    raise ConfigError(f"model.path: {name} is in two files of {file.parent}; copy the model again")
                part = handle.get_slice(name)
                dtype = _DTYPE_NAMES.get(part.get_dtype())
                if dtype is None:
                    raise ConfigError(f"model.path: {file} holds {name} as {part.get_dtype()}, which cannot be loaded")
                self._handles[name] = handle
                self.specs[name] = ParameterSpec(name=name, dtype_name=dtype, shape=tuple(part.get_shape()))

    @classmethod
    def of(cls, path: str, *, revision: str | None = None, is_local: bool = False) -> CheckpointFiles:
        """The files of a folder, or of a name on a hub.

        Args:
            revision: of a hub name; None: the newest.
            is_local: do not ask the hub itself, take only what was fetched from it.

        Raises:
            ConfigError: there are none, or they are of another format.
        """
        return cls(find_files(path, revision=revision, is_local=is_local))

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor; its memory is the file's, so do not write to it."""
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Entries start..stop of the first dimension, (stop - start, ...); of a tensor without dimensions, all of it. Its memory
        may be the file's, so do not write to it."""
        if not self.specs[name].shape:
            return self.read(name)
        rows: torch.Tensor = self._handles[name].get_slice(name)[start:stop]
        return rows

    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, and three rows of every tensor. Two models that differ in anything that training
        changes differ in it, without reading all of them."""
        sha = hashlib.sha256()
        for name in sorted(self.specs):
            spec = self.specs[name]
            sha.update(f"{name} {spec.dtype_name} {spec.shape}\n".encode())
            if not spec.shape or not spec.num_bytes:
                continue
            num_rows = spec.shape[0]
            for row in sorted({number * (num_rows - 1) // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)}):
                values = self.read_rows(name, row, row + 1).contiguous().reshape(-1)
                sha.update(values.view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def find_files(path: str, *, revision: str | None = None, is_local: bool = False) -> list[Path]:
    """The safetensors files of a model's folder or of a hub name (fetched, or taken from the cache).

    Raises:
        ConfigError: see `CheckpointFiles.of`.
    """
    folder = Path(path)
    if not folder.is_dir():
        return _find_on_hub(path, revision=revision, is_local=is_local)
    files = weight_files(folder)
    if not files:
        raise ConfigError(f"model.path: {no_weights(folder)}")
    return files


def _find_on_hub(path: str, *, revision: str | None, is_local: bool) -> list[Path]:
    from transformers.utils.hub import cached_file

    given = {"revision": revision, "local_files_only": is_local}
    try:
        index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False, **given)
        names = [SINGLE] if index is None else names_in(Path(index))
        return [Path(cached_file(path, name, **given)) for name in names]
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot load a model from {path!r}: {error}") from error
