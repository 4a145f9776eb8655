"""GET /is_paused as the liveness probe: it is answered by the engine core, or not at all."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.vllm.server import VllmServer, experiment, running_server

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


def test_the_first_requests_are_over_before_anybody_is_let_in(vllm_server: VllmServer) -> None:
    log = vllm_server.log.read_text(errors="replace")
    assert 0 < log.find("warmed up in") < log.find("Application startup complete")


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
