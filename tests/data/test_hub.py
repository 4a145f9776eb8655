"""Local folders through the real `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.data_sections import HubSource
from grpo_async.data.sources import load_rows
from grpo_async.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


def _source(name: Path | str, **settings: Any) -> HubSource:
    return HubSource(type="hub", name=str(name), **settings)


def _dataset(*prompts: str) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"prompt": list(prompts), "level": list(range(len(prompts)))})


def test_a_saved_dataset_gives_python_values_whatever_its_format(tmp_path: Path) -> None:
    _dataset("a", "b").with_format("numpy").save_to_disk(tmp_path / "saved")
    rows = load_rows(_source(tmp_path / "saved"))
    assert rows == [{"prompt": "a", "level": 0}, {"prompt": "b", "level": 1}]
    assert type(rows[0]["level"]) is int
    assert rows.places[1] == f"{tmp_path / 'saved'} [train], row 1"


def test_a_split_of_a_saved_collection_is_taken_by_name(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": _dataset("a"), "test": _dataset("b")}).save_to_disk(folder)
    assert [row["prompt"] for row in load_rows(_source(folder, split="test"))] == ["b"]
    with pytest.raises(ConfigError, match="has no split `valid`; it has `train`, `test`"):
        load_rows(_source(folder, split="valid"))


def test_a_saved_dataset_without_splits_refuses_to_be_asked_for_one(tmp_path: Path) -> None:
    _dataset("a").save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match="set `split: train`, not `test`"):
        load_rows(_source(tmp_path / "saved", split="test"))
    with pytest.raises(ConfigError, match="has no `subset`"):
        load_rows(_source(tmp_path / "saved", subset="main"))


def test_a_folder_of_data_files_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n", encoding="utf-8")
    (folder / "test.jsonl").write_text(json.dumps({"prompt": "b"}) + "\n", encoding="utf-8")
    assert load_rows(_source(folder, split="test")) == [{"prompt": "b"}]


def test_a_bad_row_is_named_with_its_number_and_column(tmp_path: Path) -> None:
    _dataset("a", " ").save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"saved \[train\], row 1: `prompt` is empty text"):
        load_rows(_source(tmp_path / "saved"))


def test_a_name_that_is_nowhere_says_what_to_check() -> None:
    with pytest.raises(
        ConfigError, match=r"some/set-that-is-not-there.* cannot be loaded .*check `name`, `subset` and `split`"
    ):
        load_rows(_source("some/set-that-is-not-there"))


def test_an_undecoded_image_is_plain_data_and_a_column_can_be_left_out(tmp_path: Path) -> None:
    import datasets

    image = {"prompt": ["a"], "picture": [{"bytes": b"", "path": None}]}
    features = datasets.Features({"prompt": datasets.Value("string"), "picture": datasets.Image(decode=False)})
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict(image, features=features).save_to_disk(folder)
    assert load_rows(_source(folder))[0]["picture"] == {"bytes": b"", "path": None}
    assert load_rows(_source(folder, drop=["picture"])) == [{"prompt": "a"}]
