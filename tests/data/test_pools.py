"""Which rows are drawn, by what their groups scored; and that a resume draws the same."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from grpo_async.config.sections import SamplingSection
from grpo_async.data.pools import Pool
from grpo_async.data.rows import Rows
from grpo_async.data.stream import PromptStream, SourceRows


def _pool(num_rows: int, *, shuffle: bool = True, **settings: Any) -> Pool:
    return Pool(num_rows, SamplingSection(**settings), seed=0, shuffle=shuffle)


def test_a_row_that_was_solved_n_times_comes_again_when_all_were() -> None:
    pool = _pool(3, retire_solved=2)
    solved = {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [1.0, 2.0]}
    for prompt_id in range(6):  # every row twice
        row = pool.draw(prompt_id)
        pool.observe(row, solved[row])
    assert pool.counts() == {"seen": 3, "solved": 2, "retired": 2}
    assert {pool.draw(prompt_id) for prompt_id in range(6, 12)} == {1}
    pool.observe(1, [1.0, 1.0])
    assert pool.draw(12) == 1  # once is not enough
    pool.observe(1, [1.0, 1.0])
    assert sorted(pool.draw(prompt_id) for prompt_id in range(13, 16)) == [0, 1, 2]
    pool.observe(0, [1.0, 1.0])  # the count began again
    assert pool.counts()["retired"] == 0


def test_rows_near_the_target_are_drawn_more_often_and_the_others_sometimes() -> None:
    """Weights 1, 0.5, 0.05 and, not drawn yet, 1: of 2550 draws 1000, 500, 50 and 1000, standard deviations up to 25."""
    pool = _pool(4, type="target_rate")
    for row, rewards in enumerate([[1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0]]):
        pool.observe(row, rewards)
    drawn = Counter(pool.draw(prompt_id) for prompt_id in range(2550))
    for row, expected in enumerate([1000, 500, 50, 1000]):
        assert drawn[row] == pytest.approx(expected, abs=100 if expected > 50 else 25)


@pytest.mark.parametrize("shuffle", [False, True])
def test_easy_rows_come_before_hard_ones_in_every_pass_but_the_first(shuffle: bool) -> None:
    pool = _pool(4, type="easy_to_hard", shuffle=shuffle)
    rates = {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 1.0], 3: [0.0, 0.5, 1.0]}
    first = [pool.draw(prompt_id) for prompt_id in range(4)]
    assert sorted(first) == [0, 1, 2, 3]
    assert (first == [0, 1, 2, 3]) is not shuffle
    for row, rewards in rates.items():
        pool.observe(row, rewards)
    assert [pool.draw(prompt_id) for prompt_id in range(4, 12)] == [1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    "settings", [{"type": "target_rate"}, {"type": "easy_to_hard"}, {"retire_solved": 1}], ids=lambda each: str(each)
)
@pytest.mark.parametrize("labels", [[None], ["a", "b"]], ids=["one source", "a mixture"])
def test_a_resumed_stream_draws_what_the_other_would_have_and_knows_its_unfinished_prompts(
    settings: dict[str, Any], labels: list[str | None]
) -> None:
    """Three prompts are in flight at any time; the checkpoint is made after 20."""

    def stream(state: Any = None) -> PromptStream:
        texts = [f"question {number}" for number in range(5)]
        sources = [
            SourceRows(rows=Rows([{"prompt": f"{text} {label}"} for text in texts], locations=texts), label=label)
            for label in labels
        ]
        return PromptStream(sources, seed=0, shuffle=True, sampling=SamplingSection(**settings), state=state)

    def go_on(given: PromptStream, first: int, last: int) -> list[str]:
        issued = []
        for prompt_id in range(first, last):
            issued.append(given.next().messages[0].content)
            if prompt_id >= 3:
                number = int(given.prompt(prompt_id - 3).messages[0].content.split()[1])
                given.observe(prompt_id - 3, [1.0, 1.0, float(number > 1), float(number > 3), None])
        return issued

    whole = stream()
    issued = go_on(whole, 0, 60)
    before = stream()
    assert go_on(before, 0, 20) == issued[:20]
    after = stream(json.loads(json.dumps(before.state([17, 18, 19]), allow_nan=False)))
    assert [after.prompt(number) for number in (17, 18, 19)] == [before.prompt(number) for number in (17, 18, 19)]
    with pytest.raises(ValueError, match="prompt 16 is not known"):
        after.prompt(16)
    assert go_on(after, 20, 60) == issued[20:]
    assert after.metrics() == whole.metrics()
