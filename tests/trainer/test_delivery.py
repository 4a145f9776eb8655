"""That servers compute with what is pushed: what a real embedded server does not load, or goes on without. On vLLM: tests/vllm."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.config.sections import LoraSection, ModelSection
from grpo_async.errors import RunError
from grpo_async.inference.fleet import Fleet
from grpo_async.trainer.publish import Publisher
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.load import load_policy
from grpo_async.training.parameters import choose_parameters
from grpo_async.training.pipeline import Activity
from grpo_async.training.ranks import TrainerContext
from grpo_async.training.verify import probe_sequences
from grpo_async.weights.push import WeightTransport
from tests.launch.support import make_config
from tests.servers.embedded_support import live, load
from tests.support.tiny_model import build_tiny_model
from tests.trainer.fakes import FakeChannel

LIMIT_S = 30.0
CPU = torch.device("cpu")
STALE = "model.layers.1.self_attn.o_proj.weight"


@contextmanager
def _run(folder: Path, lora: LoraSection | None = None) -> Iterator[tuple[Any, Publisher, Any]]:
    """A server of a model, and a trainer with it: the server, what pushes to it, and the policy."""
    path = build_tiny_model(folder / "served", tie_word_embeddings=False)
    section = ModelSection(path=str(path), lora=lora)
    config = make_config(
        folder, inference={"max_model_len": 512}, rollout={"max_completion_tokens": 64}, weights={"timeout_s": LIMIT_S}
    )
    config = config.model_copy(update={"model": section}).for_devices(trains_on_gpu=False, serves_on_gpu=False)
    policy = load_policy(section, temperature=1.0, chunk_tokens=16, max_model_len=512)
    parameters = choose_parameters(policy.model, section, served_dtype=torch.float32, device=CPU)
    nothing: Any = None
    context = TrainerContext(
        config=config, run_dir=nothing, policy=policy, optimizer=nothing, objective=nothing, reference=None,
        parameters=parameters, channel=FakeChannel(), checkpoints=nothing, tokenizer=None, device=CPU, world_size=1,
    )  # fmt: skip
    transport = WeightTransport("gloo", host="127.0.0.1", bucket_bytes=50_000, timeout_s=LIMIT_S, device=CPU)
    with live(load(path), model_path=str(path)) as server:
        fleet = Fleet([server.url], config.inference, token=None, control_timeout_s=LIMIT_S)
        fleet.start()
        try:
            fleet.wait_until_up(stop=threading.Event(), deadline_s=LIMIT_S)
            control: Any = SimpleNamespace(send=lambda *_, **__: None)
            probes = probe_sequences([], vocab_size=200, max_model_len=512)
            sync = FleetSync(config, fleet, transport, parameters, probes=probes, control=control)
            source: Any = SimpleNamespace(advance=lambda version: None)
            yield (
                server,
                Publisher(context=context, sync=sync, fleet=fleet, source=source, activity=Activity(), version=0),
                policy,
            )
        finally:
            transport.close()
            fleet.close()


def _without(server: Any, name: str) -> Callable[..., Any]:
    """A way to load weights that goes on with the old ones of `name`."""
    load_weights = server.engine.load_weights
    return lambda weights: load_weights((each, tensor) for each, tensor in weights if each != name)


@pytest.mark.parametrize("push", ["merged", "adapter", None])
def test_a_server_that_computes_with_something_else_than_was_pushed_is_found_before_the_first_rollout(
    tmp_path: Path, push: Any
) -> None:
    """It says that all is loaded, as one does that computes with a packed copy of the old weights; and the version is right."""
    with _run(tmp_path, push and LoraSection(rank=4, push=push)) as (server, publisher, policy):
        before = [parameter.clone() for parameter in policy.parameters()]
        publisher.prove_delivery()
        after = list(policy.parameters())
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        publisher.push()
        right = server.score(list(range(40)))
        stale = _without(server, STALE)
        server.engine.load_weights = lambda weights: [name for name in stale(weights) if name != STALE]
        with pytest.raises(RunError, match=r"does not serve the trainer's weights .*\(as a test: all are negated"):
            publisher.prove_delivery()
        assert all(torch.equal(one, other) for one, other in zip(before, policy.parameters(), strict=True))
        publisher.push()  # the very weights that the stale one has: no comparison could tell
        assert server.score(list(range(40))) == right


@pytest.mark.parametrize(
    ("fault", "words"),
    [("one tensor", f"the engine did not load {STALE}"), ("all", "the engine did not load all that was sent")],
)
def test_a_server_that_loads_only_a_part_or_nothing_is_fenced_at_that_push(
    tmp_path: Path, fault: str, words: str
) -> None:
    with _run(tmp_path) as (server, publisher, _):
        publisher.push()
        before = server.info().policy_version
        server.engine.load_weights = _without(server, STALE) if fault == "one tensor" else lambda weights: []
        publisher.version = 1
        assert publisher.push() == {"sync/skipped": 1.0}
        (failure,) = publisher.fleet.failures
        assert words in failure.reason
        assert server.info().policy_version == before
        assert server.post("/resume").status_code == 409, "it would generate with parts of two versions"
