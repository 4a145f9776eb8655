"""Writes Hugging Face folders: of the policy in memory, on all ranks, and of a checkpoint, in one process.

    model/     merged weights, generation config, tokenizer with chat template, README.md (the model card)
    adapter/   with LoRA: the adapter alone, as peft loads it

Invariant: a folder that exists is complete; it is written under another name and renamed.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from grpo_async.buffer.sample_buffer import HEARTBEAT_S
from grpo_async.chat.renderer import eos_ids, load_renderer
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_values
from grpo_async.config.public import public_config
from grpo_async.errors import CheckpointError
from grpo_async.run_directory import RunDir, partial_of
from grpo_async.training.checkpoint import DCP_ERRORS, TRAINED, load_state, model_state
from grpo_async.training.checkpoint_manifest import problem_of
from grpo_async.training.fingerprints import check_fingerprints, model_fingerprints
from grpo_async.training.lora import gather_adapter, gather_weights, write_adapter
from grpo_async.training.model import Policy
from grpo_async.training.parameters import is_leader
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.files import put_in_place, write_atomically

CARD = "README.md"
"""The model card; written again after the last evaluation, which comes after the export."""


def export_model(
    folder: Path,
    policy: Policy,
    tokenizer: Any,
    *,
    dtype: str,
    end_tokens: Sequence[str] = (),
    adapter: Path | None = None,
    card: str | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Write a Hugging Face folder that `from_pretrained` loads. Every rank calls it; rank 0 writes, the others return before that.

    Args:
        dtype: of the files: the one in which the model is served (`inference.dtype`).
        end_tokens: end turns beside the tokenizer's eos and those of the base (`model.end_of_turn_tokens`).
        adapter: where the adapter goes, if the policy has one.
        card: the model card; None: none is written. Only rank 0 needs it.
        heartbeat: called regularly on rank 0 while it writes."""
    weights = gather_weights(policy.model, getattr(torch, dtype))
    adapter_state = gather_adapter(policy.model) if adapter is not None else {}
    if not is_leader():
        return

    def write() -> None:
        generation, own = policy.model.generation_config, tokenizer.convert_tokens_to_ids(list(end_tokens))
        ends = sorted({*eos_ids(generation.eos_token_id), tokenizer.eos_token_id, *own} - {None})
        generation.eos_token_id = ends if len(ends) != 1 else ends[0]  # where the rollouts ended
        with _replacing(folder, "model") as partial:
            policy.model.save_pretrained(partial, state_dict=weights)
            config = copy.deepcopy(policy.model.config)  # a copy, since the config has the dtype of the master weights
            config.dtype = getattr(torch, dtype)
            config.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            if card is not None:
                write_atomically(partial / CARD, card)
        if adapter is not None and adapter_state:
            with _replacing(adapter, "adapter") as partial:
                write_adapter(partial, policy.model, adapter_state)

    written = in_thread(write, name="export")
    while not wait([written], timeout=HEARTBEAT_S).done:  # the stall guard ends it if the disk hangs
        heartbeat()
    written.result(timeout=0.0)


def export_checkpoint(run_dir: RunDir, step: int, config: ExperimentConfig, folder: Path) -> None:
    """Turn the checkpoint of a step into a Hugging Face folder (with LoRA the merged model), in this process alone and on the CPU.
    Raises CheckpointError or ConfigError: it is damaged, or its base is not the one that was trained."""
    from grpo_async.training.load import load_policy

    checkpoint = run_dir.checkpoint(step)
    if (problem := problem_of(checkpoint)) is not None:
        raise CheckpointError(f"the checkpoint of step {step} cannot be used: {problem}")
    policy = load_policy(
        config.model,
        temperature=config.rollout.temperature,
        chunk_tokens=config.training.resolved_chunk_tokens,
        max_model_len=config.inference.max_model_len,
    )
    if step > 0:
        state = {"model": model_state(policy)}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # this is intended
                dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
        except DCP_ERRORS as error:
            raise CheckpointError(f"cannot load {checkpoint}: {error}") from error
        set_model_state_dict(policy, state["model"], options=TRAINED)
    card, renderer = model_card(config, step=step), load_renderer(config)
    check_fingerprints(load_state(run_dir, step).fingerprints, model_fingerprints(config.model, renderer), step=step)
    ends, dtype = config.model.end_of_turn_tokens, config.inference.resolved_dtype
    export_model(folder, policy, renderer.tokenizer, dtype=dtype, end_tokens=ends, card=card)


@contextmanager
def _replacing(folder: Path, what: str) -> Iterator[Path]:
    """Yield a folder next to `folder`, which it replaces when it is complete."""
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        put_in_place(partial, folder, aside=folder.with_name(f"replaced_{folder.name}"))
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the {what} to {folder}: {error}; free space and export it again (the end of a run: `train --resume`)"
        ) from error


def model_card(config: ExperimentConfig, *, step: int, evaluation: Mapping[str, float] | None = None) -> str:
    base, rollout, lora = config.model.path, config.rollout, config.model.lora
    merged = "" if lora is None else f"LoRA of rank {lora.rank}, merged into these weights."
    # 0: the steps of epochs, which only the trainer can count
    of_all = f" of {config.num_steps}" if config.num_steps else ""
    rows = [f"| {name} | {value:.6g} |" for name, value in (evaluation or {}).items() if isinstance(value, int | float)]
    table = (
        ["| metric | value |", "| --- | --- |", *rows] if rows else ["This policy was not evaluated on held-out data."]
    )
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {json.dumps(base)}",
        "pipeline_tag: text-generation",
        "tags: [grpo, reinforcement-learning]",
        "---",
        "",
        f"# {config.run.name}",
        "",
        f"`{base}`, trained for {step}{of_all} steps by reinforcement learning (loss `{config.loss.type}`, "
        f"{rollout.groups_per_step} prompts with {rollout.group_size} completions per step, policies up to "
        f"{rollout.max_staleness} steps old). {merged}",
        "",
        "## Evaluation",
        "",
        *table,
        "",
        "## Configuration",
        "",
        "Data and rewards included; without servers, launch, trackers and values of arguments.",
        "",
        "```yaml",
        dump_values(public_config(config)).rstrip("\n").replace("```", "'''"),
        "```",
        "",
    ]
    return "\n".join(lines)
