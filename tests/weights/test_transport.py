"""Real gloo groups over the workers of several servers: what arrives, and who has failed when a group does not form or breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from grpo_async.config.sections import WeightsSection
from grpo_async.errors import RequestRejectedError, ServerUnavailableError, WeightPushError
from grpo_async.inference.api import WeightInitInfo
from grpo_async.weights.backends import NOT_FORMED
from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets
from grpo_async.weights.push import PushFailedError, WeightTransport, push_weights
from tests.weights.servers import DyingWorkers, Workers

LONG_S = 120.0  # a test that waits so long for a group has failed


class Parameters:
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

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        self.num_gathered = 0
        for bucket in cut_into_buckets(self.specs, bucket_bytes):
            self.num_gathered += 1
            yield [self.tensors[spec.name] for spec in bucket]


def make_transport(timeout_s: float = LONG_S) -> WeightTransport:
    cpu = torch.device("cpu")
    return WeightTransport("gloo", host="127.0.0.1", bucket_bytes=4096, timeout_s=timeout_s, device=cpu)


@pytest.fixture
def transport() -> Iterator[WeightTransport]:
    transport = make_transport()
    yield transport
    transport.close()


def push(transport: WeightTransport, servers: Any, parameters: Parameters, version: int = 1) -> dict[str, float]:
    settings = WeightsSection(timeout_s=transport._timeout_s)
    return push_weights(parameters, version=version, servers=servers, transport=transport, settings=settings)


def test_every_worker_of_every_server_gets_the_same_bytes_also_of_one_that_joins_later(
    transport: WeightTransport,
) -> None:
    servers: list[Any] = [Workers("a", num_workers=2)]
    parameters = Parameters()
    push(transport, servers, parameters)
    servers.append(Workers("b"))
    transport.close()
    push(transport, servers, parameters)
    assert transport.members == ("a", "b")
    for version in (2, 3):  # the group and its buffers are used again
        parameters.tensors["0.weight"] = torch.full((33, 17), float(version))
        metrics = push(transport, servers, parameters, version)
    assert metrics["sync/bytes"] == sum(tensor.nbytes for tensor in parameters.tensors.values())
    for served in [*servers[0].served, *servers[1].served]:
        assert list(served) == list(parameters.tensors)
        for name, tensor in parameters.tensors.items():
            assert served[name].dtype == tensor.dtype
            assert torch.equal(served[name], tensor), name
    assert [server.version for server in servers] == [3, 3]


@pytest.mark.parametrize(
    ("error", "num_others"),
    [
        (ServerUnavailableError("connection refused"), 2),
        (RequestRejectedError(400, "no"), 0),
        (ServerUnavailableError("the server answered 500: boom", answered=True), 2),
    ],
    ids=["unreachable", "400", "500"],
)
def test_a_server_that_does_not_join_ends_the_wait_of_all_at_once(
    transport: WeightTransport, error: Exception, num_others: int
) -> None:
    class Refuses(Workers):
        def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
            raise error

    others: list[Any] = [Workers(f"good {number}") for number in range(num_others)]
    started = time.monotonic()
    with pytest.raises(PushFailedError) as caught:
        transport.connect([*others, Refuses("bad")])
    assert time.monotonic() - started < LONG_S / 4
    assert (caught.value.phase, caught.value.failures) == ("connect", {"bad": error})
    assert set(caught.value.affected) == {other.name for other in others}
    assert all(NOT_FORMED in str(affected) for affected in caught.value.affected.values())
    assert transport.members == ()
    if others:
        transport.connect(others)  # they are well
        assert transport.members == ("good 0", "good 1")


def test_a_server_that_never_comes_has_failed_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async.weights.push.GRACE_S", 1.0)
    never = threading.Event()

    class Sleeps(Workers):
        def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
            assert timeout_s == 3.0  # 2 + grace
            never.wait(30.0)

    servers: list[Any] = [Workers("good"), Sleeps("bad")]
    with pytest.raises(PushFailedError, match=r"weights\.timeout_s") as caught:
        make_transport(2.0).connect(servers)
    never.set()
    assert (list(caught.value.failures), list(caught.value.affected)) == (["bad"], ["good"])


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == "LISTEN"}


def test_a_group_listens_on_the_trainers_address_only(transport: WeightTransport) -> None:
    before = _listening()
    seen: list[set[tuple[str, int]]] = []

    class Looks(Workers):
        def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
            seen.append(_listening() - before)
            super().init_weight_transfer(info, timeout_s=timeout_s)

    transport.connect([Looks("a")])  # type: ignore[list-item]
    assert {address for address, _ in seen[0]} == {"127.0.0.1"}  # the store
    assert {address for address, _ in _listening() - before} == {"127.0.0.1"}  # gloo's own, for the pairs


def test_an_address_where_nothing_can_listen_is_the_trainers_own_failure() -> None:
    elsewhere = WeightTransport("gloo", host="192.0.2.1", bucket_bytes=1, timeout_s=1.0, device=torch.device("cpu"))
    with pytest.raises(PushFailedError, match=r"192\.0\.2\.1 failed") as caught:
        elsewhere.connect([Workers("a")])  # type: ignore[list-item]
    assert (caught.value.phase, caught.value.failures, list(caught.value.affected)) == ("connect", {}, ["trainer"])


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_a_transport_between_gpus_is_refused_on_a_cpu(kind: Any) -> None:
    with pytest.raises(WeightPushError, match=f"{kind} needs a GPU.*set gloo"):
        WeightTransport(kind, host="127.0.0.1", bucket_bytes=1, timeout_s=1.0, device=torch.device("cpu"))


def test_a_tensor_alone_in_its_bucket_is_sent_from_its_own_memory_and_others_are_packed(
    transport: WeightTransport,
) -> None:
    servers: list[Any] = [Workers("a")]
    transport.connect(servers)
    alone = torch.ones(5)
    assert transport.pack([alone]).data_ptr() == alone.data_ptr()
    assert transport.pack([alone]).dtype == torch.uint8
    first, second = (transport.pack([alone, alone]) for _ in range(2))
    assert len({alone.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3  # one may still be on its way


def test_a_server_that_dies_in_the_broadcast_has_failed_and_the_others_take_the_next_push(
    transport: WeightTransport,
) -> None:
    """It is rank 1: gloo lets it pass buckets on to the others. With real processes: tests/e2e/test_failover.py."""
    servers: list[Any] = [DyingWorkers("a"), Workers("b"), Workers("c")]
    parameters = Parameters(num_layers=40)
    transport.connect(servers)
    started = time.monotonic()
    with pytest.raises(PushFailedError) as caught:
        push(transport, servers, parameters)
    assert time.monotonic() - started < LONG_S / 2
    assert (caught.value.phase, list(caught.value.failures)) == ("transfer", ["a"])
    assert set(caught.value.affected) == {"b", "c"}
    assert transport.members == ()
    # the other ranks wait in the collective
    assert parameters.num_gathered == len(list(cut_into_buckets(parameters.specs, transport.bucket_bytes)))
    assert all(server.calls == ["pause"] for server in servers), "nobody generates with parts of two versions"
    push(transport, servers[1:], parameters, 2)
    for server in servers[1:]:
        assert server.calls[-1] == "resume"
        (served,) = server.served
        assert all(torch.equal(served[name], tensor) for name, tensor in parameters.tensors.items())
