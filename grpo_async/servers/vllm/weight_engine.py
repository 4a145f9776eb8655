"""vLLM's weight-transfer engine "gloo": receives weights from the trainer and applies them all or not at all.

Staged: start and finish do nothing. `update_weights` first receives every parameter into host memory, then checks names
and shapes, then replaces the weights, all in one call of the engine core, so that no step ever runs on half-loaded weights
and a trainer that dies while sending changes nothing. Costs one more copy of the model in host memory while it lasts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from vllm.logger import init_logger

from grpo_async.inference.surface import GlooInitInfo, GlooUpdateInfo
from grpo_async.servers.vllm import compat
from grpo_async.servers.vllm.mismatch import find_mismatches
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.gloo import WeightGroup, receive_parameters

logger = init_logger("vllm.grpo_async")


class StagedGlooEngine(compat.WeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped here
    """One per vLLM worker."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group; again, with a new key and port, after the trainer restarted."""
        self._group = None
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = WeightGroup.join(
            init_info.master_address,
            init_info.master_port,
            rank=rank,
            world_size=init_info.world_size,
            key=init_info.key,
            timeout_s=init_info.timeout_s,
        )
        logger.info("joined the weight group as rank %d of %d", rank, init_info.world_size)

    def start_weight_update(self) -> None:
        """Nothing: see the module docstring."""

    def finish_weight_update(self) -> None:
        """Nothing: see the module docstring."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # not the base class's: that ends in torch.accelerator.synchronize(), which raises where there is no accelerator
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive, check, apply.

        Raises:
            RuntimeError: no group, the trainer vanished, or a bucket was late. The old weights stay.
            ValueError: names or shapes do not fit the model. The old weights stay.
        """
        specs = [
            ParameterSpec(name=name, dtype_name=dtype_name, shape=tuple(shape))
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            )
        ]
        if self._group is None:
            raise RuntimeError(
                "no weight group: call /init_weight_transfer_engine first, and again after a failed update"
            )
        try:
            weights = receive_parameters(
                self._group, specs, bucket_bytes=update_info.bucket_bytes, timeout_s=update_info.timeout_s
            )
        except RuntimeError:
            self._group = None  # gloo cannot be used again after a broken broadcast
            raise
        # only now, when nobody waits for us in the broadcast any more
        self._check(specs)
        try:
            compat.load_weights(self.model, self.model_config, weights)
        except Exception:
            logger.exception("replacing the weights failed half-way")
            _end_process("its weights are a mix of old and new")

    def _check(self, specs: Sequence[ParameterSpec]) -> None:
        expected = compat.checkpoint_shapes()
        if not expected or self.parallel_config.enable_expert_parallel:  # with it, a worker loads some experts only
            logger.warning("cannot check the names of this update: they are not those this worker loaded at start")
            return
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        problems = list(find_mismatches(specs, expected, tied=tied))
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"the update does not fit the model, the old weights stay: {'; '.join(problems[:5])}{more}"
            )

    def shutdown(self) -> None:
        self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        raise NotImplementedError("the trainer sends with grpo_async.weights")


def _end_process(reason: str) -> NoReturn:
    """vLLM notices and ends the whole server, which the launcher restarts; serving on would answer with garbage."""
    logger.critical("ending this server: %s", reason)
    for handler in logger.handlers:
        handler.flush()
    os._exit(1)
