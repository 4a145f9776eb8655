"""Makes what the configs of the tiny tasks name: a base model with tokenizer, training rows and held-out rows.

    .cache/quickstart/seed_0/          task `think`; the others: .cache/quickstart/TASK/seed_0
    |- prepared.json   the recipe it was made by; a folder without it was not made here and is never touched
    |- model/          Hugging Face folder
    |- train.jsonl     {"prompt": [...], "answer": "5"}
    `- heldout.jsonl

Everything is written to a temporary folder and renamed, so a folder that exists is whole. A second call returns at once.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from grpo_async.errors import ConfigError
from grpo_async.quickstart import DEFAULT_TASK
from grpo_async.quickstart.tasks import TASKS, Demonstration, Task
from grpo_async.records import Origin, TaggedMessage
from grpo_async.utils.files import put_in_place
from grpo_async.utils.text import backticked, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen3ForCausalLM

    from grpo_async.chat import ChatRenderer

RECIPE_VERSION = 3  # raise it when a task, tokenizer, model or warmup changes: prepared folders are then made again
_MARKER = "prepared.json"


def default_folder(seed: int = 0, *, task: str = DEFAULT_TASK) -> Path:
    """`.cache/quickstart/seed_N`, or `.cache/quickstart/TASK/seed_N`, in the working directory; the configs name seed 0."""
    base = Path(".cache") / "quickstart"
    return (base if task == DEFAULT_TASK else base / task) / f"seed_{seed}"


def prepare(root: Path = Path(), *, task: str | Task = DEFAULT_TASK, seed: int = 0) -> None:
    """Make a task's model and data in `default_folder`, unless they are there already.

    Args:
        root: of the repository, or the working directory.
        task: one of your own, or the name of one of `TASKS`.
        seed: of the initial weights, the demonstrations and the order of the rows. The same seed gives the same bytes
            of data and tokenizer, and on one machine the same weights.

    Raises:
        ConfigError: there is no such task, or the folder holds something that was not made here.
    """
    if isinstance(task, str):
        if task not in TASKS:
            hint = did_you_mean(task, TASKS) or f"; there are {backticked(TASKS)}"
            raise ConfigError(f"there is no quickstart task {task!r}{hint}")
        task = TASKS[task]
    folder = root / default_folder(seed, task=task.name)
    made_by = {"recipe_version": RECIPE_VERSION, "task": task.name, "seed": seed}
    made_by |= {"warmup": dataclasses.asdict(task.recipe)}
    made_by |= {"tools": tools} if (tools := task.tools()) else {}  # the model has learned the listing of exactly these
    marker = json.dumps(made_by, indent=2) + "\n"
    if _is_made_by(marker, folder):
        return
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / _MARKER).is_file():
        raise ConfigError(
            f"{folder} holds what the quickstart did not make (no {_MARKER} is in it); move it, or remove it"
        )

    print(f"making the model and data of the task `{task.name}` in {folder} (once, about half a minute)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _build(building, task, seed)
        (building / _MARKER).write_text(marker, encoding="utf-8")
        building.chmod(0o755)  # mkdtemp makes it private
        if not _is_made_by(marker, folder):  # another process may have made the same one meanwhile
            put_in_place(building, folder, aside=building.with_name(building.name + ".previous"))
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already when it was put in place


def _is_made_by(marker: str, folder: Path) -> bool:
    path = folder / _MARKER
    return path.is_file() and path.read_text(encoding="utf-8") == marker


def _build(folder: Path, task: Task, seed: int) -> None:
    from transformers.utils.logging import disable_progress_bar

    from grpo_async.chat import ChatRenderer
    from grpo_async.quickstart.model import build_model, train_tokenizer

    items = task.training_items()
    write_rows(folder / "train.jsonl", map(task.row, items), seed=seed)
    write_rows(folder / "heldout.jsonl", map(task.row, task.held_out_items()), seed=seed)
    tokenizer = train_tokenizer(task.vocabulary())
    with _deterministic_torch(seed):
        model = build_model(tokenizer)
        warm_up(model, ChatRenderer(tokenizer), task, items, seed=seed)
    disable_progress_bar()  # of saving one small file, in the middle of our own lines
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


@contextmanager
def _deterministic_torch(seed: int) -> Iterator[None]:
    """Seed torch and give it one thread (the order of additions depends on their number); then put the caller's state back."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], *, seed: int) -> None:
    """Write the rows, shuffled by the seed, such as `{"prompt": [{"role": "user", ...}], "answer": "5"}`."""
    rng = random.Random(seed)
    # sorted by rng.random(): the one generator whose sequence Python promises to keep; shuffle() may change
    shuffled = sorted(((rng.random(), row) for row in rows), key=lambda pair: pair[0])
    with path.open("w", encoding="utf-8") as file:
        for _, row in shuffled:
            file.write(json.dumps(row) + "\n")


