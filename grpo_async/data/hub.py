"""Rows of a dataset of the package `datasets`: by its name on the hub, or from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_async.config.data_sections import HubSource
from grpo_async.data.rows import PlacedRows, listed
from grpo_async.errors import ConfigError


def read_hub(source: HubSource) -> PlacedRows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source.name}: reading a dataset (type: hub) needs the package `datasets`: pip install 'grpo-async[hub]'; "
            "or use a file (type: jsonl, csv or parquet)"
        ) from error
    try:
        dataset = _load(datasets, source)
    except ConfigError:
        raise
    except Exception as error:  # its own, the hub's, httpx's and OS errors: all mean this
        raise ConfigError(
            f"{hub_name(source)}: the dataset cannot be loaded ({type(error).__name__}: {error}); "
            "check `name`, `subset` and `split`, and that this machine reaches the hub or holds the dataset in its cache"
        ) from error
    for number, row in enumerate(dataset.with_format(None)):  # numpy and torch formats were saved along
        yield f"{hub_name(source)}, row {number}", dict(row)


def hub_name(source: HubSource) -> str:
    """What the user called it."""
    return f"{source.name}{f'/{source.subset}' if source.subset else ''} [{source.split}]"


def _load(datasets: Any, source: HubSource) -> Any:
    folder = Path(source.name)
    if not ((folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()):
        return datasets.load_dataset(source.name, source.subset, split=source.split, revision=source.revision)
    for setting in ("subset", "revision"):
        if getattr(source, setting) is not None:
            raise ConfigError(f"{source.name}: a folder that save_to_disk wrote has no `{setting}`; leave it out")
    saved = datasets.load_from_disk(source.name)
    if isinstance(saved, dict):
        if source.split not in saved:
            raise ConfigError(
                f"{source.name}: has no split `{source.split}`; it has {listed(saved)}. For a part of one set `limit`"
            )
        return saved[source.split]
    own = str(saved.split) if saved.split is not None else "train"
    if source.split != own:
        raise ConfigError(
            f"{source.name}: save_to_disk wrote one dataset here, the split `{own}`; set `split: {own}`, not `{source.split}`"
        )
    return saved
