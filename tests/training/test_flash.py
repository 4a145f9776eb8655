"""The choice of flash attention, with modules in place of kernels: torch registers them as it would those of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from grpo_async.training.flash import TORCHS_OWN, Kernels, activate_newest, trial_of

KERNELS = "_flash_attn_fwd = _flash_attn_bwd = None\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Kernels]]:
    """In the order of preference: one that cannot be imported, one that fails, one that is wrong, and one that works."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken", "fails", "wrong", "right"):
        (tmp_path / f"flash_{name}" / "cute").mkdir(parents=True)
        (tmp_path / f"flash_{name}" / "cute" / "interface.py").write_text("1 / 0" if name == "broken" else KERNELS)
    yield [Kernels(4, f"flash_{name}.cute.interface") for name in ("missing", "broken", "fails", "wrong", "right")]
    restore_flash_attention_impl(_raise_warn=False)
    for name in [each for each in sys.modules if each.startswith("flash_")]:
        del sys.modules[name]


def _trial() -> list[torch.Tensor]:
    active = current_flash_attention_impl() or ""
    if "fails" in active:
        raise AssertionError("head_dim 80 is not supported")
    return [torch.ones(3) + ("wrong" in active) + 1e-3 * ("right" in active)]


def test_the_newest_version_that_agrees_with_torchs_own_is_used(
    packages: Sequence[Kernels], caplog: pytest.LogCaptureFixture
) -> None:
    assert "flash_right" in activate_newest(_trial, packages)
    assert "flash_right" in (current_flash_attention_impl() or "")
    for name in ("broken", "fails", "wrong"):
        assert f"flash_{name}" in caplog.text
    restore_flash_attention_impl(_raise_warn=False)
    assert activate_newest(_trial, packages[:4]) == TORCHS_OWN


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 64])
def test_the_trial_runs_on_this_gpu(window: int | None) -> None:
    from transformers import Qwen3Config

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    config = Qwen3Config(**heads, sliding_window=window, use_sliding_window=window is not None)
    trial = trial_of(config, torch.bfloat16, torch.device("cuda"))
    assert all(tensor.isfinite().all() for tensor in trial())
    print(activate_newest(trial))
    assert all(tensor.isfinite().all() for tensor in trial())
    restore_flash_attention_impl(_raise_warn=False)
