"""Advantages equal those of TRL's trainers on random rewards: the very statements of the installed TRL are run."""

from __future__ import annotations

import ast
import inspect
import math
import random
import textwrap
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.scoring.advantages import (
    batch_advantages,
    combine_rewards,
    group_advantages,
    leave_one_out_advantages,
    normalize_each,
    normalized_over_step,
)

GROUP_SIZE, NUM_GROUPS, NUM_REWARDS = 5, 6, 3
WEIGHTS = {"r0": 1.0, "r1": 0.5, "r2": -0.25}
Table = list[list[float | None]]  # [NUM_GROUPS x GROUP_SIZE][NUM_REWARDS]


def _statements(trainer: type, names: Sequence[str]) -> list[ast.stmt]:
    """Of the method that scores: from the first assignment of `unscorable_mask` to the last of `advantages` before slicing."""
    for method in (
        "_generate_and_score_completions",
        "_score_completions",
        "_calculate_advantages",
        "_compute_advantages",
    ):
        function = getattr(trainer, method, None)
        if function is None:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(body, ast.FunctionDef)
        texts = [ast.unparse(statement) for statement in body.body]
        begin = [i for i, text in enumerate(texts) if text.startswith(names[0])]
        end = [i for i, text in enumerate(texts) if text.startswith(names[1])]
        if begin and end:
            return body.body[begin[0] : end[-1] + 1]
    raise AssertionError(f"{trainer.__name__} has no method with the statements {names}: look at how TRL scores now")


def _run_trl(trainer: Any, table: Table, settings: dict[str, Any]) -> list[float]:
    """What TRL makes of the rewards: its own statements, between the rewards of each function and the slice of each process."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("trl.trainer.utils")
    statements = _statements(trainer, ("unscorable_mask =", "advantages = torch.nan_to_num"))
    code = compile(ast.fix_missing_locations(ast.Module(body=statements, type_ignores=[])), trainer.__name__, "exec")
    values = torch.tensor([[math.nan if v is None else v for v in row] for row in table], dtype=torch.float64)
    weights = torch.tensor(list(WEIGHTS.values()), dtype=torch.float64)
    owner = SimpleNamespace(reward_weights=weights, reward_funcs=list(WEIGHTS), num_generations=GROUP_SIZE, **settings)
    scope = {
        "self": owner, "torch": torch, "nanstd": utils.nanstd, "rewards_per_func": values, "device": "cpu",
        "num_generations": GROUP_SIZE, "mode": "train",
    }  # fmt: skip
    exec(code, scope)  # the statements of an installed library
    return scope["advantages"].tolist()  # type: ignore[no-any-return]


def _table(seed: int, *, unscored: float) -> Table:
    generator = random.Random(seed)
    table: Table = [
        [
            None if generator.random() < unscored else generator.choice([0.0, 1.0, generator.gauss(0.0, 20.0)])
            for _ in range(NUM_REWARDS)
        ]
        for _ in range(GROUP_SIZE * NUM_GROUPS)
    ]
    table[3] = [None] * NUM_REWARDS  # nobody scored it
    table[GROUP_SIZE : 2 * GROUP_SIZE] = [[1.0, 0.5, 2.0] for _ in range(GROUP_SIZE)]  # a group without signal
    return table


def _groups(table: Table) -> list[list[dict[str, float | None]]]:
    rows = [dict(zip(WEIGHTS, row, strict=True)) for row in table]
    return [rows[begin : begin + GROUP_SIZE] for begin in range(0, len(rows), GROUP_SIZE)]


def _summed(table: Table) -> list[list[float | None]]:
    return [combine_rewards(rows, WEIGHTS) for rows in _groups(table)]


Ours = Callable[[Table], list[list[float]]]
KINDS: dict[str, tuple[str, dict[str, Any], Ours]] = {
    "group": (
        "GRPOTrainer",
        {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"},
        lambda table: [group_advantages(rewards) for rewards in _summed(table)],
    ),
    "none": (
        "GRPOTrainer",
        {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"},
        lambda table: [group_advantages(rewards, scale="none") for rewards in _summed(table)],
    ),
    "batch": (
        "GRPOTrainer",
        {"scale_rewards": "batch", "multi_objective_aggregation": "sum_then_normalize"},
        lambda table: batch_advantages(_summed(table)),
    ),
    "normalize_each": (
        "GRPOTrainer",
        {"scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum"},
        lambda table: normalized_over_step([normalize_each(rows, WEIGHTS) for rows in _groups(table)]),
    ),
    "rloo": (
        "RLOOTrainer",
        {"normalize_advantages": False, "beta": 0.0, "reward_clip_range": None},
        lambda table: [leave_one_out_advantages(rewards) for rewards in _summed(table)],
    ),
}


@pytest.mark.parametrize("unscored", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_those_of_trl(kind: str, seed: int, unscored: float) -> None:
    trl = pytest.importorskip("trl")
    name, settings, ours = KINDS[kind]
    table = _table(seed, unscored=unscored)
    theirs = _run_trl(getattr(trl, name), table, settings)
    mine = [advantage for group in ours(table) for advantage in group]
    assert mine == pytest.approx(theirs, abs=1e-6)  # TRL's nanstd has one float32 factor
    assert max(map(abs, mine)) > 0.5
