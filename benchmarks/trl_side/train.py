"""A run of TRL's AsyncGRPOTrainer, in TRL's environment: `python -m benchmarks.trl_side.train SETTING.json`.

The trainer and its rollout worker are TRL's, unmodified. Replaced is what it has for GPUs only, without which it does not run
on a CPU: the weight transfer (push.py), the kernel of its attention (attention.py), and the question for the GPU's peak FLOP/s.
Options that are not TRL's defaults: full float32 (as the server and our side), no gradient checkpointing (it only costs time
here), a fixed number of samples a step (as ours), no logging service, no checkpoints.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.trl_side.setting import Setting, Step


def main(arguments: list[str]) -> int:
    setting = Setting.read(Path(arguments[0]))
    import torch

    torch.set_num_threads(setting.threads)
    trainer = build_trainer(setting)
    trainer.train()
    return 0


def build_trainer(setting: Setting) -> Any:
    """The trainer of TRL's side, ready to train."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from benchmarks.trl_side.attention import CpuKernel
    from benchmarks.trl_side.push import EqualPush
    from benchmarks.trl_side.reward import share_of_low_ids

    packing._flash_attn = CpuKernel
    async_grpo_trainer.get_peak_flops_per_device = no_peak_flops
    rows = [json.loads(line) for line in setting.prompts.read_text(encoding="utf-8").splitlines()]
    trainer = AsyncGRPOTrainer(
        model=str(setting.model),
        reward_funcs=share_of_low_ids,
        args=AsyncGRPOConfig(**trainer_options(setting)),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        weight_transfer=EqualPush(setting.server_url),
    )
    trainer.add_callback(step_writer(setting.steps_file))
    return trainer


def no_peak_flops(accelerator: Any, dtype: str) -> None:
    """TRL's "not known for this device", which it logs no utilisation for; its own asks CUDA for the device's name."""


def trainer_options(setting: Setting) -> dict[str, Any]:
    """Fields of TRL's AsyncGRPOConfig."""
    return {
        "output_dir": str(setting.folder),
        "max_steps": setting.max_steps,
        "per_device_train_batch_size": setting.samples_per_step,
        "gradient_accumulation_steps": 1,
        "token_budget": 0,  # a fixed number of samples a step
        "num_generations": setting.group_size,
        "max_completion_length": setting.completion_tokens,
        "temperature": 1.0,
        "max_staleness": setting.max_staleness,
        "max_inflight_tasks": setting.max_in_flight,
        "learning_rate": setting.learning_rate,
        "epsilon": 0.2,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "vllm_server_base_url": setting.server_url,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": setting.seed,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def step_writer(path: Path) -> Any:
    """A callback that appends a Step to `path` after every optimizer step, from what the trainer logs itself."""
    from transformers import TrainerCallback

    thrown_away = 0.0

    class StepWriter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
            nonlocal thrown_away
            if logs is None or "perf/fwd_s" not in logs:  # the summary at the end
                return
            thrown_away += logs.get("sample/dropped_stale_total") or 0.0
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(step_of(logs, ended_at=time.time(), thrown_away=thrown_away))) + "\n")

    return StepWriter()


def step_of(logs: dict[str, Any], *, ended_at: float, thrown_away: float) -> Step:
    """A Step from TRL's own metrics of one step. The first step has no `perf/step_s`, and counts as 0 s."""
    return Step(
        ended_at=ended_at,
        wall_s=logs.get("perf/step_s") or 0.0,
        samples=round(logs["batch/samples_per_step"]),
        tokens=logs["batch/trained_tokens_per_step"],
        waiting_s=logs["perf/rollout_wait_s"],
        forward_s=logs["perf/fwd_s"],
        backward_s=logs["perf/fwd_bwd_s"] - logs["perf/fwd_s"],
        optimizer_s=logs["perf/optimizer_s"],
        sync_s=logs["perf/weight_sync_s"],
        staleness=logs["sample/staleness_mean"],
        thrown_away=thrown_away,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
