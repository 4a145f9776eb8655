"""Flash attention 3 and 4 (arXiv 2407.08608), for Hopper and Blackwell GPUs, in place of torch's own, which is version 2.

A version that is installed is first tried on the heads of the model: one that fails, or gives other numbers, is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the launcher plans without torch
    import torch

logger = logging.getLogger(__name__)

Trial = Callable[[], "Sequence[torch.Tensor]"]


class Kernels(NamedTuple):
    """Where a version is."""

    version: int
    module: str

    @property
    def is_installed(self) -> bool:
        """Found without importing it, or the packages that it is in."""
        package, *inside = self.module.split(".")
        spec = find_spec(package)
        if spec is None or not inside:
            return spec is not None
        return any(
            Path(folder, *inside).with_suffix(".py").exists() for folder in spec.submodule_search_locations or ()
        )

    def register(self) -> Any:
        """Have torch take these kernels for its operators. Raises whatever they raise."""
        registration = import_module(f"torch.nn.attention._fa{self.version}")
        return getattr(registration, f"register_flash_attention_fa{self.version}")(self.module)

    def __str__(self) -> str:
        return f"FlashAttention {self.version} of {self.module.partition('.')[0]}"


TORCHS_OWN = "torch's own FlashAttention 2"
NEWEST_FIRST = (
    Kernels(4, "flash_attn.cute.interface"),  # the package flash-attn-4
    Kernels(4, "vllm.vllm_flash_attn.cute.interface"),
    Kernels(3, "flash_attn_interface"),
)


def installed(candidates: Sequence[Kernels] = NEWEST_FIRST) -> list[Kernels]:
    return [kernels for kernels in candidates if kernels.is_installed]


def activate_newest(trial: Trial, candidates: Sequence[Kernels] = NEWEST_FIRST) -> str:
    """Make torch use the newest version with which `trial` gives what it gives without. Returns its name."""
    import torch
    from torch.nn.attention import (
        activate_flash_attention_impl,
        register_flash_attention_impl,
        restore_flash_attention_impl,
    )

    restore_flash_attention_impl(_raise_warn=False)
    wanted: Sequence[torch.Tensor] | None = None
    for kernels in installed(candidates):
        wanted = wanted or trial()
        register_flash_attention_impl(str(kernels), register_fn=kernels.register)
        try:
            activate_flash_attention_impl(str(kernels))
            for ours, right in zip(trial(), wanted, strict=True):
                torch.testing.assert_close(ours, right, atol=2e-2, rtol=2e-2)
        except Exception as error:  # noqa: BLE001 - kernels, their compilers and their imports raise anything
            restore_flash_attention_impl(_raise_warn=False)
            logger.warning("%s is not used: %s", kernels, str(error).strip().partition("\n")[0])
            continue
        return str(kernels)
    return TORCHS_OWN


def trial_of(config: Any, dtype: torch.dtype, device: torch.device) -> Trial:
    """Attention of two segments in the heads of a model (the text part of its config), with its gradients: of each by itself, and
    of its queries with other keys, and in a window if the model has one."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    has_window = bool(getattr(config, "sliding_window", None))
    return partial(_attention, heads, kv_heads, size, dtype, device, has_window=has_window)


def _attention(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device, *, has_window: bool
) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = ((200, heads, size), (200, kv_heads, size), (200, kv_heads, size), (200, heads, size))
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    unused = torch.zeros(2, dtype=torch.uint64, device=device)
    results: list[torch.Tensor] = []
    cases: list[tuple[list[int], bool, dict[str, int]]] = [([0, 120, 200], True, {}), ([0, 50, 200], False, {})]
    if has_window:
        cases.append(([0, 120, 200], True, {"window_size_left": 60, "window_size_right": 0}))
    for ends_k, is_causal, window in cases:
        ends = [torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 120, 200], ends_k)]
        longest = [int(each.diff().max()) for each in ends]
        out, norm, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, *longest, 0.0, is_causal, False, **window
        )
        given = (grad, q, k, v, out, norm, *ends, *longest, 0.0, is_causal, unused, unused)
        results += [out, norm, *torch.ops.aten._flash_attention_backward(*given, **window)]
    return results
