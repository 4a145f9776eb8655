"""What only the real vLLM has: its own routes, teachers; and how its processes hang and end."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import DistillationSection, ModelSection
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.router import FixedServers
from grpo_async.records import RolloutGroup
from grpo_async.scoring.teachers import Teachers
from grpo_async.training.load import load_policy
from grpo_async.training.verify import compare_logprobs, probe_sequences, score_twice, verify_limit
from tests.servers.contract import LONG_PROMPT, NUM_SLOTS, PROMPT, scores_of, weights_of
from tests.servers.embedded_support import assert_exact, make_request, teacher_forced
from tests.support.records import make_completion, make_prompt
from tests.support.tiny_model import build_tiny_model
from tests.support.weight_push import WeightPusher
from tests.vllm.server import VllmServer, experiment, running_server

pytestmark = pytest.mark.vllm


@pytest.mark.nightly
def test_a_seed_does_not_end_a_server_that_prefills_a_prompt_in_chunks(
    needs_vllm: None, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ["--max-num-batched-tokens", "128", "--max-num-seqs", str(NUM_SLOTS)]
    with running_server(experiment(str(tiny_model), extra_args=arguments), tmp_path) as server:
        body = {"model": server.info().model, "prompt": LONG_PROMPT, "max_tokens": 4, "temperature": 1.0, "seed": 3}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        not_cached = LONG_PROMPT[::-1]  # what is in the cache of prefixes needs no second chunk
        server.generate(make_request(not_cached, max_tokens=4, seed=3))
        server.generate(make_request(LONG_PROMPT, max_tokens=4))  # it lives


def test_vllms_own_routes_wait_too_and_never_see_the_cache_of_older_weights(
    vllm_server: VllmServer, model_a: Any, model_b: Any, version: int, pusher: WeightPusher
) -> None:
    model = vllm_server.info().model
    body = {"model": model, "prompt": LONG_PROMPT, "max_tokens": 4, "temperature": 0.0, "logprobs": 0}
    body["return_token_ids"] = True

    def complete() -> tuple[list[int], list[float]]:
        (choice,) = vllm_server.client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def assert_of(model: Any, tokens: list[int], logprobs: list[float]) -> None:
        expected = teacher_forced(model, LONG_PROMPT, tokens).tolist()
        assert logprobs == pytest.approx(expected, abs=vllm_server.tolerance)

    assert_of(model_a, *complete())  # fills the cache
    pusher.post("/pause", keep_cache="true")
    held = vllm_server.pool.submit(complete)
    pusher.start(weights_of(model_b))
    pusher.update(weights_of(model_b))
    pusher.post("/finish_weight_update", {"weight_version": str(version + 1)})
    assert not held.done()
    pusher.post("/resume")
    for answer in (held.result(30), complete()):
        assert_of(model_b, *answer)


def test_a_served_teacher_and_the_policy_itself_say_what_the_model_computes(
    vllm_server: VllmServer, model_a: Any, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `/v1/completions` of any vLLM, and by the client of a run on its own servers."""
    monkeypatch.setenv("TEACHER_TOKEN", vllm_server.token or "")
    teachers = {
        "served": {"url": f"{vllm_server.url}/v1", "token_env": "TEACHER_TOKEN"},
        "policy": {"prompt_column": "hint"},
    }
    completion = replace(make_completion("r0", ids=LONG_PROMPT[5:9]), prompt_ids=LONG_PROMPT[:5])
    group = RolloutGroup(prompt=make_prompt(hint="", who="served"), completions=[completion])

    async def score(name: str) -> list[float]:
        servers = FixedServers([vllm_server.url])
        client = InferenceClient(servers, token=vllm_server.token, request_timeout_s=60.0, wait_timeout_s=60.0)
        async with client:
            section = DistillationSection(teachers={name: teachers[name]})
            asked = Teachers(section, own=client.score, teacher_prompt_ids=lambda *_: PROMPT)
            return (await asked.score(group, [completion]))["r0"][0].tolist()

    for name, prompt in (("served", LONG_PROMPT[:5]), ("policy", PROMPT)):
        expected = scores_of(model_a, [*prompt, *LONG_PROMPT[5:9]])[-4:]
        assert asyncio.run(score(name)) == pytest.approx(expected, abs=vllm_server.tolerance), name


def test_a_hung_engine_does_not_answer_although_health_does(vllm_server: VllmServer) -> None:
    engine = vllm_server.engine_core()
    engine.send_signal(signal.SIGSTOP)
    try:
        assert vllm_server.client.get("/health", timeout=5.0).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            vllm_server.client.get("/is_paused", timeout=1.0)
    finally:
        engine.send_signal(signal.SIGCONT)
    assert vllm_server.client.get("/is_paused", timeout=30.0).json() == {"is_paused": False}
    assert vllm_server.generate(make_request(PROMPT, max_tokens=2)).finish_reason == "length"


