"""The whole, end to end, on real processes: embedded server, torchrun trainer, gloo push."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from grpo_async.buffer.ledger import is_balanced
from grpo_async.tracking.catalog import describe
from scripts.install import digest, read_stamp
from tests.e2e.support import REPOSITORY, Run, assert_ledger_balances_at_every_step, rows_of

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1000)
def test_the_quickstart_script_learns_and_leaves_a_summary_and_a_model_that_loads(tmp_path: Path) -> None:
    """15 of its 50 steps: it has learned by then."""
    stamp = read_stamp()
    is_ready = stamp is not None and (stamp.checkout, stamp.inputs) == (str(REPOSITORY.resolve()), digest(REPOSITORY))
    assert is_ready, "it would make .venv anew under all other tests; first: scripts/bootstrap.sh --with-tests"
    done = subprocess.run(
        ["./scripts/quickstart.sh", *("--set", "training.max_steps=15"), *("--set", f"run.dir={tmp_path}")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for word in ("reward", "held-out", "balanced", "inspect-rollouts"):
        assert word in done.stdout, f"the summary does not show {word!r}:\n{done.stdout}"
    (folder,) = tmp_path.iterdir()
    run = Run(config=folder / "config.yaml", folder=folder)
    summary = run.summary()
    assert summary["status"] == "finished"
    assert is_balanced(summary["ledger"])
    assert summary["staleness_max"] <= 1
    assert summary["reward_last"] > summary["reward_first"] + 0.3
    evaluation = summary["evaluation"]
    assert evaluation["after"]["reward"] > evaluation["before"]["reward"] + 0.2
    assert evaluation["after"]["reward"] > evaluation["majority_baseline"] + 0.4
    unknown = {name for line in run.metrics() for name in line if not describe(name).is_known}
    assert not unknown, "add them to tracking/catalog.py"
    assert_ledger_balances_at_every_step(run.metrics())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run.folder / "model")
    AutoTokenizer.from_pretrained(run.folder / "model")
    assert len(rows_of(run.folder, "trained")) == summary["ledger"]["groups"]["trained"]
