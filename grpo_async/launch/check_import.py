"""`grpo-async import --check`: two optimizer steps of an imported configuration and of its script in TRL, compared.

    tiny random model of the script's family
      -> `grpo-async train` on the CPU, synchronous            -> rollouts; rewards, advantages, losses, gradient norms, weights
      -> the script with these rollouts, in TRL (trl_steps.py) -> the same but for the rollouts

Adam's first update depends neither on its betas nor on the norm that gradients are clipped to; the weights after the second do.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import load_config, set_options
from grpo_async.errors import ConfigError
from grpo_async.findings.history import read_metrics
from grpo_async.run_directory import RunDir
from grpo_async.store.table import RolloutTable
from grpo_async.utils.console import print_rows
from grpo_async.utils.text import last_line

_STEPS, _GROUPS, _GROUP_SIZE, _TOKENS = 2, 2, 4, 32
_LR = 1e-3  # so that the first update shows in the second step
_TIMEOUT_S = 1800  # of each side
_TOLERANCE = 1e-4  # absolute and relative
_OF_UPDATE = 1e-3  # relative to its length: Adam's first one is the sign of gradients, some of which are all but 0
_WHERE = {
    "prompt tokens": "the chat template, its variables and the tools",
    "rewards": "that function, which gets something else here, or is random",
    "advantages": "`advantage` and the weights of `rewards`",
    "update": "`optimizer` and `model.lora`",
}
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    "initializer_range": 0.08,
}  # fmt: skip
_ARGS: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "fp16": False, "use_vllm": False, "report_to": [], "logging_steps": 1, "save_strategy": "no",
    "eval_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False, "log_completions": False, "deepspeed": None,
    "fsdp": None, "gradient_checkpointing": False, "gradient_accumulation_steps": 1, "generation_batch_size": None,
    "steps_per_generation": None, "shuffle_dataset": False, "dataloader_num_workers": 0, "disable_dropout": True,
    "warmup_steps": 0, "model_init_kwargs": None, "torch_compile": False, "remove_unused_columns": False,
}  # fmt: skip


def check_import(script: Path, config: Path, arguments: str, model: str | None, console: Console) -> bool:
    """Make two steps with `config`, and with the `script` that it was made of and its command line; print and return whether they
    are equal. `model`: folder or hub name of another model whose family and tokenizer are to be used.

    Raises:
        ConfigError: TRL or the model is missing, or one of the two does not run.
    """
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("--check runs the script with TRL, which is not installed here: pip install trl")
    script, config = script.resolve(), config.resolve()
    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())
    with TemporaryDirectory(prefix="grpo-async-check-") as name, chdir(script.parent):
        imported, folder, run = load_config(config), Path(name), RunDir(Path(name, "run"))
        _build_model(folder / "model", model or imported.model.path, imported.model.trust_remote_code)
        changes = _changes(imported, folder)
        words = set_options([f"{path}={json.dumps(value)}" for path, value in changes.items()])
        _run(["grpo_async", "train", str(config), *words, "--quiet"], f"the imported {config.name}")
        size, length = changes["rollout.group_size"], changes["rollout.max_completion_tokens"]
        args = _ARGS | {"num_generations": size, "per_device_train_batch_size": _GROUPS * size, "output_dir": name}
        if imported.training.num_iterations > 1:
            args |= {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}}
        steps = [_record(run, step + 1) for step in range(_STEPS)]
        plan = {
            "script": str(script), "arguments": shlex.split(arguments), "folder": name, "seed": imported.run.seed,
            "lr_factor": _LR / imported.optimizer.lr, "args": {**args, "max_completion_length": length}, "steps": steps,
        }  # fmt: skip
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        _run(["grpo_async.launch.trl_steps", str(folder / "plan.json")], f"{script.name} with TRL")
        theirs = json.loads((folder / "trl.json").read_text(encoding="utf-8"))
        rows = [*_compared(steps, theirs), _updates(run, folder)]
    print_rows(console, [("step", "", "here", "TRL", "largest difference", ""), *(row.cells() for row in rows)])
    first = next((row for row in rows if not row.is_equal), None)
    text = "equal: the configuration trains as the script does"
    if first is not None:
        otherwise = "`loss` and `rollout`" if first.step == 1 else _WHERE["update"]
        where = _WHERE.get(first.name.partition("/")[0], otherwise)
        text = f"not equal: {first.name} of step {first.step}: look at {where}, and at the comments at the top of {config.name}"
    console.print(f"\n{text}", markup=False, soft_wrap=True)
    return first is None


class _Row(NamedTuple):
    step: int
    name: str
    ours: float
    theirs: float
    difference: float
    is_equal: bool

    def cells(self) -> tuple[str, ...]:
        means = (f"{round(value, 6) + 0.0:.6g}" for value in (self.ours, self.theirs))
        return (str(self.step), self.name, *means, f"{self.difference:.1e}", "equal" if self.is_equal else "differs")


def _build_model(folder: Path, name: str, trust_remote_code: bool) -> None:
    """Write a random model of the family of `name` and its tokenizer. The end of a turn gets a longer row of the head than other
    tokens do, so that completions end, at several lengths."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options: Any = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        config = AutoConfig.from_pretrained(name, **options).get_text_config()
        for key, value in _TINY.items():
            if getattr(config, key, None) is not None:
                setattr(config, key, value)
        if getattr(config, "layer_types", None):
            config.layer_types = (2 * list(dict.fromkeys(config.layer_types)))[:2]
        config.quantization_config = None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        with torch.no_grad():
            deviation = model(torch.randint(len(tokenizer), (1, 64))).logits.std()
            model.get_output_embeddings().weight[tokenizer.eos_token_id] *= math.log(config.vocab_size) / deviation / 3
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name}: no small model of this family can be made here ({last_line(str(error))}); name the folder of another model "
            "and its tokenizer with --check-model FOLDER"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _changes(config: ExperimentConfig, folder: Path) -> dict[str, Any]:
    """Settings of the small run; those that say how a step is computed stay as they were imported."""
    rewards = [each.model_dump(mode="json", exclude_unset=True) for each in config.rewards]
    size, length = min(config.rollout.group_size, _GROUP_SIZE), min(config.rollout.max_completion_tokens, _TOKENS)
    room = config.inference.max_model_len - config.rollout.max_completion_tokens + length
    changes: dict[str, Any] = {
        "run.name": "run", "run.dir": str(folder), "model.path": str(folder / "model"), "model.revision": None,
        "model.dtype": "float32", "model.compute_dtype": "float32", "model.head_dtype": None, "model.attention": "auto",
        "model.activation_checkpointing": "none", "data.shuffle": False, "rollout.groups_per_step": _GROUPS,
        "rollout.group_size": size, "rollout.max_completion_tokens": length, "rollout.max_staleness": 0,
        "rewards": [*rewards, {"function": "grpo_async.launch.trl_steps:spread"}], "optimizer.lr": _LR,
        "optimizer.warmup_steps": 0, "training.max_steps": _STEPS, "training.epochs": None, "training.minibatches": 1,
        "training.micro_batch_tokens": _GROUPS * size * room, "inference.engine": "embedded", "inference.urls": [],
        "inference.dtype": None, "inference.max_model_len": room, "launch.device": "cpu", "launch.num_trainer_ranks": 1,
        "launch.colocate": False, "launch.ray": None, "evaluation": None, "tracking": [], "record.report": False,
    }  # fmt: skip
    if config.training.num_iterations > 1:  # updates have a learning rate each in TRL, steps have one here
        changes |= {"optimizer.schedule": "constant", "optimizer.schedule_kwargs": {}, "optimizer.min_lr_ratio": 0.0}
    lora = {"model.lora.dropout": 0.0, "model.lora.load_in_4bit": False, "model.lora.push": "merged"}
    return changes | (lora if config.model.lora else {})


