"""Each check of the preflight alone: chat template, tools, control tokens, tokenizers, addresses, disk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.chat.encoding import Encoder, Guarded
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks import memory, preflight
from grpo_async.checks.preflight import PreflightContext, check_chat_template, check_tokenizer
from grpo_async.checks.report import Found
from grpo_async.errors import RequestRejectedError
from grpo_async.inference.api import ServerInfo
from grpo_async.records import Origin, Prompt, TaggedMessage
from grpo_async.run_directory import RunDir
from grpo_async.weights.verify import TrainerScores
from tests.launcher.support import make_config
from tests.support.chat_families import family
from tests.support.local_server import local_server

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


def _context(folder: Path, tokenizer: Any, **changes: Any) -> PreflightContext:
    ends = changes.pop("end_of_turn_tokens", [])
    text = changes.pop("prompt", "hello world")
    config = make_config(folder, **{"weights": {"timeout_s": 5.0}, **changes.pop("sections", {})})
    message = TaggedMessage(role="user", content=text, origin=Origin.PROMPT)
    fields: dict[str, Any] = {
        "config": config,
        "run_dir": RunDir(config.run_path),
        "renderer": ChatRenderer(tokenizer, end_of_turn_tokens=ends),
        "servers": [],
        "prompts": [Prompt(prompt_id=0, messages=[message])],
        "probes": [],
        "score_on_trainer": lambda *_: TrainerScores(logprobs=[], rounded_anew=[]),
        "parameter_shapes": {},
        "num_embeddings": len(tokenizer),
        "policy_version": 0,
        "token": "secret",
    }
    return PreflightContext(**{**fields, **changes})


def _problems(found: list[Found]) -> list[Found]:
    return [(status, detail) for status, detail in found if status != "pass"]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "chatml"])
def test_usual_templates_pass(tmp_path: Path, name: str) -> None:
    tokenizer = family(name)
    checks = check_chat_template(_context(tmp_path, tokenizer))
    assert _problems(checks) == []
    assert f"turns end with {tokenizer.eos_token}" in checks[0][1]


@pytest.mark.parametrize("template", ["no_tool_role", "chatml"])
def test_a_template_without_tool_results_or_tools_fails(tmp_path: Path, template: str) -> None:
    (problem,) = _problems(check_chat_template(_context(tmp_path, family(template), tool_sets=[[TOOL]])))
    assert (problem[0], problem[1].startswith("tools (search, ...): ")) == ("fail", True)


def test_a_template_that_ends_turns_with_another_token_is_a_warning(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(family("chatml"))
    tokenizer.eos_token = "<|endoftext|>"
    problems = _problems(check_chat_template(_context(tmp_path, tokenizer)))
    assert [status for status, _ in problems] == ["warn"]
    assert "after an answer the chat template continues with ['<|im_end|>'" in problems[0][1]
    assert _problems(check_chat_template(_context(tmp_path, tokenizer, end_of_turn_tokens=["<|im_end|>"]))) == []


def test_foreign_text_that_becomes_a_control_token_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "guard", lambda self, messages, foreign: Guarded(messages=messages, placeholders={}))
    problems = _problems(check_chat_template(_context(tmp_path, family("chatml"))))
    assert problems == [("fail", "the text '<|im_end|>' in a message of a tool or environment becomes a control token")]


# Tokenizers of both sides.


def _server(url: str = "", **info: Any) -> Any:
    fields = {
        "engine": "vllm", "engine_version": "1", "model": "m", "dtype": "float32", "max_model_len": 64, "policy_version": 0,
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


@pytest.mark.parametrize(
    ("host", "status", "words"),
    [
        ("127.0.0.1", "pass", "is not reached from outside"),
        ("192.0.2.1", "warn", "can be reached from other machines"),
        ("0.0.0.0", "warn", "listens on every network"),
    ],
)
def test_the_address_of_the_weight_group(tmp_path: Path, host: str, status: str, words: str) -> None:
    (found,) = preflight.check_weights_host(_context(tmp_path, family("chatml"), sections={"weights": {"host": host}}))
    assert (found[0], words in found[1]) == (status, True), found


@pytest.mark.parametrize(
    ("host", "answer", "status", "words"),
    [
        ("127.0.0.1", 401, "pass", "is on loopback and wants the token"),
        ("127.0.0.1", 404, "warn", "answers without a token"),
        # inet_aton's spelling of 127.0.0.1, which is_loopback does not know: as an address on a network
        ("127.1", 401, "warn", "without TLS"),
        ("127.1", 404, "fail", "answers without a token"),
    ],
)
def test_a_server_must_want_the_token(tmp_path: Path, host: str, answer: int, status: str, words: str) -> None:
    with local_server(refuses={"/rollout/info": answer}) as answering:
        server = _server(f"http://{host}:{answering.port}", engine="embedded")
        found = preflight.check_token(_context(tmp_path, family("chatml"), servers=[server]), server)
    assert (found[0], words in found[1]) == (status, True), found


@pytest.mark.parametrize(("url", "status"), [("http://127.0.0.1:9", "warn"), ("http://10.1.2.3:9", "fail")])
def test_a_run_without_a_token_is_for_loopback_only(tmp_path: Path, url: str, status: str) -> None:
    found = preflight.check_token(_context(tmp_path, family("chatml"), token=None), _server(url))
    assert found[0] == status


NUMBER = 1_000_500


# keep_last 2: three checkpoints of 3 x 4 bytes x N, and an export of 4 bytes x N
@pytest.mark.parametrize(
    ("num_there", "free", "status"),
    [(0, 80 * NUMBER, "pass"), (0, 42 * NUMBER, "warn"), (0, 40 * NUMBER - 1, "fail"), (2, 32 * NUMBER, "pass")],
)
def test_disk_for_checkpoints_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_there: int, free: int, status: str
) -> None:
    context = _context(tmp_path, family("chatml"), parameter_shapes={"a": (NUMBER,)})
    context.run_dir.create()
    for step in range(num_there):
        context.run_dir.checkpoint(step).mkdir(parents=True)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    (found,) = preflight.check_disk(context)
    assert found[0] == status
    assert found[1].startswith(f"{3 - num_there} checkpoint(s) of 11.4 MiB and the model of 3.8 MiB need")
