"""A trainer's end of a weight push, against any server that serves `inference.api`.

`push_state_dict` does one whole push: pause, start, update (the server receives and loads), finish (it serves), resume.
`WeightPusher` keeps the group and gives each phase a method, so that a test may break one.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx
import torch

from grpo_async.inference.api import PauseMode, ServerInfo, WeightUpdateInfo
from grpo_async.utils.text import dtype_name
from grpo_async.weights.backends import Backend, Rendezvous
from grpo_async.weights.buckets import cut_into_buckets, pack, with_digests
from grpo_async.weights.receiver import parameter_specs

Tensors = Mapping[str, torch.Tensor]
ADDRESS = "127.0.0.1"


def push_state_dict(server_url: str, token: str | None, tensors: Tensors, version: int) -> None:
    """Form a new weight group, push `tensors` as `version` under pause keep, and leave the group.

    Raises:
        httpx.HTTPStatusError: the server refused a phase. RuntimeError: the broadcast failed. Either way it is resumed, if it can
            be.
    """
    with WeightPusher(server_url, token) as pusher:
        pusher.connect()
        pusher.push(tensors, version)


def announcement(tensors: Tensors, *, bucket_bytes: int = 8 << 20, timeout_s: float = 5.0) -> WeightUpdateInfo:
    """What /start_weight_update is told of these."""
    return WeightUpdateInfo(
        names=list(tensors),
        dtype_names=[dtype_name(tensor.dtype) for tensor in tensors.values()],
        shapes=[list(tensor.shape) for tensor in tensors.values()],
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
    )


class WeightPusher:
    """Group rank 0 and the control client. Call `connect` first; `update` takes anything that is to be tried."""

    def __init__(self, server_url: str, token: str | None, *, timeout_s: float = 30.0) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=server_url, headers=headers, timeout=timeout_s + 30.0)
        self.timeout_s = timeout_s
        self._answer_s = timeout_s + 60.0  # later than the client's own deadline, which names the path
        self.group: Backend | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.group = None
        self.client.close()

    def post(self, path: str, body: Any = None, **params: str) -> httpx.Response:
        response = self.client.post(path, json={} if body is None else body, params=params)
        if response.is_error:
            raise httpx.HTTPStatusError(
                f"{path} answered {response.status_code}: {response.text[:500]}",
                request=response.request,
                response=response,
            )
        return response

    def info(self) -> ServerInfo:
        response = self.client.get("/rollout/info")
        response.raise_for_status()
        return ServerInfo.model_validate_json(response.content)

    def connect(self) -> None:
        """Meet the server's workers in a new group."""
        num_workers = self.info().num_workers
        rendezvous = Rendezvous(ADDRESS, world_size=1 + num_workers, timeout_s=self.timeout_s)
        init = rendezvous.init_info("gloo", rank_offset=1)
        self.group = None
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/init_weight_transfer_engine", init.model_dump())
            self.group = rendezvous.join("gloo", torch.device("cpu"))
            answer.result(timeout=self._answer_s)

    def push(
        self,
        tensors: Tensors,
        version: int,
        *,
        bucket_bytes: int = 8 << 20,
        mode: PauseMode = "keep",
        keep_cache: bool = False,
    ) -> None:
        """The whole order; a failed phase still resumes a server that has whole weights."""
        self.post("/pause", mode=mode, keep_cache=str(keep_cache).lower())
        try:
            self.start(tensors, bucket_bytes=bucket_bytes)
            self.update(tensors, bucket_bytes=bucket_bytes)
            self.post("/finish_weight_update", {"weight_version": str(version)})
        finally:
            self.client.post("/resume")

    def start(self, tensors: Tensors, *, bucket_bytes: int = 8 << 20) -> None:
        """POST /start_weight_update."""
        info = announcement(tensors, bucket_bytes=bucket_bytes, timeout_s=self.timeout_s)
        self.post("/start_weight_update", info.model_dump())

    def update(self, tensors: Tensors, *, bucket_bytes: int = 8 << 20) -> None:
        """POST /update_weights beside the broadcast, as it was announced; nothing is generated before the update is finished."""
        assert self.group is not None, "connect first"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        info = announcement(tensors, bucket_bytes=bucket_bytes, timeout_s=self.timeout_s)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/update_weights")
            buckets = cut_into_buckets(parameter_specs(info), bucket_bytes)
            for parts in with_digests([tensors[spec.name] for spec in bucket] for bucket in buckets):
                packed = pack(parts, into=self.group.buffer(sum(part.nbytes for part in parts)))
                self.group.send(packed, timeout_s=self.timeout_s)()
            answer.result(timeout=self._answer_s)
