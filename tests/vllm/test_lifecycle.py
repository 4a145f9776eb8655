"""What heartbeats see of a server; and servers of their own: two workers behind HTTPS, and what is left when one is killed."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from grpo_async.inference.api import GENERATE_PATH, PARAMETERS_PATH, SCORE_PATH, ServedParameters
from tests.support.tls import make_certificates
from tests.support.waiting import eventually
from tests.support.weight_push import WeightPusher
from tests.vllm.reference import Reference, assert_exact
from tests.vllm.server import VllmServer, experiment, join, request_body, running_server

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9, 10]


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
    assert vllm_server.generate(PROMPT, max_tokens=2).finish_reason == "length"


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
        server.generate(PROMPT, max_tokens=3)
        server.generate(PROMPT, max_tokens=3, top_p=0.9, top_k=4, min_p=0.01)
        server.generate(PROMPT, max_tokens=3, temperature=0.0)
        server.score(PROMPT)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda token: server.generate([token, *PROMPT], max_tokens=20), range(6)))
        assert compiled() == at_health


@pytest.mark.slow
@pytest.mark.nightly
def test_two_workers_serve_pushed_weights_and_a_killed_server_leaves_no_process(
    needs_vllm: None, tiny_model: Path, model_a: Reference, model_b: Reference, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path / "tls")
    config = experiment(str(tiny_model), tensor_parallel_size=2)
    config["inference"]["tls"] = {name: str(getattr(made, name)) for name in ("certificate", "key", "ca_certs")}
    with running_server(config, tmp_path) as server:
        assert server.url.startswith("https://")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url.replace('https', 'http')}/health")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{server.url}/health")  # only who trusts the authority may believe it
        assert server.info().num_workers == 2
        served = ServedParameters.model_validate_json(server.client.get(PARAMETERS_PATH).content)
        assert served.shapes == {name: list(tensor.shape) for name, tensor in model_a.parameters().items()}
        assert_exact(model_a, PROMPT, server.generate(PROMPT, max_tokens=24), 0)  # as loaded from disk
        with WeightPusher(server.url, server.token) as pusher:
            pusher.client = server.client  # which trusts its certificate
            pusher.connect()
            pusher.push(model_b.parameters(), 1)
            pusher.client = httpx.Client()  # leaving closes it, and the server's is still needed
        assert_exact(model_b, PROMPT, server.generate(PROMPT, max_tokens=24), 1)

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
        stream = server.chunks(PROMPT, max_tokens=900, flush_interval_s=0.0)
        first = next(stream)
        engine = server.engine_core()
        with ThreadPoolExecutor(2) as pool:
            server.client.post("/pause")
            held = pool.submit(server.client.post, GENERATE_PATH, json=request_body(PROMPT))
            scored = pool.submit(server.client.post, SCORE_PATH, json={"token_ids": PROMPT})
            assert eventually(lambda: server.info().active_requests == 3, 30.0)
            engine.send_signal(signal.SIGKILL)
            rest = join(stream)
            assert first.token_ids
            assert rest.finish_reason is None
            assert "engine" in (rest.error or "")
            for refused in (held, scored):  # they must not hold the server's end up
                assert refused.result(20).status_code == 503
                assert "dead" in refused.result().json()["error"]
        server.process.wait(20)  # the launcher sees its child end
        assert psutil.wait_procs([engine], timeout=10)[1] == []
