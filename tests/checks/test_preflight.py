"""The preflight: each of its checks alone. A run that passes all of them: tests/e2e/test_golden_run.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks import memory, preflight
from grpo_async.checks.preflight import PreflightContext, check_tokenizer
from grpo_async.errors import RequestRejectedError
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.records import Origin, Prompt, TaggedMessage
from grpo_async.run_directory import RunDir
from grpo_async.training.verify import TrainerScores
from grpo_async.utils.text import count
from tests.launch.support import make_config
from tests.support.chat_families import family
from tests.support.local_server import local_server


def _context(folder: Path, **changes: Any) -> PreflightContext:
    """Without servers; `sections` change the config, `prompt` is the text of the run's only one."""
    renderer = ChatRenderer(family("chatml"))
    message = TaggedMessage(role="user", content=changes.pop("prompt", "hello world"), origin=Origin.PROMPT)
    config = make_config(folder, **{"weights": {"timeout_s": 5.0}, **changes.pop("sections", {})})
    fields: dict[str, Any] = {
        "config": config, "run_dir": RunDir(config.run_path), "renderer": renderer, "servers": [],
        "prompts": [Prompt(prompt_id=0, messages=[message])], "probes": [],
        "score_on_trainer": lambda *_: TrainerScores(logprobs=[], perturbed_logprobs=[]), "num_parameters": 0,
        "num_embeddings": len(renderer.tokenizer), "policy_version": 0,
    }  # fmt: skip
    return PreflightContext(**{**fields, **changes})


def _server(**info: Any) -> Any:
    fields = {
        "engine": "vllm", "model": "m", "dtype": "float32", "max_model_len": 64, "policy_version": 0,
    }  # fmt: skip
    return SimpleNamespace(name="server 0", info=ServerInfo(**{**fields, **info}), control=None)


# the scores of two tokens differ by 0 and `moved`: 0.1 in the mean is no rounding of float32, and 1.5 is no rounding
@pytest.mark.parametrize(
    ("version", "moved", "tolerance", "status", "words"),
    [
        (0, 0.001, None, "pass", "over 2 tokens (limit of the mean 0.001;"),
        (4, 0.0, None, "fail", "serves version [4] and not 0"),
        (0, 0.2, None, "fail", "weights.verify_tolerance"),
        (0, 0.2, 0.5, "pass", "limit of the mean 0.5;"),
        (0, 3.0, None, "fail", "other weights"),
    ],
)
def test_a_server_must_score_as_the_trainer(
    tmp_path: Path, version: int, moved: float, tolerance: float | None, status: str, words: str
) -> None:
    answer = SimpleNamespace(policy_version=version, logprobs=[-1.0, -2.0 - moved])
    server = _server()
    server.control = SimpleNamespace(score=lambda probe: answer)
    scores = TrainerScores(logprobs=[[-1.0, -2.0]], perturbed_logprobs=[[-1.0, -2.0]])
    sections = {"weights": {"verify_tolerance": tolerance}}
    context = _context(tmp_path, probes=[[1, 2, 3]], trainer_scores=scores, sections=sections)
    found = preflight.check_logprobs(context, server)
    assert (found[0], words in found[1]) == (status, True), found


# tokenizers of both sides


@pytest.mark.parametrize(
    ("more", "rows", "status"),
    # the last but one: spare rows, as Qwen has
    [(0, 0, "pass"), (-1, 0, "fail"), (64, 0, "fail"), (267, 267, "pass"), (None, 0, "warn")],
)
def test_the_servers_vocabulary_must_be_the_trainers(tmp_path: Path, more: int | None, rows: int, status: str) -> None:
    tokenizer = family("chatml")
    size = 0 if more is None else len(tokenizer) + more
    context = _context(tmp_path, num_embeddings=len(tokenizer) + rows)
    assert check_tokenizer(context, _server(engine="embedded", vocab_size=size))[0] == status


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
)
def test_vllm_must_have_the_same_tokenizer(
    tmp_path: Path, tokenize: Callable[[str], list[int]] | None, status: str, words: str
) -> None:
    def refuse(text: str) -> list[int]:
        raise RequestRejectedError(404, "no such route")

    server = _server(vocab_size=len(family("chatml")))
    server.control = SimpleNamespace(tokenize=tokenize or refuse)
    found = check_tokenizer(_context(tmp_path, prompt="what is the weather?"), server)
    assert (found[0], words in found[1]) == (status, True), found


# addresses, disk

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
def test_a_server_must_want_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, answer: int | None, status: str, words: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "preflight-token")
    with local_server(refuses={"/rollout/info": answer} if answer else {}) as answering:
        server: Any = SimpleNamespace(name="server 0", url=f"http://{host}:{answering.port}")
        found = preflight.check_token(_context(tmp_path), server)
    assert (found[0], words in found[1]) == (status, True), found


@pytest.mark.parametrize(("url", "status"), [("http://127.0.0.1:9", "warn"), ("http://10.1.2.3:9", "fail")])
def test_a_run_without_a_token_is_for_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, status: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    server: Any = SimpleNamespace(name="server 0", url=url)
    assert preflight.check_token(_context(tmp_path), server)[0] == status


# keep_last 2: three checkpoints of 3 x 4 bytes x N, and an export of 4 bytes x N
@pytest.mark.parametrize(
    ("num_there", "free", "status"),
    [(0, 80 * NUMBER, "pass"), (0, 42 * NUMBER, "warn"), (0, 40 * NUMBER - 1, "fail"), (2, 32 * NUMBER, "pass")],
)
def test_disk_for_checkpoints_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_there: int, free: int, status: str
) -> None:
    context = _context(tmp_path, num_parameters=NUMBER)
    context.run_dir.create()
    for step in range(num_there):
        context.run_dir.checkpoint(step).mkdir(parents=True)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    found = preflight.check_disk(context)
    assert found[0] == status
    assert found[1].startswith(f"{count(3 - num_there, 'checkpoint')} of 11.4 MiB and the model of 3.8 MiB need")
