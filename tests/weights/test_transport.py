"""Real gloo groups over the workers of several servers: what arrives, and who has failed when a group does not form or breaks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.errors import RequestRejectedError, ServerUnavailableError, WeightPushError
from grpo_async.inference.surface import WeightInitInfo
from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets
from grpo_async.weights.participants import NOT_FORMED, PushFailedError
from grpo_async.weights.push import PushSettings, push_weights
from grpo_async.weights.rendezvous import problem_with_devices
from grpo_async.weights.transport import WeightTransport
from tests.weights.servers import ServerProcess, Workers

BUCKET_BYTES = 4096
LONG_S = 120.0  # a test that waits so long for a group has failed


class _Parameters:
    """Random tensors of several dtypes and odd sizes, so that some start unaligned in their bucket."""

    def __init__(self, *, num_layers: int = 6) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tensors: dict[str, torch.Tensor] = {}
        for layer in range(num_layers):
            self.tensors[f"{layer}.weight"] = torch.randn(33, 17, generator=generator)
            self.tensors[f"{layer}.half"] = torch.randn(3, generator=generator).bfloat16()
            self.tensors[f"{layer}.count"] = torch.tensor(layer)
            self.tensors[f"{layer}.flag"] = torch.tensor([True, False, True])
        self.specs = [
            ParameterSpec(name=name, dtype_name=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]
        self.before_bucket: dict[int, Any] = {}

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        for number, bucket in enumerate(cut_into_buckets(self.specs, bucket_bytes)):
            self.before_bucket.get(number, lambda: None)()
            yield [self.tensors[spec.name] for spec in bucket]


@pytest.fixture
def transport() -> Iterator[WeightTransport]:
    transport = _transport()
    yield transport
    transport.close()


def _transport(timeout_s: float = LONG_S, private: Path | None = None) -> WeightTransport:
    return WeightTransport(
        "gloo",
        host="127.0.0.1",
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
        device=torch.device("cpu"),
        private=private,
    )


def _members(transport: WeightTransport) -> list[str]:
    return list(transport.members)


def _push(transport: WeightTransport, targets: Any, parameters: _Parameters, version: int = 1) -> Any:
    settings = PushSettings(mode="recompute", timeout_s=transport._timeout_s, drain_timeout_s=LONG_S)
    return push_weights(parameters, version=version, targets=targets, transport=transport, settings=settings)


def test_every_worker_of_every_server_gets_the_same_bytes(transport: WeightTransport) -> None:
    servers = [Workers("a", num_workers=2), Workers("b")]
    assert _members(transport) == []
    transport.connect(servers)
    assert _members(transport) == ["a", "b"]
    parameters = _Parameters()
    for version in (1, 2):  # the group and its buffers are used again
        parameters.tensors["0.weight"] = torch.full((33, 17), float(version))
        report = _push(transport, servers, parameters, version)
    assert report.num_bytes == sum(tensor.nbytes for tensor in parameters.tensors.values())
    for served in [*servers[0].served, *servers[1].served]:
        assert list(served) == list(parameters.tensors)
        for name, tensor in parameters.tensors.items():
            assert served[name].dtype == tensor.dtype
            assert torch.equal(served[name], tensor), name
    assert [server.version for server in servers] == [2, 2]


def test_a_server_may_join_later_in_a_new_group(transport: WeightTransport) -> None:
    first, late = Workers("a"), Workers("b")
    transport.connect([first])
    _push(transport, [first], _Parameters())
    transport.connect([first, late])
    _push(transport, [first, late], _Parameters(), 2)
    assert (first.version, late.version) == (2, 2)


@pytest.mark.parametrize("num_others", [0, 2])
@pytest.mark.parametrize(
    "error",
    [ServerUnavailableError("connection refused"), RequestRejectedError(400, "no"),
     ServerUnavailableError("the server answered 500: boom", answered=True)],
    ids=["unreachable", "400", "500"],
)  # fmt: skip
def test_a_server_that_does_not_join_ends_the_wait_of_all_at_once(
    transport: WeightTransport, error: Exception, num_others: int
) -> None:
    class Refuses(Workers):
        def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
            raise error

    others = [Workers(f"good {number}") for number in range(num_others)]
    began = time.monotonic()
    with pytest.raises(PushFailedError) as caught:
        transport.connect([*others, Refuses("bad")])
    assert time.monotonic() - began < LONG_S / 4
    assert (caught.value.phase, caught.value.failures) == ("connect", {"bad": error})
    assert set(caught.value.affected) == {other.name for other in others}
    assert all(NOT_FORMED in str(affected) for affected in caught.value.affected.values())
    assert _members(transport) == []
    if others:
        transport.connect(others)  # they are well
        assert _members(transport) == ["good 0", "good 1"]


def test_a_server_that_never_comes_has_failed_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async.weights.transport.GRACE_S", 1.0)
    never = threading.Event()

    class Sleeps(Workers):
        def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
            assert timeout_s == 3.0  # 2 + grace
            never.wait(30.0)

    transport = _transport(2.0)
    with pytest.raises(PushFailedError, match=r"weights\.timeout_s") as caught:
        transport.connect([Workers("good"), Sleeps("bad")])
    never.set()
    assert (list(caught.value.failures), list(caught.value.affected)) == (["bad"], ["good"])


def test_a_group_of_gpus_that_cannot_form_says_what_to_set() -> None:
    assert problem_with_devices("gloo", ["GPU-1", "GPU-1", "cpu"]) is None
    assert problem_with_devices("nccl", ["GPU-1", "GPU-2", "GPU-3"]) is None
    assert problem_with_devices("ipc", ["GPU-1", "GPU-1"]) is None
    shared = problem_with_devices("nccl", ["GPU-1", "GPU-2", "GPU-1"])
    assert shared == (
        "weights.transport: nccl needs a GPU for each member, the trainer and rank 2 are both on GPU-1; set ipc"
    )
    apart = problem_with_devices("ipc", ["GPU-1", "GPU-1", "GPU-2"])
    assert apart is not None
    assert apart.endswith("set nccl")
    on_cpu = problem_with_devices("nccl", ["GPU-1", "cpu"])
    assert on_cpu is not None
    assert on_cpu.endswith("rank 1 is on the CPU; set gloo")


def test_members_on_the_wrong_devices_are_told_at_once(
    transport: WeightTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_async.weights.transport.problem_with_devices", lambda *_: "nccl needs two GPUs; set ipc")
    server = Workers("a")
    with pytest.raises(WeightPushError, match="two GPUs; set ipc") as caught:
        transport.connect([server])
    assert not isinstance(caught.value, PushFailedError)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_a_transport_between_gpus_is_refused_on_a_cpu(kind: Any) -> None:
    with pytest.raises(WeightPushError, match=f"{kind} needs a GPU.*set gloo"):
        WeightTransport(kind, host="127.0.0.1", bucket_bytes=1, timeout_s=1.0, device=torch.device("cpu"))


def test_a_tensor_alone_in_its_bucket_is_sent_from_its_own_memory_and_others_are_packed(
    transport: WeightTransport,
) -> None:
    transport.connect([Workers("a")])
    alone = torch.ones(5)
    assert transport.pack([alone]).data_ptr() == alone.data_ptr()
    assert transport.pack([alone]).dtype == torch.uint8
    first, second = (transport.pack([alone, alone]) for _ in range(2))
    assert len({alone.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3  # one may still be on its way


def _processes(*names: str) -> list[ServerProcess]:
    servers = [ServerProcess(name) for name in names]
    for server in servers:
        server.wait_until_up()
    return servers


@pytest.mark.slow
def test_a_server_killed_in_the_broadcast_has_failed_and_the_others_take_the_next_push() -> None:
    (dying,) = _processes("a")
    servers: list[Any] = [dying, Workers("b"), Workers("c")]
    transport, parameters = _transport(), _Parameters(num_layers=40)
    try:
        transport.connect(servers)
        parameters.before_bucket[3] = dying.end  # rank 1: gloo lets it pass buckets on to the others
        began = time.monotonic()
        with pytest.raises(PushFailedError) as caught:
            _push(transport, servers, parameters)
        assert time.monotonic() - began < LONG_S / 2
        assert (caught.value.phase, list(caught.value.failures)) == ("update", ["a"])
        assert set(caught.value.affected) == {"b", "c"}
        assert transport.members == ()
        parameters.before_bucket.clear()
        transport.connect(servers[1:])
        _push(transport, servers[1:], parameters, 2)
        for server in servers[1:]:
            assert server.calls[-1] == "resume"
            (served,) = server.served
            assert {name: float(tensor.sum()) for name, tensor in served.items()} == {
                name: float(tensor.sum()) for name, tensor in parameters.tensors.items()
            }
    finally:
        transport.close()
        dying.end()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_that_hangs_in_the_broadcast_has_failed_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("push", "sender", "transport"):
        monkeypatch.setattr(f"grpo_async.weights.{module}.GRACE_S", 3.0)
    servers = _processes("a", "b")
    transport, parameters = _transport(4.0), _Parameters(num_layers=400)
    try:
        transport.connect(servers)
        pid = servers[1].process.pid
        assert pid is not None
        parameters.before_bucket[3] = lambda: os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PushFailedError) as caught:
            _push(transport, servers, parameters)
        assert (caught.value.phase, list(caught.value.failures)) == ("update", ["b"])
        assert servers[0].calls()[-1] == "resume"
        parameters.before_bucket.clear()
        transport.connect(servers[:1])
        _push(transport, servers[:1], parameters, 2)
    finally:
        transport.close()
        for server in servers:
            server.end()
