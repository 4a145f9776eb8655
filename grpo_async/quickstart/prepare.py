"""Makes what `configs/quickstart.yaml` names: a base model with tokenizer, training prompts and held-out prompts.

    .cache/quickstart/seed_0/
    |- prepared.json   the recipe it was made by; a folder without it was not made here and is never touched
    |- model/          Hugging Face folder
    |- train.jsonl     {"prompt": [...], "answer": "5"}
    `- heldout.jsonl

Everything is written beside and renamed, so a folder that exists is whole. A second call returns at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from grpo_async.errors import ConfigError
from grpo_async.quickstart import task
from grpo_async.quickstart.warmup import WarmupRecipe, thinking, warm_up

RECIPE_VERSION = 1  # raise it when the task, tokenizer, model or warm-up changes: prepared folders are then made again
_MARKER = "prepared.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedQuickstart:
    """Where the parts are."""

    model: Path
    train: Path
    heldout: Path


def default_folder(seed: int = 0) -> Path:
    """`.cache/quickstart/seed_N` in the working directory; configs/quickstart.yaml names seed 0."""
    return Path(".cache") / "quickstart" / f"seed_{seed}"


def prepare(
    folder: Path | None = None,
    *,
    seed: int = 0,
    force: bool = False,
    recipe: WarmupRecipe | None = None,
    report: Callable[[str], None] = print,
) -> PreparedQuickstart:
    """Make the quickstart's model and data in `folder`, unless they are there already.

    Args:
        folder: default `default_folder(seed)`.
        seed: of the initial weights, the demonstrations and the order of the rows. The same seed gives the same bytes
            of data and tokenizer, and on one machine the same weights.
        force: make it again even if it is there.
        recipe: of the warm-up; default `WarmupRecipe()`.
        report: gets lines of progress.

    Raises:
        ConfigError: the folder holds something that was not made here.
    """
    folder = default_folder(seed) if folder is None else folder
    recipe = recipe or WarmupRecipe()
    marker = _marker(seed, recipe)
    if not force and _read_marker(folder) == marker:
        return _parts(folder)
    _refuse_a_folder_of_others(folder)

    report(f"making the quickstart's model and data in {folder} (once, about half a minute)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _build(building, seed=seed, recipe=recipe, report=report)
        (building / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        building.chmod(0o755)  # mkdtemp makes it private
        if force or _read_marker(folder) != marker:  # another process may have made the same one meanwhile
            _put_in_place(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already when it was put in place
    return _parts(folder)


def _parts(folder: Path) -> PreparedQuickstart:
    return PreparedQuickstart(model=folder / "model", train=folder / "train.jsonl", heldout=folder / "heldout.jsonl")


def _marker(seed: int, recipe: WarmupRecipe) -> dict[str, Any]:
    made_by = {"recipe_version": RECIPE_VERSION, "seed": seed, "warmup": dataclasses.asdict(recipe)}
    return cast(
        "dict[str, Any]", json.loads(json.dumps(made_by))
    )  # tuples become lists, as in the file it is compared to


def _read_marker(folder: Path) -> dict[str, Any] | None:
    path = folder / _MARKER
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _refuse_a_folder_of_others(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARKER).is_file():
        raise ConfigError(
            f"{folder}: this folder holds files that the quickstart did not make (no {_MARKER} in it), so it is left "
            "alone; name another folder, or remove this one"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder}: a file is in the way of the quickstart's folder; name another folder, or remove it"
        )


def _build(folder: Path, *, seed: int, recipe: WarmupRecipe, report: Callable[[str], None]) -> None:
    from grpo_async.quickstart.model import build_model
    from grpo_async.quickstart.tokenizer import train_tokenizer

    sums = task.training_sums()
    task.write_rows(folder / "train.jsonl", sums, seed=seed)
    task.write_rows(folder / "heldout.jsonl", task.held_out_sums(), seed=seed)
    tokenizer = train_tokenizer(f"system\nuser\n{item.prompt}\nassistant\n{thinking(item)}\n" for item in sums)
    with _deterministic_torch(seed):
        model = build_model(tokenizer)
        warm_up(model, tokenizer, sums, recipe=recipe, seed=seed, report=report)
    with _no_progress_bars():
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")


@contextmanager
def _deterministic_torch(seed: int) -> Iterator[None]:
    """Seeded, on one thread (the order of additions depends on their number); the caller's state is put back."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Saving one small file needs no bar in the middle of our own lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _put_in_place(building: Path, folder: Path) -> None:
    """Rename `building` to `folder`; what was there before is moved aside first, then removed."""
    previous = building.with_name(building.name + ".previous")
    if folder.exists():
        os.replace(folder, previous)
    os.replace(building, folder)
    shutil.rmtree(previous, ignore_errors=True)
