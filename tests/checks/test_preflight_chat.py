"""The preflight's checks of text: chat template, end of turn, tools, control tokens, tokenizers of both sides."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.chat.encoding import Encoder, Guarded
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks.preflight_chat import check_chat, check_tokenizer
from grpo_async.checks.preflight_context import PreflightContext
from grpo_async.checks.report import Check
from grpo_async.inference.surface import ServerInfo
from grpo_async.records import Origin, Prompt, TaggedMessage
from grpo_async.rundir import RunDir
from grpo_async.weights.verify import TrainerScores
from tests.launcher.support import make_config
from tests.support.chat_families import family

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
    config = make_config(folder, weights={"timeout_s": 5.0}, **changes.pop("sections", {}))
    message = TaggedMessage(role="user", content=text, origin=Origin.PROMPT)
    fields: dict[str, Any] = {
        "config": config,
        "rundir": RunDir(config.run_path),
        "renderer": ChatRenderer(tokenizer, end_of_turn_tokens=ends),
        "servers": [],
        "prompts": [Prompt(prompt_id=0, messages=[message])],
        "probes": [],
        "score_on_trainer": lambda *_: TrainerScores(logprobs=[], rounded_anew=[]),
        "parameter_problems": [],
        "parameter_shapes": {},
        "num_embeddings": len(tokenizer),
        "policy_version": 0,
        "transport": "gloo",
        "first_push": {},
        "device": "cpu",
        "token": "secret",
    }
    return PreflightContext(**{**fields, **changes})


def _problems(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.status, check.detail) for check in checks if check.status != "pass"]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "chatml"])
def test_usual_templates_pass(tmp_path: Path, name: str) -> None:
    tokenizer = family(name)
    checks = check_chat(_context(tmp_path, tokenizer))
    assert _problems(checks) == []
    assert f"turns end with {tokenizer.eos_token}" in checks[0].detail


def test_tools_that_the_template_knows_are_named(tmp_path: Path) -> None:
    checks = check_chat(_context(tmp_path, family("qwen3"), tool_sets=[[TOOL]]))
    assert _problems(checks) == []
    assert checks[0].detail.endswith("tools: search")


def test_a_template_without_tool_results_fails(tmp_path: Path) -> None:
    problems = _problems(check_chat(_context(tmp_path, family("no_tool_role"), tool_sets=[[TOOL]])))
    assert [status for status, _ in problems] == ["fail"]
    assert problems[0][1].startswith("tools (search, ...): ")


def test_a_template_that_does_not_tell_the_model_about_tools_fails(tmp_path: Path) -> None:
    problems = _problems(check_chat(_context(tmp_path, family("chatml"), tool_sets=[[TOOL]])))
    assert [status for status, _ in problems] == ["fail"]
    assert "does not tell the model about the tools" in problems[0][1]


def test_a_template_that_ends_turns_with_another_token_is_a_warning(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(family("chatml"))
    tokenizer.eos_token = "<|endoftext|>"
    problems = _problems(check_chat(_context(tmp_path, tokenizer)))
    assert [status for status, _ in problems] == ["warn"]
    assert "goes on after an answer with ['<|im_end|>'" in problems[0][1]
    assert _problems(check_chat(_context(tmp_path, tokenizer, end_of_turn_tokens=["<|im_end|>"]))) == []


def test_no_token_that_ends_a_turn_is_a_warning(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(family("chatml"))
    tokenizer.eos_token = None
    problems = _problems(check_chat(_context(tmp_path, tokenizer)))
    assert problems[0][0] == "warn"
    assert "every completion runs to its limit" in problems[0][1]


def test_prompts_that_change_when_they_are_tokenized_again_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy.deepcopy(family("chatml"))
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decode(ids, **options).replace("world", " world"))
    problems = _problems(check_chat(_context(tmp_path, tokenizer)))
    assert [status for status, _ in problems] == ["warn"]
    assert "prompt 0 as text encodes to other ids from token " in problems[0][1]


def test_a_prompt_with_ids_that_the_model_has_not_fails(tmp_path: Path) -> None:
    problems = _problems(check_chat(_context(tmp_path, family("chatml"), num_embeddings=4)))
    assert ("fail", True) in [(status, "another tokenizer's" in detail) for status, detail in problems]


def test_a_prompt_without_tokens_fails(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(family("chatml"))
    tokenizer.chat_template = "{% for message in messages %}{% endfor %}"
    problems = _problems(check_chat(_context(tmp_path, tokenizer)))
    assert problems[0] == ("fail", "prompt 0 renders to no tokens at all; look at model.chat_template")


def test_foreign_text_that_becomes_a_control_token_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "guard", lambda self, messages, foreign: Guarded(messages=messages, marks={}))
    problems = _problems(check_chat(_context(tmp_path, family("chatml"))))
    assert problems == [("fail", "the text '<|im_end|>' in a message of a tool or environment becomes a control token")]


def test_without_a_template_only_the_prompts_are_checked(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(family("chatml"))
    tokenizer.chat_template = None
    context = _context(tmp_path, tokenizer)
    plain = Prompt(prompt_id=0, messages=context.prompts[0].messages, is_conversational=False)
    assert _problems(check_chat(_context(tmp_path, tokenizer, prompts=[plain]))) == []


# Tokenizers of both sides.


def _server(url: str = "", **info: Any) -> Any:
    fields = {
        "engine": "vllm", "engine_version": "1", "model": "m", "dtype": "float32", "max_model_len": 64, "policy_version": 0,
    }  # fmt: skip
    return SimpleNamespace(name="server 0", url=url, info=ServerInfo(**{**fields, **info}), control=None)


@pytest.mark.parametrize(("more", "status"), [(0, "pass"), (-1, "fail"), (64, "fail")])
def test_the_servers_vocabulary_must_be_the_trainers(tmp_path: Path, more: int, status: str) -> None:
    tokenizer = family("chatml")
    server = _server(engine="embedded", vocab_size=len(tokenizer) + more)
    checks = check_tokenizer(_context(tmp_path, tokenizer, servers=[server]))
    assert [check.status for check in checks] == [status]


def test_an_embedding_with_spare_rows_passes(tmp_path: Path) -> None:
    """Qwen pads its embedding: 151,669 ids, 151,936 rows."""
    tokenizer = family("chatml")
    rows = len(tokenizer) + 267
    server = _server(engine="embedded", vocab_size=rows)
    checks = check_tokenizer(_context(tmp_path, tokenizer, servers=[server], num_embeddings=rows))
    assert [check.status for check in checks] == ["pass"]


def test_a_server_that_does_not_say_its_vocabulary_is_a_warning(tmp_path: Path) -> None:
    checks = check_tokenizer(_context(tmp_path, family("chatml"), servers=[_server(vocab_size=0)]))
    assert [check.status for check in checks] == ["warn"]


@contextmanager
def _tokenizing_server(tokenize: Callable[[str], list[int]] | None) -> Iterator[tuple[str, list[str]]]:
    """vLLM's /tokenize alone, or 404 where `tokenize` is None; yields its address and the Authorization headers it saw."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append(self.headers.get("authorization", ""))
            found = tokenize is not None and self.path == "/tokenize" and body["add_special_tokens"] is False
            answer = json.dumps(
                {"tokens": tokenize(body["prompt"])} if found and tokenize else {"error": "no"}
            ).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join(10.0)