@pytest.mark.slow
@pytest.mark.nightly
def test_nothing_is_compiled_while_heartbeats_ask(
    needs_vllm: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine where vLLM has never run: its caches are empty."""
    caches = tmp_path / "caches"
    for variable in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, str(caches / variable))

    def compiled() -> set[str]:
        return {str(path.relative_to(caches)) for path in caches.rglob("*.so")}

    with running_server(experiment(str(tiny_model)), tmp_path) as server:
        at_health = compiled()
        assert at_health, "the variables do not move the caches"
        for settings in ({}, {"top_p": 0.9, "top_k": 4, "min_p": 0.01}, {"temperature": 0.0}):
            server.generate(make_request(PROMPT, max_tokens=3, **settings))
        server.score(PROMPT)
        list(server.pool.map(server.generate, [make_request([token, *PROMPT], max_tokens=20) for token in range(6)]))
        assert compiled() == at_health


@pytest.mark.slow
@pytest.mark.nightly
def test_two_workers_serve_pushed_weights_and_a_killed_server_leaves_no_process(
    needs_vllm: None, tiny_model: Path, model_a: Any, model_b: Any, tmp_path: Path
) -> None:
    config = experiment(str(tiny_model), tensor_parallel_size=2)
    with running_server(config, tmp_path) as server:
        assert server.info().num_workers == 2
        request = make_request(PROMPT, max_tokens=24)
        assert_exact(model_a, request, server.generate(request), 0, server.tolerance)  # as loaded from disk
        with WeightPusher(server.url, server.token) as pusher:
            pusher.connect()
            pusher.push(weights_of(model_b), 1)
        assert_exact(model_b, request, server.generate(request), 1, server.tolerance)

        processes = server.processes()
        assert len(processes) >= 4  # API server, engine core, two workers
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert [process.cmdline() for process in alive] == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_dead_engine_ends_streams_with_an_error_and_then_the_server(
    needs_vllm: None, tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(experiment(str(tiny_model)), tmp_path) as server:
        stream = server.stream(make_request(PROMPT, max_tokens=900, flush_interval_s=0.0))
        assert next(stream).token_ids
        engine = server.engine_core()
        server.post("/pause")
        held = server.pool.submit(server.post, "/rollout/generate", make_request(PROMPT).model_dump())
        scored = server.pool.submit(server.post, "/rollout/score", {"token_ids": PROMPT})
        server.wait_until(lambda info: info.active_requests == 3)
        engine.send_signal(signal.SIGKILL)
        last = list(stream)[-1]
        assert last.finish_reason is None
        assert "engine" in (last.error or "")
        for refused in (held, scored):  # they must not hold the server's end up
            assert refused.result(20).status_code == 503
            assert "dead" in refused.result().json()["error"]
        server.process.wait(20)  # the launcher sees its child end
        assert psutil.wait_procs([engine], timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "head"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", None)])
def test_a_healthy_model_of_200_million_parameters_is_within_the_limit_and_a_wrong_one_is_not(
    needs_vllm: None, tmp_path: Path, dtype: str, head: str | None
) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "initializer_range": 0.04}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    path = build_tiny_model(tmp_path / "large", **shape, **heads)
    section = ModelSection.model_validate({"path": str(path), "dtype": dtype, "head_dtype": head})
    policy = load_policy(section, temperature=1.0, chunk_tokens=64, max_model_len=512)
    assert sum(parameter.numel() for parameter in policy.parameters()) > 200e6
    config = experiment(str(path))
    config["model"] |= {"compute_dtype": dtype, "head_dtype": head}
    config["inference"]["dtype"] = dtype
    probes = probe_sequences([], vocab_size=300, max_model_len=512)
    with running_server(config, tmp_path) as server:
        assert server.info().head_dtype == (head or dtype)
        served = [server.score(probe).logprobs for probe in probes]
    how = {"device": torch.device("cpu"), "compute": getattr(torch, dtype), "rounding": getattr(torch, dtype)}
    right = score_twice(policy, probes, **how)
    with torch.no_grad():
        rows = policy.model.get_parameter("model.layers.8.mlp.down_proj.weight")
        rows.copy_(rows.flip(0))
    wrong = score_twice(policy, probes, **how)
    found = {}
    for name, trainer in (("right", right), ("wrong", wrong)):
        difference = compare_logprobs(trainer.logprobs, served)
        limit = verify_limit(ExperimentConfig.model_validate(config), trainer)
        found[name] = difference.mean / limit
        print(f"{dtype}, head {head or dtype}, {name}: mean {difference.mean:.2g}, limit {limit:.2g}")
    assert found["right"] < 1.0 < found["wrong"]
