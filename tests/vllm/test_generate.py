"""POST /rollout/generate on the real vLLM: tokens, logprobs, ends; and what the server says of its load."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.inference.api import ServerInfo
from tests.servers.test_sampling_settings import check_reshaped, check_stop_strings
from tests.support.waiting import eventually
from tests.vllm.reference import TOLERANCE, Reference, largest_difference
from tests.vllm.server import MAX_MODEL_LEN, MAX_NUM_SEQS, VllmServer

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_generate_streams_tokens_with_the_logprobs_of_the_sampled_distribution(
    vllm_server: VllmServer, model_a: Reference, version: int, temperature: float
) -> None:
    completion = vllm_server.generate(PROMPT, max_tokens=64, temperature=temperature)
    assert (completion.finish_reason, completion.error, len(completion.token_ids)) == ("length", None, 64)
    assert set(completion.versions) == {version}
    expected = model_a.logprobs(PROMPT, completion.token_ids, temperature=temperature or 1.0)  # greedy: unscaled
    assert largest_difference(completion.logprobs, expected) < TOLERANCE
    if temperature == 0.0:
        logits = model_a.module(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        assert completion.token_ids == logits.argmax(-1).tolist()


def test_a_stop_string_ends_generation_as_in_the_embedded_engine(
    vllm_server: VllmServer, version: int, tiny_model: Path
) -> None:
    check_stop_strings(vllm_server, tiny_model)
    assert eventually(lambda: _running(vllm_server) == 0, 20.0), "vLLM goes on with what was stopped"


def test_filters_and_penalties_leave_what_they_leave_in_the_embedded_engine(
    vllm_server: VllmServer, version: int, model_a: Reference
) -> None:
    check_reshaped(vllm_server, model_a.module)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choice": ["hello world", "the answer"]}, "hello world|the answer"),
        ({"regex": "[a-c]{4,6}!"}, "[a-c]{4,6}!"),
        ({"json": {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"],
                   "additionalProperties": False}}, r'\{\s*"a"\s*:\s*"(x|yy)"\s*\}'),
        ({"grammar": 'root ::= "one" | "two " root'}, "(two )*one"),
    ],
)  # fmt: skip
def test_structured_outputs_have_their_form_and_logprobs_of_what_it_leaves(
    vllm_server: VllmServer, version: int, model_a: Reference, form: dict[str, Any], pattern: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_a.folder)
    output = vllm_server.generate(PROMPT, max_tokens=200, structured_outputs=form, ignore_eos=False)
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == tokenizer.eos_token_id
    assert re.fullmatch(pattern, tokenizer.decode(output.token_ids[:-1]))
    free = model_a.logprobs(PROMPT, output.token_ids, temperature=1.0)
    above = [mine - full for mine, full in zip(output.logprobs, free, strict=True)]
    assert min(above) > -TOLERANCE  # what is left is divided by its probability
    assert max(above) > 0.5
    with pytest.raises(AssertionError, match="answered 400"):
        vllm_server.generate(PROMPT, max_tokens=4, structured_outputs={"regex": "("})


def test_a_client_that_disconnects_aborts_its_request(vllm_server: VllmServer, version: int) -> None:
    before = vllm_server.info().generated_tokens
    stream = vllm_server.chunks(PROMPT, max_tokens=1000, flush_interval_s=0.0)
    next(stream)
    assert _running(vllm_server) == 1
    stream.close()
    assert eventually(lambda: vllm_server.info().active_requests == 0 and _running(vllm_server) == 0, 20.0)
    info = vllm_server.info()  # vLLM makes no further step, so its own statistics would stay at 1
    assert (info.running_requests, info.waiting_requests, info.kv_usage) == (0, 0, 0.0)
    assert info.generated_tokens - before < 1000, "the engine went on to the end"


def test_info_counts_tokens_and_busy_time(vllm_server: VllmServer, version: int) -> None:
    before, began = vllm_server.info(), time.monotonic()
    vllm_server.generate(PROMPT, max_tokens=40)
    vllm_server.generate(PROMPT, max_tokens=2)
    after, wall_s = vllm_server.info(), time.monotonic() - began
    assert after.generated_tokens - before.generated_tokens == 42
    assert 0.0 < after.busy_s - before.busy_s < wall_s
    assert vllm_server.info().busy_s == after.busy_s  # idle time does not count
    assert after.engine == "vllm"
    assert after.num_workers == 1
    assert after.max_model_len == MAX_MODEL_LEN


def test_a_busy_server_says_what_runs_what_waits_and_how_full_its_cache_is(vllm_server: VllmServer) -> None:
    prompts = [[*PROMPT, 30 + number] for number in range(MAX_NUM_SEQS + 3)]
    seen: list[ServerInfo] = []
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(vllm_server.generate, prompt, max_tokens=400) for prompt in prompts]
        while not all(future.done() for future in running):
            seen.append(vllm_server.info())
            time.sleep(0.02)
        assert all(future.result().finish_reason == "length" for future in running)
    assert {info.max_running_requests for info in seen} == {MAX_NUM_SEQS}
    full = [info for info in seen if info.running_requests == MAX_NUM_SEQS]
    assert max(info.waiting_requests for info in full) == 3
    usages = [info.kv_usage for info in full if info.kv_usage is not None]
    assert 0.0 < min(usages) <= max(usages) <= 1.0
    assert max(usages) > usages[0], "the cache fills while the requests grow"


def _running(server: VllmServer) -> int:
    """Requests inside vLLM's own scheduler, by its own metrics (refreshed with every engine step)."""
    lines = server.client.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))