def _run(command: Sequence[str], what: str) -> None:
    words = [sys.executable, "-m", *command]
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "WANDB_MODE": "disabled"}
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **quiet}
    try:
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{what} was not done after {_TIMEOUT_S} s; is its data large, or its reward slow?"
        ) from error
    if done.returncode:
        tail = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-12:])
        raise ConfigError(f"{what} does not run (exit code {done.returncode}):\n{tail}")


def _record(run: RunDir, step: int) -> dict[str, Any]:
    with RolloutTable(run.rollouts) as table:
        groups = sorted(table.groups_of_step(step)[-_GROUPS:], key=lambda group: group.prompt_id)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error]
    if errors or len(groups) < _GROUPS:
        raise ConfigError(f"step {step} of the imported configuration lacks rollouts: {'; '.join(errors)}")
    (metrics,) = (row for row in read_metrics(run, []) if row["step"] == step)
    tokens = {
        "rows": [group.prompt_id for group in groups],
        "ids": [[*each.prompt_ids, *each.completion_ids] for each in rollouts],
        "mask": [[*[0] * len(each.prompt_ids), *map(int, each.mask)] for each in rollouts],
        "logprobs": [[*[0.0] * len(each.prompt_ids), *(value or 0.0 for value in each.logprobs)] for each in rollouts],
    }
    compared = {
        "prompt tokens": [len(each.prompt_ids) for each in rollouts],
        **{f"rewards/{name}": [each.rewards.get(name) for each in rollouts] for name in rollouts[0].rewards},
        "advantages": [each.advantage for each in rollouts],
        "loss": [metrics["loss"]],
        "gradient norm": [metrics["grad_norm"]],
    }
    return {"tokens": tokens, "compared": compared}


def _compared(steps: Any, theirs: Any) -> Iterator[_Row]:
    for number, (step, other) in enumerate(zip(steps, theirs, strict=True), 1):
        for name in {**step["compared"], **other}:
            a, b = (np.array(each.get(name, [None]), float) for each in (step["compared"], other))
            if name == "advantages":
                b = np.where(np.isnan(a), np.nan, b)  # truncated and masked: not trained, so it has none here
            is_equal = np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
            largest = np.nan_to_num(np.abs(a - b)).max()
            mean_ours, mean_theirs = (
                float(np.nanmean(each)) if np.isfinite(each).any() else math.nan for each in (a, b)
            )
            yield _Row(number, name, mean_ours, mean_theirs, float(largest), is_equal)


def _updates(run: RunDir, folder: Path) -> _Row:
    """Lengths of what both optimizers added to the weights, and that of their difference, relative."""
    from safetensors.numpy import load_file

    def read(path: Path) -> Any:
        return {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}

    def distance(some: Any, others: Any) -> float:
        return math.sqrt(sum(float(np.square(some[name] - others.get(name, 0.0)).sum()) for name in some))

    start, ours, theirs = map(
        read, (folder / "model", run.adapter if run.adapter.is_dir() else run.model, folder / "trl")
    )
    is_alike = {name: each.shape for name, each in ours.items()} == {name: each.shape for name, each in theirs.items()}
    length = distance(theirs, start)
    apart = distance(ours, theirs) / max(length, 1e-9) if is_alike else math.inf
    return _Row(_STEPS, "update", distance(ours, start), length, apart, apart < _OF_UPDATE)