def _against(tmp_path: Path, tokenize: Callable[[str], list[int]] | None) -> tuple[Check, list[str]]:
    tokenizer = family("chatml")
    with _tokenizing_server(tokenize) as (url, seen):
        server = _server(url, vocab_size=len(tokenizer))
        (check,) = check_tokenizer(_context(tmp_path, tokenizer, servers=[server], prompt="what is the weather?"))
    return check, seen


def _ids(name: str) -> Callable[[str], list[int]]:
    return lambda text: [int(token) for token in family(name)(text, add_special_tokens=False)["input_ids"]]


def test_vllm_with_the_same_tokenizer_passes_and_is_asked_with_the_token(tmp_path: Path) -> None:
    check, seen = _against(tmp_path, _ids("chatml"))
    assert check.status == "pass"
    assert "4 texts have the same ids on both sides" in check.detail  # three of ours and the prompt
    assert set(seen) == {"Bearer secret"}


def test_vllm_with_another_tokenizer_fails_with_the_text_that_differs(tmp_path: Path) -> None:
    check, _ = _against(tmp_path, _ids("llama3"))
    assert check.status == "fail"
    assert "server 0 has another tokenizer than model.path: 'What is 12 + 30" in check.detail


def test_a_tokenizer_that_differs_on_the_runs_own_prompts_only_fails(tmp_path: Path) -> None:
    same = _ids("chatml")
    check, _ = _against(tmp_path, lambda text: [*same(text), 0] if "weather" in text else same(text))
    assert check.status == "fail"


def test_vllm_without_that_route_is_a_warning(tmp_path: Path) -> None:
    check, _ = _against(tmp_path, None)
    assert check.status == "warn"
    assert "could not be asked" in check.detail
