"""kill -9 of a whole run at random moments: the ledger of every resumed run balances, none loses a prompt, and synchronous ones end
with the weights of a run that was never interrupted, bit by bit.

Two chains, one synchronous and one asynchronous: a run is killed, resumed, killed again, twenty times in all, and then finished
(`nightly`); and a short synchronous one of one kill. The moments are drawn from a seed: some seconds after the start, or after a
step that many further on was written to metrics.jsonl.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import SMALL, Run, assert_ledger_balances_at_every_step, make_run
from tests.support.stored import read_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = (1, 5)  # kills and steps: a life lasts for one to five steps, so that all kills are over before the run is
LONG = (10, 60)
MAX_STEPS = 5  # of a life
SETTINGS = (
    *SMALL,
    "rollout.max_completion_tokens=32",
    "rollout.zero_variance=resample",  # every step trains four groups, so their number does not hang on luck
    "optimizer.lr=2e-5",  # it learns slowly: what the model knows gives no signal, and so no group
    "checkpoint.every_steps=1",
    "evaluation=null",
)
# what depends on the clock: seconds and what is derived from them, and how far the next step's groups are when a line is written
# (one of them may be filtered by then; the ledger at the end is compared whole)
_TRANSIENT = (
    "step_time", "pipeline/", "perf/", "sync/", "checkpoint/", "buffer/", "rollout/duration_s", "fleet/", "servers/",
    "ledger/groups/started", "ledger/groups/in_flight", "ledger/groups/queued", "ledger/groups/filtered",
    "epoch", "ledger/tokens/started", "ledger/tokens/in_flight", "ledger/tokens/queued", "ledger/tokens/filtered",
)  # fmt: skip


def _of_the_moment(name: str) -> bool:
    return name.startswith(_TRANSIENT) or name.endswith(("_s", "_per_s"))


def _what_is_repeatable(run: Run) -> list[dict[str, Any]]:
    return [{name: v for name, v in line.items() if not _of_the_moment(name)} for line in run.metrics()]


def _weights(run: Run) -> dict[str, bytes]:
    from safetensors.torch import load_file

    tensors = load_file(run.folder / "model" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def _trained(run: Run) -> dict[int, Counter[int]]:
    """step -> prompts that the rollout store says were trained in it."""
    found: dict[int, Counter[int]] = {}
    for row in read_groups(run.folder / "rollouts"):
        if row.status.value == "trained":
            assert row.step is not None
            found.setdefault(row.step, Counter())[row.prompt_id] += 1
    return found


def _wait_for_the_moment(run: Run, process: subprocess.Popen[str], moments: random.Random, last: int) -> str:
    """Until a random moment; says which. It ends early when the run does."""
    steps_before = len(run.metrics())
    further = moments.choice([0, 1, 1, 2, 2])
    delay_s = moments.uniform(0.0, 12.0 if further == 0 else 0.7)
    ends_at = time.monotonic() + 120.0
    while further and process.poll() is None and len(run.metrics()) < min(steps_before + further, last):
        assert time.monotonic() < ends_at, run.logs()[-3000:]
        time.sleep(0.01)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < delay_s:
        if len(run.metrics()) >= steps_before + MAX_STEPS:  # a fast machine: there must be steps left for all kills
            break
        time.sleep(0.01)
    return f"{further} steps and {delay_s:.2f} s"


def _chain(run: Run, *, kills: int, steps: int, seed: int) -> list[str]:
    """Kill and resume, then finish; the moments, with the step that each resume went on from."""
    moments = random.Random(seed)
    arguments: list[str] = []
    history: list[str] = []
    for _ in range(kills):
        process = run.start(*arguments)
        moment = _wait_for_the_moment(run, process, moments, steps)
        if process.poll() is not None:
            output = process.communicate(timeout=30.0)[0]
            raise AssertionError("\n".join([*history, "it ended by itself", output[-3000:], run.logs()[-3000:]]))
        run.kill_everything(process)
        saved = run.checkpoints()
        history.append(f"killed after {moment}; checkpoints {saved}, lines {len(run.metrics())}")
        arguments = ["--resume"] if saved else ["--clean"]
    print("\n".join(history))
    run.end(run.start(*arguments), timeout_s=240.0)
    return history


def _assert_accounts_are_right(run: Run, steps: int, history: list[str]) -> None:
    where = "\n".join(history)
    summary = run.summary()
    assert summary["ledger_closed"], where
    groups = summary["ledger"]["groups"]
    assert groups["trained"] == steps * 4, f"{groups}\n{where}"
    assert groups["queued"] == groups["in_flight"] == 0, f"{groups}\n{where}"
    assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1)), where
    assert_ledger_balances_at_every_step(run.metrics())
    # the store agrees: each step trained four prompts, and no prompt was trained twice
    trained = _trained(run)
    assert {step: counts.total() for step, counts in trained.items()} == dict.fromkeys(range(1, steps + 1), 4), where
    assert max(sum(trained.values(), Counter()).values()) == 1, where
    rows = [row for row in read_groups(run.folder / "rollouts") if row.status.value != "cancelled"]
    written = Counter(row.prompt_id for row in rows)
    assert set(written.values()) == {1}, f"a prompt was written twice: {written}\n{where}"
    # no prompt was skipped: what was written, and what was in flight at the end, are the first ones of the stream
    known = {row.prompt_id for row in read_groups(run.folder / "rollouts")}
    assert known == set(range(len(known))), f"{sorted(known)}\n{where}"


@pytest.mark.parametrize(("kills", "steps"), [SHORT, pytest.param(*LONG, marks=pytest.mark.nightly)])
def test_a_synchronous_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, kills: int, steps: int
) -> None:
    """The short one with what has a state of its own: several passes over a step, and a reference that follows the policy."""
    moving = (
        *("training.num_iterations=2", "training.minibatches=2", "loss.beta=0.01", "loss.sync_ref_model=true"),
        "loss.ref_model_sync_steps=2",
    )
    sync = (*SETTINGS, f"training.max_steps={steps}", "rollout.max_staleness=0", *(moving if steps == SHORT[1] else ()))
    straight = make_run(tmp_path, "quickstart.yaml", (*sync, "checkpoint.keep_last=4"), name="straight")
    straight.complete()
    if steps == SHORT[1]:  # a fork of its second step, in which nothing is changed
        files = {path: path.stat().st_mtime_ns for path in straight.folder.rglob("*") if path.is_file()}
        forked = Run(config=straight.config, folder=tmp_path / "forked")
        forked.end(forked.start("--fork", f"{straight.folder}@2", "--set", "run.name=forked"))
        assert {path: path.stat().st_mtime_ns for path in files} == files
        assert _what_is_repeatable(forked) == _what_is_repeatable(straight)
        assert _weights(forked) == _weights(straight)
        assert forked.summary()["ledger"] == straight.summary()["ledger"]
    killed = make_run(tmp_path, "quickstart.yaml", sync, name="killed")
    history = _chain(killed, kills=kills, steps=steps, seed=1)
    _assert_accounts_are_right(straight, steps, [])
    _assert_accounts_are_right(killed, steps, history)
    assert _what_is_repeatable(killed) == _what_is_repeatable(straight), "\n".join(history)
    assert _weights(killed) == _weights(straight), "\n".join(history)
    assert json.dumps(killed.summary()["ledger"]) == json.dumps(straight.summary()["ledger"]), "\n".join(history)


@pytest.mark.nightly
def test_an_asynchronous_run_that_is_killed_again_and_again_loses_no_prompt(tmp_path: Path) -> None:
    kills, steps = LONG
    run = make_run(
        tmp_path,
        "quickstart.yaml",
        (*SETTINGS, f"training.max_steps={steps}", "rollout.max_staleness=2"),
        name="killed",
    )
    history = _chain(run, kills=kills, steps=steps, seed=2)
    _assert_accounts_are_right(run, steps, history)
