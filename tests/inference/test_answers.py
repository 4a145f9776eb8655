"""A server that lies: what the client takes is exactly what was sampled, or the answer is refused by name."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from grpo_async.errors import BadResponseError, ServerUnavailableError
from grpo_async.inference.answer import Answer
from grpo_async.inference.api import GenerateChunk, GenerateRequest
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.records import TOP
from grpo_async.utils.retry import RetryPolicy
from tests.inference.scripted_servers import ScriptedServers
from tests.support.local_server import BreakOff, LocalServer, Refusal, Request, local_server

VOCAB, STOP_ID, VERSIONS = 1000, 7, range(3, 6)
PROMPT = [1, 2]
NUM_MUTATIONS = 2000

Line = dict[str, Any]


def truth(name: str, max_tokens: int) -> list[Line]:
    """What an honest server would sample: one token a line, the version grows, and every third ends with a stop token."""
    rng = random.Random(name)
    length = max_tokens - 2 if rng.random() < 1 / 3 else max_tokens
    lines = [
        {
            "token_ids": [rng.randrange(8, VOCAB)],
            "logprobs": [float(np.float32(-rng.random()))],
            "policy_version": min(VERSIONS[-1], VERSIONS[0] + number // 3),
            "offset": number,
            "request_id": name,
            "finish_reason": None,
        }
        for number in range(length)
    ]
    if length < max_tokens:
        lines[-1]["token_ids"] = [STOP_ID]
    lines[-1]["finish_reason"] = "stop" if length < max_tokens else "length"
    return lines


def _set(key: str, *values: Any) -> Callable[[list[Line], random.Random], None]:
    """Put one of these into a line, in place of an entry if the key has a list."""

    def mutate(lines: list[Line], rng: random.Random) -> None:
        line, value = rng.choice(lines), rng.choice(values)
        line[key] = [value] if isinstance(line.get(key), list) and not isinstance(value, list) else value

    return mutate


def _end_early(lines: list[Line], rng: random.Random) -> None:
    rng.choice(lines[:-1])["finish_reason"] = rng.choice(["stop", "length"])


def _swap(lines: list[Line], rng: random.Random) -> None:
    at = rng.randrange(len(lines) - 1)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]


def _go_on(lines: list[Line], rng: random.Random) -> None:
    lines.append({**lines[-1], "offset": len(lines), "finish_reason": rng.choice(["stop", "length", None])})


def _more_in_one(lines: list[Line], rng: random.Random) -> None:
    line = lines[-1]
    line["token_ids"], line["logprobs"] = line["token_ids"] * 9, line["logprobs"] * 9


def _go_back(lines: list[Line], rng: random.Random) -> None:
    lines[-1]["policy_version"] = VERSIONS[0]


NAN, INF = float("nan"), float("inf")
MUTATIONS: list[Callable[[list[Line], random.Random], Any]] = [
    lambda lines, rng: None,
    _set("token_ids", VOCAB, -1, True, 5.5, 5.0, "5", 1 << 31, 1 << 70, None, [[5]], {}, [], "56"),
    _set("logprobs", NAN, INF, -INF, -1e300, 1e300, 0.5, "-0.5", True, None, [], {}, -200.0),
    _set("policy_version", 99, -1, 2, 3.5, "4", None, True, 1 << 40, -(1 << 70)),
    _set("finish_reason", "eos", "", 1, True, ["stop"], {}),
    _set("stop_reason", "###", 5, ""),
    _set("request_id", "another", 5, None),
    _set("top_logprobs", ["AAAAAAAAAAA="], 5, "5", None),
    _set("offset", -1, 99, "0", 0.5, True),
    _set("error", "out of memory", "", {"message": "x"}, 5),
    _set("prompt_token_ids", [1, 3]),
    _set("usage", {"tokens": 3}),
    lambda lines, rng: lines.insert(rng.randrange(len(lines)), rng.choice(lines)),
    lambda lines, rng: lines.append(rng.choice(lines)),
    lambda lines, rng: lines.pop(rng.randrange(len(lines))),
    lambda lines, rng: rng.choice(lines).pop("logprobs"),
    lambda lines, rng: rng.choice(lines).pop("token_ids"),
    lambda lines, rng: lines.insert(rng.randrange(len(lines)), {}),
    lambda lines, rng: lines.__setitem__(rng.randrange(len(lines)), rng.choice([[], 5, "stop", None, True, [{}]])),
    _end_early,
    _swap,
    _go_on,
    _more_in_one,
    _go_back,
]


def _insert(text: bytes, at: int, added: bytes) -> bytes:
    return text[:at] + added + text[at:]


def _garble(text: bytes, rng: random.Random) -> tuple[bytes, Exception | None]:
    """Damage the bytes, and say how the connection ends. Nothing that turns one number into another."""
    at = rng.randrange(len(text))
    between = text.find(b"\n", at) + 1
    choices: list[Callable[[], tuple[bytes, Exception | None]]] = [
        lambda: (text[:at], None),
        lambda: (text[:at], BreakOff()),
        lambda: (text, BreakOff()),
        lambda: (_insert(text, at, bytes([rng.randrange(128, 256)])), None),
        lambda: (_insert(text, at, rng.choice([b"\0", b"\x1b[2J", b"\n", b"\xef\xbb\xbf", b"\xc0\x80"])), None),
        lambda: (_insert(text, between, rng.choice([b"\n", b"\r\n", b"  \n\n"])), None),
        lambda: (_insert(text, between, rng.choice([b"data: [DONE]\n", b": keep-alive\n", b"[DONE]\n[DONE]\n"])), None),
        lambda: (text + rng.choice([b"data: [DONE]\n", b"{}\n", b"null", b'{"error": "late"}\n']), None),
        lambda: (gzip.compress(text), None),
        lambda: (b"<html><body>502 Bad Gateway</body></html>", None),
        lambda: (rng.choice([b'{"error": "no"}', b'{"error": {"message": "no"}}', b'{"detail": "no"}', b""]), None),
    ]
    return rng.choice(choices)()


def _mutated(name: str, max_tokens: int) -> tuple[bytes, Exception | None]:
    rng = random.Random(f"mutate {name}")
    lines: list[Any] = json.loads(json.dumps(truth(name, max_tokens)))
    if rng.random() < 0.7:
        rng.choice(MUTATIONS)(lines, rng)
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return _garble(text, rng) if rng.random() < 0.4 else (text, None)


async def lying(request: Request) -> AsyncIterator[bytes]:
    """The first answer to a request is mutated and cut anywhere; a continuation gets the rest of the truth."""
    name, num_before = request["request_id"], len(request["token_ids"]) - len(PROMPT)
    max_tokens = request["max_tokens"] + num_before
    rng = random.Random(f"cut {name}")
    if name in asked:
        rest = truth(name, max_tokens)[num_before:]
        text, end = b"".join(json.dumps({**each, "offset": None}).encode() + b"\n" for each in rest), None
    else:
        asked.add(name)
        text, end = _mutated(name, max_tokens)
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))})
    for begin, stop in itertools.pairwise(cuts):
        yield text[begin:stop]
    if end is not None:
        raise end


asked: set[str] = set()


def _client(servers: ScriptedServers, **settings: Any) -> InferenceClient:
    retry = RetryPolicy(max_retries=settings.pop("max_retries", 3), base_s=0.001, rng=random.Random(0))
    limits = {"request_timeout_s": 30.0, "wait_timeout_s": 20.0} | settings
    return InferenceClient(servers, token=None, retry=retry, vocab_size=VOCAB, **limits)


def _request(name: str = "r", max_tokens: int = 8, **more: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=PROMPT, max_tokens=max_tokens, temperature=1.0, **more)


@pytest.mark.parametrize(
    "pairs", [[], [(5, -0.1)], [(5, -0.1), (VOCAB, -2.0)], [(5, NAN), (6, -2.0)], [(5, 0.5), (6, -2.0)]]
)
def test_likeliest_tokens_that_cannot_be_are_refused(pairs: list[tuple[int, float]]) -> None:
    answer = Answer(server="s", request=_request(top_logprobs=2), vocab_size=VOCAB, oldest_version=0)
    rows = [
        np.array([(5, -0.1), (6, -INF)], TOP),
        np.array(pairs, TOP),
    ]  # the first is right: a filter removed all but one
    chunk = GenerateChunk(token_ids=[5, 5], logprobs=[-0.1] * 2, top_logprobs=[row.tobytes() for row in rows])
    with pytest.raises(BadResponseError, match="top_logprobs: "):
        answer.read(chunk.model_dump_json().encode(), newest_version=0)
    right = chunk.model_copy(update={"top_logprobs": [rows[0].tobytes()] * 2})
    assert answer.read(right.model_dump_json().encode(), newest_version=0) == right


def _servers(server: LocalServer) -> ScriptedServers:
    servers = ScriptedServers(server.url)
    servers.versions = VERSIONS
    return servers


def test_a_lie_is_refused_by_name_or_makes_no_difference() -> None:
    outcomes = {"right": 0, "continued": 0, "refused": 0}

    async def ask(client: InferenceClient, server: LocalServer, name: str) -> None:
        expected = truth(name, 8)
        try:
            generation = await client.generate(_request(name, stop_token_ids=[STOP_ID]))
        except BadResponseError as error:
            outcomes["refused"] += server.url.removeprefix("http://") in str(error)
            return
        given = [list(generation.token_ids), list(generation.logprobs), list(generation.policy_versions)]
        wanted = [[value for line in expected for value in line[key]] for key in ("token_ids", "logprobs")]
        assert given == [*wanted, [line["policy_version"] for line in expected]], name
        assert generation.finish_reason == expected[-1]["finish_reason"], name
        times = sum(body["request_id"] == name for body in server.requests)
        outcomes["right" if times == 1 else "continued"] += 1

    async def run(server: LocalServer) -> None:
        async with _client(_servers(server)) as client:
            for first in range(0, NUM_MUTATIONS, 50):
                await asyncio.gather(*(ask(client, server, f"r{n}") for n in range(first, first + 50)))
                server.requests.clear()

    asked.clear()
    with local_server(lying) as server:
        asyncio.run(run(server))
    assert sum(outcomes.values()) == NUM_MUTATIONS, "an error did not name the server"
    assert min(outcomes.values()) > NUM_MUTATIONS // 20, outcomes


def _generate(server: LocalServer, *, max_tokens: int = 4, **settings: Any) -> Generation:
    async def run() -> Generation:
        async with _client(_servers(server), **settings) as client:
            return await client.generate(_request(max_tokens=max_tokens, stop=["###"], stop_token_ids=[STOP_ID]))

    return asyncio.run(asyncio.wait_for(run(), 60.0))


def _line(*ids: Any, **fields: Any) -> bytes:
    line = {"token_ids": ids, "logprobs": [-0.5] * len(ids), "policy_version": 3}
    return json.dumps(line | fields).encode() + b"\n"


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ([_line(VOCAB, finish_reason="stop")], "token_ids"),
        ([_line(9, logprobs=[-1e300], finish_reason="stop")], "logprobs"),
        ([_line(9, policy_version=4), _line(9, finish_reason="stop")], "policy_version"),
        ([_line(9, finish_reason="stop", stop_reason="Q:")], "stop_reason"),
    ],
)
def test_an_answer_that_cannot_be_true_names_server_and_field(lines: list[bytes], field: str) -> None:
    with local_server(lambda _: _parts(*lines)) as server:
        with pytest.raises(BadResponseError, match=rf"{server.url.removeprefix('http://')}.* {field}\b"):
            _generate(server)
        assert len(server.requests) == 1


def test_rounding_above_a_probability_of_one_and_rows_of_a_padded_embedding_are_no_lies() -> None:
    answer = _line(VOCAB - 1, 8, logprobs=[1e-4, -103.0], finish_reason="stop", stop_reason="###")
    with local_server(lambda _: _parts(answer)) as server:
        assert list(_generate(server).token_ids) == [VOCAB - 1, 8]


def test_only_tokens_break_a_silence() -> None:
    async def trickle(_: Request) -> AsyncIterator[bytes]:
        yield _line(9)
        for sign_of_life in itertools.cycle([b"\n", b"{}\n", _line()]):
            yield sign_of_life
            await asyncio.sleep(0.02)

    with local_server(trickle) as server, pytest.raises(ServerUnavailableError, match=r"was silent for 0\.5 s"):
        _generate(server, request_timeout_s=0.5, max_retries=0)


def test_a_line_without_an_end_and_a_status_that_is_no_success_are_refused() -> None:
    async def endless(_: Request) -> AsyncIterator[bytes]:
        while True:
            yield b"0" * (1 << 20)

    async def redirected(_: Request) -> AsyncIterator[bytes]:
        raise Refusal(302, "moved")
        yield b""

    for script, said in ((endless, "line"), (redirected, "302")):
        with local_server(script) as server, pytest.raises(BadResponseError, match=said):
            _generate(server)
