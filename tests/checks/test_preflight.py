"""The preflight: against a real embedded server and a real policy, with faults put in one by one; and each of its checks alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.chat.renderer import ChatRenderer, load_renderer
from grpo_async.checks import memory, preflight
from grpo_async.checks.preflight import PreflightContext, check_tokenizer, run_preflight
from grpo_async.checks.report import Check
from grpo_async.errors import RequestRejectedError
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.control import ServerControl
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.records import Origin, Prompt, TaggedMessage
from grpo_async.run_directory import RunDir
from grpo_async.training.load import load_policy
from grpo_async.training.verify import TrainerScores, probe_sequences, score_twice
from grpo_async.utils.text import count
from tests.launch.support import make_config
from tests.servers.embedded_support import Live, live, load
from tests.support.chat_families import family
from tests.support.local_server import local_server
from tests.support.tiny_model import build_tiny_model

TOKEN = "preflight-token"
NAMES = ["logprobs", "tokenizer", "token", "disk"]


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


def _context(folder: Path, tokenizer: Any, **changes: Any) -> PreflightContext:
    """Without servers; `sections` change the config, `prompt` is the text of the run's only one."""
    renderer = ChatRenderer(tokenizer)
    prompts = [_prompt(changes.pop("prompt", "hello world"))]
    config = make_config(folder, **{"weights": {"timeout_s": 5.0}, **changes.pop("sections", {})})
    fields: dict[str, Any] = {
        "config": config, "run_dir": RunDir(config.run_path), "renderer": renderer, "servers": [], "prompts": prompts,
        "probes": [],
        "score_on_trainer": lambda *_: TrainerScores(logprobs=[], perturbed_logprobs=[]), "num_parameters": 0,
        "num_embeddings": len(tokenizer), "policy_version": 0,
    }  # fmt: skip
    return PreflightContext(**{**fields, **changes})


