"""Pushes of adapters alone: what travels, and how a server makes whole weights of it.

    trainer: for each adapted weight W two factors, `W.left` (rows, r) and `W.right` (r, columns), float32, scaling included
    server:  W = base + left @ right in float32, cast to the served dtype; base = the files that it was itself started from

The outcome is what a push of merged weights would bring, loaded in the same way. Both ends compare a digest of their base, so that
adapters never meet another model. Over gloo only: between GPUs whole weights travel faster than a server reads and merges its base.

Worked example: rank 16 at a (4096, 4096) matrix: 2 x 16 x 4096 x 4 = 0.5 MB travel instead of 33.5 MB in bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch

from grpo_async.errors import ConfigError
from grpo_async.weights.buckets import ParameterSpec, check_names
from grpo_async.weights.checkpoint_files import CheckpointFiles

LEFT, RIGHT = ".left", ".right"


class BaseWeights:
    """The model that adapters belong to, as its files hold it. Files are opened when they are first needed, and must be on this
    machine by then: whoever asks has loaded the model.

    Args:
        path: folder or hub name.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    @cached_property
    def files(self) -> CheckpointFiles:
        """Raises ConfigError when there are no safetensors files."""
        return CheckpointFiles.of(self._path, is_local=True)

    @cached_property
    def digest(self) -> str:
        """See `CheckpointFiles.digest`. Raises ConfigError as `files`."""
        return self.files.digest()

    def digest_or_none(self) -> str | None:
        """None when there are no safetensors files, so that no adapters can be added."""
        try:
            return self.digest
        except ConfigError:
            return None

    def problems(
        self, specs: Sequence[ParameterSpec], shapes: Mapping[str, Sequence[int]], optional: Collection[str] = ()
    ) -> list[str]:
        """What keeps these adapters from being added, and base and adapters from being a whole update; see `check_names`.

        Args:
            specs: of the factors.
            shapes, optional: of what the server serves.
        """
        by_name = {spec.name: spec for spec in specs}
        problems = [f"{spec.name} is sent twice" for spec in specs if by_name[spec.name] is not spec]
        for name in by_name:
            weight, _, side = name.rpartition(".")
            served = self.files.specs.get(weight)
            if f".{side}" not in (LEFT, RIGHT) or served is None:
                problems.append(f"{name} is not a factor of a weight of {self._path}")
                continue
            left, right = by_name.get(weight + LEFT), by_name.get(weight + RIGHT)
            if left is None or right is None:
                problems.append(f"{weight} has only one of its factors")
            elif not _fit(left, right, served.shape):
                problems.append(
                    f"the factors of {weight} are {left.dtype_name} {list(left.shape)} and {right.dtype_name} {list(right.shape)}, "
                    f"but have to be float32 and make {list(served.shape)}"
                )
        whole = [self.files.specs[name] for name in self._names({*shapes, *optional} if shapes else ())]
        return problems + check_names(whole, shapes, optional)

    def merge(
        self,
        factors: Iterable[tuple[str, torch.Tensor]],
        *,
        shapes: Collection[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the update, by the names of the files, one at a time. Those without adapters are views of the files,
        in the files' dtype and in host memory.

        Args:
            factors: as received; all of them come first.
            shapes: see `problems`; only the names matter.
            dtype: of the merged weights.
            device: where the products are computed.
        """
        received = dict(factors)
        for name in self._names(shapes):
            tensor = self.files.read(name)
            if name + LEFT in received:
                left, right = (received[name + side].to(device) for side in (LEFT, RIGHT))
                tensor = torch.addmm(tensor.to(device).float(), left, right).to(dtype)
            yield name, tensor

    def _names(self, shapes: Collection[str]) -> list[str]:
        """Tensors of the files that the server wants; of a server that cannot say what it wants, all of them."""
        return [name for name in self.files.specs if not shapes or name in shapes]


def _fit(left: ParameterSpec, right: ParameterSpec, shape: Sequence[int]) -> bool:
    if (left.dtype_name, right.dtype_name) != ("float32", "float32") or (len(left.shape), len(right.shape)) != (2, 2):
        return False
    return left.shape[1] == right.shape[0] and (left.shape[0], right.shape[1]) == tuple(shape)


def problems_with_base(own_digest: str, served_digest: str | None, path: str) -> list[str]:
    """Why a server cannot take adapters of the base at `path`; [] when it can."""
    if served_digest is None:
        return [f"it has no safetensors files to add adapters to; set model.lora.push: merged (model.path: {path})"]
    if served_digest != own_digest:
        return [
            f"its weights before any push are not those of model.path: {path}, so adapters cannot be added to them; start it with "
            "this model, or set model.lora.push: merged"
        ]
    return []
