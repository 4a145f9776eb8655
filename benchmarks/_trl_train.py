"""A run of TRL's AsyncGRPOTrainer, for against_trl.

The trainer and its rollout worker are the installed TRL's, unmodified. Only what needs a GPU is replaced: the weight transfer
(NCCL) by the very push that our side makes (EqualPush), the attention kernel by the same computation on the CPU (CpuKernel), and
the query of the GPU's peak FLOP/s. Options that differ from TRL's defaults: float32 throughout (as the server and our side), no
gradient checkpointing (it only costs time here), a fixed number of samples a step (as ours), no logging service, no checkpoints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks._server import read_lines
from benchmarks.against_trl import COMPLETION_TOKENS, GROUP_SIZE, GROUPS_PER_STEP, LR, MAX_STALENESS, low_ids
from grpo_async.config.sections import WeightsSection
from grpo_async.inference.control import ServerControl
from grpo_async.utils.text import dtype_name
from grpo_async.weights.buckets import GatheredParameters, ParameterSpec
from grpo_async.weights.push import WeightTransport, push_weights

BUCKET_BYTES = 8 << 20  # what a run takes for a model of at most 512 MiB
TIMEOUT_S = 120.0


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    build_trainer(given).train()


def build_trainer(given: dict[str, Any]) -> Any:
    """TRL's trainer, ready to train."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = CpuKernel
    async_grpo_trainer.get_peak_flops_per_device = no_peak_flops
    inputs = Path(given["inputs"])
    rows = read_lines(inputs / "prompts.jsonl")
    trainer = AsyncGRPOTrainer(
        model=str(inputs / "model"),
        reward_funcs=low_ids,
        args=AsyncGRPOConfig(**trainer_options(given)),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        weight_transfer=EqualPush(given["server_url"]),
    )
    trainer.add_callback(step_writer(Path(given["folder"]) / "steps.jsonl"))
    return trainer


def no_peak_flops(accelerator: Any, dtype: str) -> None:
    """Stands for TRL's function, which asks CUDA for the device's name. None: unknown, so that TRL logs no utilization."""


def trainer_options(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of TRL's AsyncGRPOConfig."""
    return {
        "output_dir": given["folder"],
        "max_steps": given["max_steps"],
        "per_device_train_batch_size": GROUPS_PER_STEP * GROUP_SIZE,
        "gradient_accumulation_steps": 1,
        "token_budget": 0,  # a fixed number of samples a step
        "num_generations": GROUP_SIZE,
        "max_completion_length": COMPLETION_TOKENS,
        "temperature": 1.0,
        "max_staleness": MAX_STALENESS,
        "max_inflight_tasks": given["in_flight"],
        "learning_rate": LR,
        "epsilon": 0.2,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "vllm_server_base_url": given["server_url"],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": given["seed"],
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def step_writer(path: Path) -> Any:
    """A callback that appends each optimizer step to `path` (an `against_trl.Step`), from what the trainer logs. The first step
    has no `perf/step_s`, and counts as 0 s."""
    from transformers import TrainerCallback

    thrown_away = 0.0

    class StepWriter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
            nonlocal thrown_away
            if logs is None or "perf/fwd_s" not in logs:  # the summary at the end
                return
            thrown_away += logs.get("sample/dropped_stale_total") or 0.0
            step = {
                "wall_s": logs.get("perf/step_s") or 0.0,
                "waiting_s": logs["perf/rollout_wait_s"],
                "push_s": logs["perf/weight_sync_s"],
                "samples": round(logs["batch/samples_per_step"]),
                "tokens": logs["batch/trained_tokens_per_step"],
                "staleness": logs["sample/staleness_mean"],
                "thrown_away": thrown_away,
            }
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(step) + "\n")

    return StepWriter()


class ListedParameters(GatheredParameters):
    """Named tensors, to be pushed."""

    def __init__(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors: list[torch.Tensor] = []
        self.specs = []
        for name, tensor in named:
            self._tensors.append(tensor.contiguous())
            self.specs.append(ParameterSpec(name=name, dtype_name=dtype_name(tensor.dtype), shape=tuple(tensor.shape)))

    def gather(self) -> Iterator[torch.Tensor]:
        yield from self._tensors


class EqualPush:
    """TRL's `weight_transfer` by the push of this package, in place of NCCL. TRL's trainer calls its five methods at the same
    places, and they do what a run of ours does: the same calls to the same server, the same buckets over the same gloo broadcast,
    requests in flight recomputed with the new weights (TRL, too, pauses with mode=keep and clears the caches). `pause` and
    `resume` do nothing: the push does both, around the transfer."""

    def __init__(self, server_url: str) -> None:
        self._control = ServerControl(server_url, token=None, timeout_s=TIMEOUT_S)
        self._transport = WeightTransport(
            "gloo", host="127.0.0.1", bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, device=torch.device("cpu")
        )
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Form the weight group with the server."""
        self._control.info()
        self._transport.connect([self._control])

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push all parameters as the next version.

        Raises:
            GrpoAsyncError: the server failed.
        """
        self._version += 1
        push_weights(
            ListedParameters(iterator),
            version=self._version,
            servers=[self._control],
            transport=self._transport,
            settings=WeightsSection(timeout_s=TIMEOUT_S),
        )

    def resume(self) -> None: ...

    def destroy(self) -> None:
        """Leave the weight group."""
        self._transport.close()
        self._control.close()


class CpuKernel:
    """The module that TRL's `packing._flash_attn()` returns, on a CPU: TRL 1.16 packs the samples of a row into a prefix tree and
    attends by `flash_attn_varlen_func`, one segment of the tree at a time; its only implementation is a GPU kernel."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,  # (N, H, D)
        key: torch.Tensor,  # (K, H_kv, D)
        value: torch.Tensor,  # (K, H_kv, D)
        starts_q: torch.Tensor,  # (S + 1) segment boundaries
        starts_k: torch.Tensor,  # (S + 1) path boundaries
        longest_q: int,
        longest_k: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Every segment's queries attend to the keys of its path, aligned at its end. Returns (N, H, D).

        Raises:
            NotImplementedError: a window or a mask that is not causal.
        """
        if not causal or window_size != (-1, -1):
            raise NotImplementedError("plain causal attention only")
        queries = torch.split(query, starts_q.diff().tolist())
        keys, values = (torch.split(states, starts_k.diff().tolist()) for states in (key, value))
        return torch.cat([_attend(*each, softmax_scale) for each in zip(queries, keys, values, strict=True)])


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of the last tokens of a path to the path, (Q, H, D) and (K, H_kv, D); a root's Q is K."""
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    k, v = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (k, v))
    if len(query) == len(key):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
    visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)[0].transpose(0, 1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
