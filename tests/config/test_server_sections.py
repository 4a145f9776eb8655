"""Rules of the sections `inference` and `weights`: each refusal says which setting, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_async.config import ExperimentConfig


def _config(**sections: Any) -> ExperimentConfig:
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "m"},
        "data": {"train": {"type": "jsonl", "path": "d.jsonl"}},
        "rewards": [{"function": "a:b"}],
    }
    return ExperimentConfig.model_validate(base | sections)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"inference": {"urls": ["http://[::1]:1"], "replicas": 2}}, "inference.replicas: 2 servers would be spawned"),
        ({"inference": {"urls": ["http://a:1", "http://a:1"]}}, "named more than once"),
        ({"inference": {"urls": ["http://a:1/v1"]}}, "http://host:port"),
        ({"inference": {"urls": ["ftp://a"]}}, "http://host:port"),
        (
            {"inference": {"urls": ["http://10.0.0.7:8000"]}, "weights": {"host": "127.0.0.1"}},
            "weights.host: 127.0.0.1 cannot be reached from http://10.0.0.7:8000",
        ),
        ({"inference": {"tls": {"key": "k.pem"}}}, "certificate and key go together"),
        ({"inference": {"tls": {"certificate": "c.pem"}}}, "certificate and key go together"),
        (
            {"inference": {"vllm": {"sleep_while_training": True}}, "rollout": {"max_staleness": 1}},
            "sleep_while_training: with rollout.max_staleness: 1",
        ),
        ({"inference": {"vllm": {"extra_args": ["--port", "1"]}}}, "--port is set by grpo-async"),
        (
            {"inference": {"vllm": {"extra_args": ["--api-key=x"]}}},
            "--api-key is set by grpo-async; the token of the run",
        ),
        ({"inference": {"vllm": {"extra_args": ["--trust-remote-code"]}}}, "see model.trust_remote_code"),
        ({"weights": {"mode": "pause"}}, "'recompute', 'keep_kv', 'drain' or 'abort'"),
        ({"weights": {"transport": "tcp"}}, "'auto', 'gloo', 'nccl' or 'ipc'"),
        ({"weights": {"verify_tolerance": 0.0}}, "greater than 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        _config(**sections)
    assert words in str(refusal.value)


def test_what_is_fine_is_taken() -> None:
    config = _config(
        weights={"host": "10.0.0.1"},
        inference={
            "urls": ["https://a:1", "http://b:2"],
            "tls": {"authority": "ca.pem"},
            "vllm": {"extra_args": ["--swap-space=4"]},
        },
        rollout={"max_staleness": 0},
    )
    assert config.inference.urls == ["https://a:1", "http://b:2"]
    assert _config(inference={"vllm": {"sleep_while_training": True}}, rollout={"max_staleness": 0})
    assert not config.model.trust_remote_code


def test_spawned_servers_speak_https_when_they_have_a_certificate_and_clients_trust_it_or_the_authority() -> None:
    own = {"certificate": "c.pem", "key": "k.pem"}
    inference = _config(inference={"tls": own}).inference
    assert inference.tls is not None
    assert (inference.scheme, inference.tls.trusted) == ("https", Path("c.pem"))
    inference = _config(inference={"tls": own | {"authority": "ca.pem"}}).inference
    assert inference.tls is not None
    assert inference.tls.trusted == Path("ca.pem")
    assert (
        _config(inference={"urls": ["https://127.0.0.1:1"], "tls": {"authority": "ca.pem"}}).inference.scheme == "http"
    )
    assert _config().inference.scheme == "http"