def _live_context(folder: Path, model: Path, url: str, **changes: Any) -> PreflightContext:
    """Of a real policy and a server, where everything is as it should be but for `changes`; `info` changes what the server says of
    itself."""
    sections: dict[str, Any] = {
        "model": {"path": str(model)},
        "inference": {"engine": "embedded", "max_model_len": 512, "embedded": {"max_slots": 4}},
        "rollout": {"max_completion_tokens": 64},
        "weights": {"timeout_s": 30.0},
    }
    for name, values in changes.pop("sections", {}).items():
        sections[name] = {**sections.get(name, {}), **values}
    config = make_config(folder, **sections)
    RunDir(config.run_path).create()
    policy = load_policy(config.model, temperature=0.7, chunk_tokens=64, max_model_len=512)
    renderer = load_renderer(config)
    control = ServerControl(url, token=TOKEN, timeout_s=30.0, name="server 0")
    rows = policy.model.get_input_embeddings().num_embeddings
    info = control.info().model_copy(update={"vocab_size": rows, **changes.pop("info", {})})
    prompts = [_prompt("what is one and one?"), _prompt("hello world")]
    rendered = [renderer.prompt_ids(prompt.messages) for prompt in prompts]

    def score(sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
        device, rounded = torch.device("cpu"), getattr(torch, rounding)
        return score_twice(policy, sequences, device=device, compute=torch.float32, rounding=rounded)

    fields: dict[str, Any] = {
        "servers": [SimpleNamespace(name="server 0", url=url, info=info, control=control)],
        "prompts": prompts,
        "probes": probe_sequences(rendered, vocab_size=rows, max_model_len=512),
        "score_on_trainer": score,
        "num_parameters": sum(p.numel() for p in policy.model.parameters()),
        "num_embeddings": rows,
    }
    return _context(folder, renderer.tokenizer, sections=sections, **{**fields, **changes})


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
    context = _live_context(tmp_path, tiny_model, server.url)
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
    # 3 checkpoints of weights and two moments, and the model: 10 x 4 bytes x parameters
    assert checks["disk"].detail.startswith("3 checkpoints of ")


def test_a_server_with_other_weights_fails_with_the_likely_cause(
    tmp_path: Path, token: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = build_tiny_model(tmp_path_factory.mktemp("other"), seed=9)
    with live(load(folder), max_model_len=512) as served:
        checks = _run(_live_context(tmp_path, tiny_model, served.url))
    assert _not_passed(checks) == {"logprobs": "fail"}
    for part in ("other weights", "model.path"):
        assert part in checks["logprobs"].detail


def test_a_small_difference_fails_unless_it_is_tolerated(tmp_path: Path, tiny_model: Path, token: str) -> None:
    other = load(tiny_model)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.02)
    with live(other, max_model_len=512) as served:
        strict = _run(_live_context(tmp_path, tiny_model, served.url))["logprobs"]
        assert strict.status == "fail"
        assert "weights.verify_tolerance" in strict.detail
        sections = {"weights": {"verify_tolerance": 0.5}}
        assert _run(_live_context(tmp_path, tiny_model, served.url, sections=sections))["logprobs"].status == "pass"


def test_a_server_of_another_version_fails(tmp_path: Path, tiny_model: Path, server: Live) -> None:
    checks = _run(_live_context(tmp_path, tiny_model, server.url, policy_version=4))
    assert _not_passed(checks) == {"logprobs": "fail"}
    assert "serves version [0] and not 4" in checks["logprobs"].detail


# ---- each check alone ----


# Tokenizers of both sides.


def _server(url: str = "", **info: Any) -> Any:
    fields = {
        "engine": "vllm", "model": "m", "dtype": "float32", "max_model_len": 64, "policy_version": 0,
    }  # fmt: skip
    return SimpleNamespace(name="server 0", url=url, info=ServerInfo(**{**fields, **info}), control=None)


@pytest.mark.parametrize(
    ("more", "rows", "status"),
    [(0, 0, "pass"), (-1, 0, "fail"), (64, 0, "fail"), (267, 267, "pass"), (None, 0, "warn")],
    ids=["equal", "fewer", "more", "spare rows as Qwen has", "unknown"],
)
def test_the_servers_vocabulary_must_be_the_trainers(tmp_path: Path, more: int | None, rows: int, status: str) -> None:
    tokenizer = family("chatml")
    size = 0 if more is None else len(tokenizer) + more
    context = _context(
        tmp_path,
        tokenizer,
        servers=[_server(engine="embedded", vocab_size=size)],
        num_embeddings=len(tokenizer) + rows,
    )
    (server,) = context.servers
    assert check_tokenizer(context, server)[0] == status


def _ids(name: str) -> Callable[[str], list[int]]:
    return lambda text: [int(token) for token in family(name)(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("tokenize", "status", "words"),
    [
        (_ids("chatml"), "pass", "4 texts have the same ids on both sides"),  # three of ours and the prompt
        (_ids("llama3"), "fail", "it has another tokenizer than model.path: 'What is 12 + 30"),
        (lambda text: [*_ids("chatml")(text), *([0] if "weather" in text else [])], "fail", "weather"),
        (None, "warn", "could not be asked"),
    ],
    ids=["same", "other", "other on the run's own prompts", "no such route"],
)
def test_vllm_must_have_the_same_tokenizer(
    tmp_path: Path, tokenize: Callable[[str], list[int]] | None, status: str, words: str
) -> None:
    def refuse(text: str) -> list[int]:
        raise RequestRejectedError(404, "no such route")

    tokenizer = family("chatml")
    server = _server(vocab_size=len(tokenizer))
    server.control = SimpleNamespace(tokenize=tokenize or refuse)
    found = check_tokenizer(_context(tmp_path, tokenizer, servers=[server], prompt="what is the weather?"), server)
    assert (found[0], words in found[1]) == (status, True), found


# Addresses, disk.


NUMBER = 1_000_500


@pytest.mark.parametrize(
    ("host", "answer", "status", "words"),
    [
        ("127.0.0.1", 401, "pass", "is on loopback and wants the token"),
        ("127.0.0.1", None, "warn", "answers without a token"),
        # inet_aton's spelling of 127.0.0.1, which is_loopback does not know: as an address on a network
        ("127.1", 401, "warn", "without TLS"),
        ("127.1", 404, "fail", "answers without a token"),
    ],
)
@pytest.mark.usefixtures("token")
def test_a_server_must_want_the_token(tmp_path: Path, host: str, answer: int | None, status: str, words: str) -> None:
    with local_server(refuses={"/rollout/info": answer} if answer else {}) as answering:
        server: Any = SimpleNamespace(name="server 0", url=f"http://{host}:{answering.port}")
        found = preflight.check_token(_context(tmp_path, family("chatml"), servers=[server]), server)
    assert (found[0], words in found[1]) == (status, True), found


@pytest.mark.parametrize(("url", "status"), [("http://127.0.0.1:9", "warn"), ("http://10.1.2.3:9", "fail")])
def test_a_run_without_a_token_is_for_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, status: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    server: Any = SimpleNamespace(name="server 0", url=url)
    assert preflight.check_token(_context(tmp_path, family("chatml")), server)[0] == status


# keep_last 2: three checkpoints of 3 x 4 bytes x N, and an export of 4 bytes x N
@pytest.mark.parametrize(
    ("num_there", "free", "status"),
    [(0, 80 * NUMBER, "pass"), (0, 42 * NUMBER, "warn"), (0, 40 * NUMBER - 1, "fail"), (2, 32 * NUMBER, "pass")],
)
def test_disk_for_checkpoints_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_there: int, free: int, status: str
) -> None:
    context = _context(tmp_path, family("chatml"), num_parameters=NUMBER)
    context.run_dir.create()
    for step in range(num_there):
        context.run_dir.checkpoint(step).mkdir(parents=True)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    found = preflight.check_disk(context)
    assert found[0] == status
    assert found[1].startswith(f"{count(3 - num_there, 'checkpoint')} of 11.4 MiB and the model of 3.8 MiB need")
