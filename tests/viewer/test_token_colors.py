"""Which color a token gets, what the legend says it means, and the texts of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_async.errors import RunError
from grpo_async.records import RolloutStatus, TokenFlag
from grpo_async.run_directory import RunDir
from grpo_async.store import RolloutRow
from grpo_async.viewer.token_colors import SWATCHES, ColorMode, flag_names, legend, token_classes
from grpo_async.viewer.token_text import TokenTexts, load_token_texts
from tests.viewer.support import byte_tokenizer

HAVE_NO_SWATCH = {"even", "level-0", "untrained", "unknown"}


def _rollout(mask: list[int], **values: Any) -> RolloutRow:
    """One whose tokens have the mask; what is not given is as of a rollout that no trainer has seen."""
    n = len(mask)
    plain: dict[str, Any] = {
        "rollout_id": "r", "status": RolloutStatus.FINISHED, "truncated": False, "done": False, "error": None,
        "num_tokens": n, "reward": None, "rewards": {}, "messages": [], "turns": [], "started_at": 0.0,
        "total_duration_s": 0.0, "prompt_ids": [], "completion_ids": [0] * n,
        "advantage": 1.0, "logprobs": [-1.0] * n, "versions": [0] * n,
    }  # fmt: skip
    return RolloutRow(**{**plain, "mask": mask, **values})


def _entries(mode: ColorMode, rollout: RolloutRow) -> list[tuple[str, str]]:
    return [(entry.name, entry.text) for entry in legend(mode, rollout)]


def test_advantages_by_their_size_and_sign_where_there_is_a_gradient() -> None:
    expected = {
        0.0: "even", 0.04: "even", 0.05: "up-1", -0.4: "down-1", 0.5: "up-2", -1.4: "down-2", 1.5: "up-3", -9.0: "down-3"
    }  # fmt: skip
    for advantage, name in expected.items():
        assert token_classes(ColorMode.ADVANTAGE, _rollout([1], advantage=advantage)) == [name]
    clipped = _rollout([1, 1, 0], advantage=2.0, token_flags=[0, TokenFlag.CLIPPED_HIGH, None])
    assert token_classes(ColorMode.ADVANTAGE, clipped) == ["up-3", "no-gradient", "untrained"]
    entries = _entries(ColorMode.ADVANTAGE, clipped)
    assert [text for _, text in entries] == [
        "≤-1.5", "≤-0.5", "≤-0.05", "about 0", "≥0.05", "≥0.5", "≥1.5", "no gradient", "not trained on",
    ]  # fmt: skip


def test_the_strongest_flag_gives_the_color_and_all_are_named() -> None:
    flags = TokenFlag.CLIPPED_LOW | TokenFlag.IS_MASKED
    rollout = _rollout([1, 1], token_flags=[0, flags])
    assert token_classes(ColorMode.FLAGS, rollout) == ["trained", "is-masked"]
    assert flag_names(flags) == ["masked by correction", "clipped low"]
    assert flag_names(None) == flag_names(0) == []
    assert [name for name, _ in _entries(ColorMode.FLAGS, rollout)] == ["trained", "is-masked"]


@pytest.mark.parametrize("mode", list(ColorMode))
def test_every_class_has_its_colors_and_its_entry_in_the_legend(mode: ColorMode) -> None:
    for flag in (0, *TokenFlag):
        rollout = _rollout([1], token_flags=[flag], entropies=[1.0], trainer_logprobs=[-1.3])
        named = dict(_entries(mode, rollout))
        (name,) = token_classes(mode, rollout)
        assert named[name]
        assert set(named) <= set(SWATCHES) | HAVE_NO_SWATCH


def test_token_texts_come_from_the_model_that_the_run_names(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    (tmp_path / "model ${X}").mkdir()
    tokenizer.save(str(tmp_path / "model ${X}" / "tokenizer.json"))
    run = RunDir(tmp_path / "run")
    run.create(f"model: {{path: '{tmp_path}/model $${{X}}'}}\n")
    texts = load_token_texts(run)
    assert isinstance(texts, TokenTexts)
    # the last: byte 0xC3 alone is no character, so it is as the vocabulary spells it
    for token, text in (("a", "a"), ("Ġ", " "), ("Ã", "Ã")):
        token_id = tokenizer.token_to_id(token)
        assert token_id is not None
        assert texts.of(token_id) == text
    assert texts.of(100_000) == "<no token 100000>"


def test_without_a_tokenizer_there_is_a_sentence_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create(f"model: {{path: '{tmp_path}/gone'}}\n")
    note = load_token_texts(run)
    assert note == f"token texts are left out: no {tmp_path}/gone/tokenizer.json and no {tmp_path}/model/tokenizer.json"
    run.model.mkdir()
    (run.model / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match=r"tokenizer\.json is not a tokenizer"):
        load_token_texts(run)
