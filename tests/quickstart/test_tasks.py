"""The tasks: what is asked, and the split."""

from __future__ import annotations

import json

import pytest

from grpo_async.quickstart.tasks import TASKS, Task


@pytest.mark.parametrize(("name", "num_items"), [("think", 2012), ("tool", 4500)])
def test_the_split_covers_every_item_once(name: str, num_items: int) -> None:
    training, held_out = TASKS[name].training_items(), TASKS[name].held_out_items()
    assert not set(training) & set(held_out)
    asked = [{json.dumps(TASKS[name].row(item), sort_keys=True) for item in side} for side in (training, held_out)]
    assert asked[0].isdisjoint(asked[1])
    # no held-out sum is trained on in another order
    terms = [{tuple(sorted(item)) for item in side} for side in (training, held_out)]
    assert terms[0].isdisjoint(terms[1])
    assert len(set(training)) + len(set(held_out)) == num_items
    assert len(held_out) >= 200  # what their configs evaluate


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_prompt_and_answer_agree(task: Task) -> None:
    for item in task.items():
        row = task.row(item)
        assert str(eval(row["prompt"][0]["content"].removesuffix("="))) == row["answer"]  # digits and signs, our own
