"""The preflight against a real embedded server and a real policy; faults are put in one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.chat.renderer import load_renderer
from grpo_async.checks.preflight import PreflightContext, run_preflight
from grpo_async.checks.report import Check
from grpo_async.config import ExperimentConfig
from grpo_async.inference.control import ServerControl
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.records import Origin, Prompt, TaggedMessage
from grpo_async.run_directory import RunDir
from grpo_async.training.load import load_policy
from grpo_async.training.reference import score_twice
from grpo_async.weights.verify import TrainerScores, probe_sequences
from tests.launcher.support import make_config
from tests.servers.embedded_support import Live, live, load
from tests.support.tiny_model import build_tiny_model

TOKEN = "preflight-token"
NAMES = [
    "logprobs", "tokenizer", "token", "chat template", "dtypes", "weights host", "disk",
]  # fmt: skip


@pytest.fixture(scope="module")
def token() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        yield TOKEN


@pytest.fixture(scope="module")
def server(token: str, tiny_model: Path) -> Iterator[Live]:
    with live(load(tiny_model), max_model_len=512) as served:
        yield served


def _prompt(text: str) -> Prompt:
    return Prompt(prompt_id=0, messages=[TaggedMessage(role="user", content=text, origin=Origin.PROMPT)])


def _config(folder: Path, model: Path, /, **sections: Any) -> ExperimentConfig:
    base: dict[str, Any] = {
        "model": {"path": str(model)},
        "inference": {"engine": "embedded", "max_model_len": 512, "embedded": {"max_slots": 4}},
        "rollout": {"max_completion_tokens": 64},
        "weights": {"timeout_s": 30.0},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return make_config(folder, **base)


def _context(folder: Path, model: Path, url: str, **changes: Any) -> PreflightContext:
    """Everything as it should be but for `changes`; `info` changes what the server says of itself, `sections` the config."""
    config = _config(folder, model, **changes.pop("sections", {}))
    run_dir = RunDir(config.run_path)
    run_dir.create()
    policy = load_policy(config.model, temperature=0.7, chunk_tokens=64, max_model_len=512)
    renderer = load_renderer(config)
    token = changes.pop("server_token", TOKEN)
    control = ServerControl(url, token=token, timeout_s=30.0, name="server 0")
    rows = policy.model.get_input_embeddings().num_embeddings
    said = changes.pop("info", {})
    info = control.info().model_copy(update={"vocab_size": rows, **said})
    prompts = [_prompt("what is one and one?"), _prompt("hello world")]

    def score(sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
        return score_twice(
            policy,
            sequences,
            device=torch.device("cpu"),
            compute=torch.float32,
            rounding=getattr(torch, rounding),
        )

    fields: dict[str, Any] = {
        "config": config,
        "run_dir": run_dir,
        "renderer": renderer,
        "servers": [SimpleNamespace(name="server 0", url=url, info=info, control=control)],
        "prompts": prompts,
        "probes": probe_sequences(
            [renderer.prompt_ids(prompt.messages) for prompt in prompts], vocab_size=rows, max_model_len=512
        ),
        "score_on_trainer": score,
        "parameter_shapes": {name: tuple(p.shape) for name, p in policy.model.named_parameters()},
        "num_embeddings": rows,
        "policy_version": 0,
        "token": TOKEN,
    }
    return PreflightContext(**{**fields, **changes})


def _run(context: PreflightContext) -> dict[str, Check]:
    """The worst check of each name."""
    order = ("pass", "warn", "fail")
    worst: dict[str, Check] = {}
    for check in run_preflight(context):
        if check.name not in worst or order.index(check.status) > order.index(worst[check.name].status):
            worst[check.name] = check
    return worst


def _not_passed(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in checks.items() if check.status != "pass"}


def test_a_run_where_everything_fits_passes_every_check_and_writes_them(
    tmp_path: Path, tiny_model: Path, server: Live
) -> None:
    context = _context(tmp_path, tiny_model, server.url)
    found = run_preflight(context)
    assert [check for check in found if check.status != "pass"] == []
    assert [check.name for check in found] == NAMES
    assert json.loads(context.run_dir.preflight.read_text()) == {
        "status": "pass",
        "checks": [asdict(check) for check in found],
    }
    checks = {check.name: check for check in found}
    # probes of 16, 64 and 300 tokens: 15 + 63 + 299 are predicted
    assert "over 377 tokens (limit of the mean 0.001;" in checks["logprobs"].detail
    assert "turns end with <|im_end|>" in checks["chat template"].detail
    # 3 checkpoints of weights and two moments, and the model: 10 x 4 bytes x parameters
    assert checks["disk"].detail.startswith("3 checkpoint(s) of ")


def test_a_server_with_other_weights_fails_with_the_likely_cause(
    tmp_path: Path, token: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = build_tiny_model(tmp_path_factory.mktemp("other"), seed=9)
    with live(load(folder), max_model_len=512) as served:
        checks = _run(_context(tmp_path, tiny_model, served.url))
    assert _not_passed(checks) == {"logprobs": "fail"}
    for part in ("mean by length: ", "in the probe of 300", "other weights", "model.path"):
        assert part in checks["logprobs"].detail


def test_a_small_difference_fails_unless_it_is_tolerated(tmp_path: Path, tiny_model: Path, token: str) -> None:
    other = load(tiny_model)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.02)
    with live(other, max_model_len=512) as served:
        strict = _run(_context(tmp_path, tiny_model, served.url))["logprobs"]
        assert strict.status == "fail"
        assert "weights.verify_tolerance" in strict.detail
        sections = {"weights": {"verify_tolerance": 0.5}}
        assert _run(_context(tmp_path, tiny_model, served.url, sections=sections))["logprobs"].status == "pass"


def test_a_server_of_another_version_fails(tmp_path: Path, tiny_model: Path, server: Live) -> None:
    checks = _run(_context(tmp_path, tiny_model, server.url, policy_version=4))
    assert _not_passed(checks) == {"logprobs": "fail"}
    assert "serves version [0] and not 4" in checks["logprobs"].detail


def test_a_served_dtype_that_was_not_sent_is_a_warning_and_widens_the_limit(
    tmp_path: Path, tiny_model: Path, server: Live
) -> None:
    compute = {"model": {"compute_dtype": "bfloat16"}}
    checks = _run(_context(tmp_path, tiny_model, server.url, info={"dtype": "bfloat16"}, sections=compute))
    assert _not_passed(checks) == {"dtypes": "warn"}
    assert "server 0 serves bfloat16 and gets float32 (inference.dtype)" in checks["dtypes"].detail
    assert "model.compute_dtype" in checks["dtypes"].detail
    limit = re.search(r"limit of the mean ([0-9.]+)", checks["logprobs"].detail)
    assert limit is not None
    assert 0.002 < float(limit[1]) < 0.1
