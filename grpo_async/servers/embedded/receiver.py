"""The embedded engine's end of a weight update: what an update has to bring, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from grpo_async.inference.surface import AdapterBase, ServedParameters
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.buckets import ParameterSpec, check_names
from grpo_async.weights.receiver import Named, UpdateRefusedError, WeightReceiver, listed


class EmbeddedReceiver(WeightReceiver):
    """A `WeightReceiver` that knows the whole model, so it refuses before the first byte.

    Args:
        expected: name -> parameter, as served; only dtype and shape are read.
        tied: further names of parameters -> their name in `expected`. They may be sent too, with the same values.
        device: where the model is.
        base: what pushed adapters may be added to.
    """

    def __init__(
        self,
        expected: Mapping[str, torch.Tensor],
        *,
        tied: Mapping[str, str],
        device: torch.device,
        base: BaseWeights,
    ) -> None:
        shapes = {name: list(tensor.shape) for name, tensor in expected.items()}
        super().__init__(device=device, base=base, shapes=shapes)
        self.parameters = ServedParameters(shapes=shapes, optional=list(tied))
        self._tied = dict(tied)
        self._dtypes = {name: tensor.dtype for name, tensor in expected.items()}
        self._dtypes |= {name: self._dtypes[source] for name, source in tied.items()}

    def describe(self) -> ServedParameters:
        """`parameters` with the digest of the base, which is computed once and takes a while with a large model."""
        return self.parameters.model_copy(update={"base_digest": self.base.digest_or_none()})

    def check(self, specs: Sequence[ParameterSpec], base: AdapterBase | None) -> None:
        tied_shapes = {name: self.parameters.shapes[source] for name, source in self._tied.items()}
        shapes, optional = self.parameters.shapes | tied_shapes, self.parameters.optional
        if base is not None:
            if base.digest != self.base.digest_or_none():
                raise UpdateRefusedError("adapters of another base than this server's; the old weights stay")
            problems = self.base.problems(specs, shapes, optional)
        else:
            served = {name: str(dtype).removeprefix("torch.") for name, dtype in self._dtypes.items()}
            problems = check_names(specs, shapes, optional) + [
                f"{spec.name} has the dtype {spec.dtype_name}, the server's {served[spec.name]}"
                for spec in specs
                if served.get(spec.name, spec.dtype_name) != spec.dtype_name
            ]
        if problems:
            raise _misfit(problems)

    def complete(self, received: Named) -> Named:
        by_name = dict(received)
        wrong = [
            f"{name} is {source} in the served model, but was sent with other values"
            for name, source in self._tied.items()
            if name in by_name and not _same_bytes(by_name[name], by_name[source])
        ]
        if wrong:
            raise _misfit(wrong)
        return [(name, tensor.to(self._dtypes[name])) for name, tensor in received if name not in self._tied]


def _misfit(problems: Sequence[str]) -> UpdateRefusedError:
    return UpdateRefusedError(f"the update does not fit the served model, the old weights stay: {listed(problems)}")


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