# ---- the warmup ----
# It must leave a behavior that is right but rare, so that reinforcement learning has something to amplify: for the first part of
# the steps every demonstration shows the good way, for the rest only some do and the others show the lazy one.

Segment: TypeAlias = tuple[list[int], bool]
"""Ids of one piece, and whether the policy writes it: only then is it learned."""
_NOT_LEARNED = -100  # the label that torch's cross entropy leaves out
_REPORT_EVERY_STEPS = 70


def segments(
    renderer: ChatRenderer, demonstration: Demonstration, *, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Segment]:
    r"""The pieces of a demonstration, as a rollout builds them: each is tokenized alone, and no text ever joins two.

    prompt   <|im_start|>user\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n              not learned
    turn     <tool_call>\n{"name": "calc", ...}\n</tool_call><|im_end|>                 learned
    suffix   \n<|im_start|>user\n<tool_response>\n19\n</tool_response><|im_end|>\n...   not learned
    turn     19<|im_end|>                                                               learned
    """
    prompt = [TaggedMessage(role="user", content=demonstration.prompt, origin=Origin.PROMPT)]
    prompt_ids = renderer.prompt_ids(prompt, is_conversational=True, tools=tools)
    found: list[Segment] = [(prompt_ids, False)]
    tokenizer = renderer.tokenizer
    for turn in demonstration.turns:
        found.append((tokenizer(turn.text + str(tokenizer.eos_token), add_special_tokens=False)["input_ids"], True))
        if turn.call is not None and turn.result is not None:
            found.append((renderer.suffix_ids([turn.call], [turn.call.result_message(turn.result)]), False))
    return found


def pad_batch(batch: Sequence[Sequence[Segment]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Segments of each demonstration -> input ids, labels, each (B, T), padded on the right.

    Labels are -100 on everything that is not learned, padding included. An attention mask is not needed: attention is
    causal, and nothing that is learned is behind the padding.
    """
    import torch

    rows = [[token for ids, _ in row for token in ids] for row in batch]
    learned = [[token if is_learned else _NOT_LEARNED for ids, is_learned in row for token in ids] for row in batch]
    width = max(map(len, rows))
    input_ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [_NOT_LEARNED] * (width - len(row)) for row in learned])
    return input_ids, labels


def warm_up(model: Qwen3ForCausalLM, renderer: ChatRenderer, task: Task, items: Sequence[Any], *, seed: int) -> None:
    """Train `model` in place on demonstrations of `items`; prints a line now and then."""
    import torch

    rng, recipe, tools = random.Random(seed), task.recipe, task.tools()
    pad_token_id = int(renderer.tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    model.train()
    started = time.monotonic()
    for step in range(recipe.num_steps):
        is_good_only = step < recipe.good_only_fraction * recipe.num_steps
        shown = [
            (task.good if is_good_only or rng.random() < recipe.good_fraction_after else task.lazy)(item, rng)
            for item in rng.choices(items, k=recipe.batch_size)
        ]
        rows = [segments(renderer, each, tools=tools) for each in shown]
        input_ids, labels = pad_batch(rows, pad_token_id=pad_token_id)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % _REPORT_EVERY_STEPS == 0 or step + 1 == recipe.num_steps:
            elapsed_s = time.monotonic() - started
            print(f"warmup step {step + 1}/{recipe.num_steps}: loss {loss.item():.3f}, {elapsed_s:.0f} s")
    model.eval()
