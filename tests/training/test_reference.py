"""Each kind of reference gives the log-probabilities of its model, leaves nothing gathered, and does not change with the policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_async.training.verify import score_sequences
from tests.support.ranks import run_on_ranks
from tests.training.shard_jobs import MODULE, SEQUENCES
from tests.training.tiny_models import load_tiny, save_model


@pytest.mark.slow
def test_references_answer_as_their_models_do_on_two_ranks(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3", vocab_size=320)
    other = save_model(tmp_path / "other", "qwen3", vocab_size=320, seed=1)
    done = run_on_ranks("ask_references", 2, tmp_path / "run", module=MODULE, model=model, other=other)
    expected = {
        name: score_sequences(load_tiny(folder), SEQUENCES[:1], device=torch.device("cpu"))[0]
        for name, folder in (("off", model), ("frozen", other))
    }
    for name, logprobs in expected.items():
        assert done["first"][name] == pytest.approx(logprobs, abs=1e-5)
        assert done["second"][name] == pytest.approx(logprobs, abs=1e-5)  # the policy has moved, the reference has not
    assert (done["nothing"], done["gathered"], done["frozen"]) == ([0, 0], 0, 0)
