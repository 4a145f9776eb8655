"""What a server says of itself, and scores of given tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.sections import ModelSection
from grpo_async.inference.api import PARAMETERS_PATH, ServedParameters
from grpo_async.training.load import load_policy
from grpo_async.training.reference import score_twice
from grpo_async.weights.verify import compare_logprobs, probe_sequences, verify_limit
from tests.support.tiny_model import build_tiny_model
from tests.vllm.reference import TOLERANCE, Reference, largest_difference
from tests.vllm.server import MAX_MODEL_LEN, VllmServer, experiment, running_server

pytestmark = pytest.mark.vllm

LONG_PROMPT = [20 + position % 200 for position in range(300)]


def test_the_parameters_are_those_of_the_checkpoint(vllm_server: VllmServer, model_a: Reference) -> None:
    served = ServedParameters.model_validate_json(vllm_server.client.get(PARAMETERS_PATH).content)
    assert served.shapes == {name: list(tensor.shape) for name, tensor in model_a.parameters().items()}
    assert served.optional == ["lm_head.weight"]  # tied to the embedding, so it is not in the checkpoint
    assert vllm_server.info().vocab_size == served.shapes["model.embed_tokens.weight"][0]


@pytest.mark.parametrize("num_tokens", [2, 3, 129, 400, MAX_MODEL_LEN])
def test_a_score_is_that_of_the_served_weights_at_temperature_one(
    vllm_server: VllmServer, model_a: Reference, version: int, num_tokens: int
) -> None:
    tokens = [20 + position % 200 for position in range(num_tokens)]
    expected = model_a.logprobs(tokens[:1], tokens[1:], temperature=1.0)
    for _ in range(2):
        answer = vllm_server.score(tokens)
        assert answer.policy_version == version
        assert largest_difference(answer.logprobs, expected) < TOLERANCE


def test_scores_and_completions_do_not_touch_each_others_cache(
    vllm_server: VllmServer, model_a: Reference, version: int
) -> None:
    prompt = [21 + position % 190 for position in range(400)]
    expected = model_a.logprobs(prompt[:1], prompt[1:], temperature=1.0)
    hits = _prefix_cache_hits(vllm_server)
    vllm_server.score(prompt)
    vllm_server.generate(prompt, max_tokens=2)
    assert _prefix_cache_hits(vllm_server) == hits  # the completion did not start from what the score left
    vllm_server.generate(prompt, max_tokens=2)
    assert _prefix_cache_hits(vllm_server) > hits  # the counter counts
    hits = _prefix_cache_hits(vllm_server)
    assert largest_difference(vllm_server.score(prompt).logprobs, expected) < TOLERANCE
    vllm_server.generate([5], max_tokens=2)  # the counter is as of the newest step
    assert _prefix_cache_hits(vllm_server) == hits


def _prefix_cache_hits(server: VllmServer) -> float:
    """Tokens that vLLM took from its prefix cache since it started."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))


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
