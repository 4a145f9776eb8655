"""Pushes of adapters alone: what is sent, and how a server computes whole weights from it.

    trainer: for each adapted weight W two factors, `W.lora_B` (rows, r), scaling included, and `W.lora_A` (r, columns), float32
    server:  W = base + B @ A in float32, cast to the served dtype; base = the files that the server was started from

Both ends compare a digest of their base. Over gloo only: between GPUs, sending whole weights is faster than merging."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from grpo_async.errors import ConfigError
from grpo_async.utils.text import duplicates
from grpo_async.weights.buckets import DTYPE_NAMES, ParameterSpec, update_problems
from grpo_async.weights.weight_files import find_weights, open_weights

LORA_B, LORA_A = ".lora_B", ".lora_A"

_SAMPLED_ROWS = 3
_WHOLE_BYTES = 1 << 20


class BaseWeights:
    """The base model of the adapters, as the safetensors files of a folder or hub name hold it; opened on first use,
    memory-mapped."""

    def __init__(self, path: str, *, revision: str | None = None) -> None:
        self._path, self._revision = path, revision

    @cached_property
    def _handles(self) -> dict[str, Any]:
        """The open file of each tensor. Raises ConfigError when there are none, one is broken, or two hold the same
        tensor."""
        handles: dict[str, Any] = {}
        for file in find_weights(self._path, self._revision):
            handle = open_weights(file, "pt")
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in handles:
                    raise ConfigError(f"model.path: {name} is in two files of {file.parent}; copy the model again")
                handles[name] = handle
        return handles

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        specs = {}
        for name, handle in self._handles.items():
            part = handle.get_slice(name)
            if (dtype := DTYPE_NAMES.get(part.get_dtype())) is None:
                raise ConfigError(f"model.path: {name} is held as {part.get_dtype()}, which cannot be loaded")
            specs[name] = ParameterSpec(name=name, dtype_name=dtype, shape=tuple(part.get_shape()))
        return specs

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, and every tensor: up to 1 MiB all of it, of larger ones three rows, without
        reading all. Raises ConfigError without safetensors files."""
        sha = hashlib.sha256()
        for name, spec in sorted(self.specs.items()):
            sha.update(f"{name} {spec.dtype_name} {spec.shape}\n".encode())
            handle = self._handles[name]
            if spec.num_bytes <= _WHOLE_BYTES:
                parts = [handle.get_tensor(name)]
            else:
                rows, last = handle.get_slice(name), spec.shape[0] - 1
                chosen = sorted({number * last // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)})
                parts = [rows[row : row + 1] for row in chosen]
            for part in parts:
                sha.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def digest_or_none(self) -> str | None:
        try:
            return self.digest
        except ConfigError:
            return None

    def update_problems(
        self, specs: Sequence[ParameterSpec], served_shapes: Mapping[str, Sequence[int]], optional: Collection[str] = ()
    ) -> list[str]:
        """Why these factors cannot be added, or why base and adapters are no complete update; see `buckets.update_problems`."""
        factors = {spec.name: spec for spec in specs}
        merged = [spec for name, spec in self.specs.items() if name in served_shapes]
        problems = update_problems(merged, served_shapes, optional)
        problems += [f"{name} is sent twice" for name in duplicates(spec.name for spec in specs)]
        for weight in dict.fromkeys(spec.name.rpartition(".")[0] for spec in specs):
            served = self.specs.get(weight)
            pair = [factors.pop(weight + side, None) for side in (LORA_B, LORA_A)]
            if served is None or not _fit(pair, served.shape):
                wanted = "has no weight of this name" if served is None else f"has {list(served.shape)}"
                problems.append(f"{weight} needs two float32 factors that make its shape, and the base {wanted}")
        return problems + [f"{name} is no factor of a weight" for name in factors]

    def merge(
        self,
        factors: Iterable[tuple[str, torch.Tensor]],
        *,
        wanted: Collection[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter of the update that is `wanted` (empty: all), under the names of the files: those with factors
        merged on `device`, the others as views of the files, in the files' dtype and in host memory."""
        received = dict(factors)
        for name, handle in self._handles.items():
            if wanted and name not in wanted:
                continue
            tensor: torch.Tensor = handle.get_tensor(name)
            if name + LORA_B in received:
                b, a = (received[name + side].to(device) for side in (LORA_B, LORA_A))
                tensor = torch.addmm(tensor.to(device).float(), b, a).to(dtype)
            yield name, tensor


def _fit(pair: Sequence[ParameterSpec | None], shape: Sequence[int]) -> bool:
    b, a = pair
    if b is None or a is None or len(b.shape) != 2 or len(a.shape) != 2:
        return False
    makes_shape = b.shape[1] == a.shape[0] and (b.shape[0], a.shape[1]) == tuple(shape)
    return makes_shape and b.dtype_name == a.dtype_name == "float32"


def problems_with_base(own_digest: str, served_digest: str | None, path: str) -> list[str]:
    if served_digest is None:
        return [f"it has no safetensors files to add adapters to; set model.lora.push: merged (model.path: {path})"]
    if served_digest != own_digest:
        return [
            f"its weights before any push are not those of model.path: {path}, so adapters cannot be added to them; start it with "
            "this model, or set model.lora.push: merged"
        ]
    return []
