"""The rollout side of rank 0 as a run builds it, on a real model folder, talking to a server that a test scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_async.chat.renderer import load_renderer
from grpo_async.config import ExperimentConfig
from grpo_async.inference.router import FixedServers
from grpo_async.records import ScoredGroup
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.trainer.rollout_side import RolloutSide, build_rollout_side
from grpo_async.training.checkpoint import CheckpointState
from tests.launch.support import make_config
from tests.support.configs import merged
from tests.support.local_server import LocalServer, Request, line


def odd_is_right(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward: 1 where the first token is odd. `odd_or_even` makes it differ within every group."""
    return [float(ids[0] % 2) for ids in completion_ids]


def number_in_group(request: Request) -> int:
    """The 3 of "g7-r3-t0"."""
    return int(request["request_id"].split("-")[1].removeprefix("r"))


class _Served:
    """What the scripted server serves; `serve` changes it."""

    version = 0


served = _Served()


async def odd_or_even(request: Request) -> AsyncIterator[bytes]:
    """A script: one token, odd or even by its number in the group, and the end of the turn, of the version that is served."""
    yield line([5 + number_in_group(request) % 2, *request["stop_token_ids"][:1]], version=served.version)


def side_config(folder: Path, model_path: Path, **sections: Mapping[str, Any]) -> ExperimentConfig:
    """Two groups of two per step, nothing ahead; `sections` change that."""
    base: dict[str, Any] = {
        "model": {"path": str(model_path)},
        "data": {"shuffle": False},
        "rollout": {
            "group_size": 2, "groups_per_step": 2, "max_staleness": 0, "max_completion_tokens": 8,
        },
        "inference": {"engine": "embedded", "max_model_len": 128},
        "training": {"max_steps": 50},
    }  # fmt: skip
    return make_config(folder, rewards=[{"function": "tests.trainer.sides:odd_is_right"}], **merged(base, sections))


@contextmanager
def open_side(
    config: ExperimentConfig, server: LocalServer, state: CheckpointState | None = None
) -> Iterator[RolloutSide]:
    """Built, not started; closed at the end of the block. `state`: of a checkpoint to go on from."""
    served.version = state.step if state else 0
    store = RolloutStore(config.run_path / "rollouts", settings=config.record.rollouts)
    side = build_rollout_side(
        config,
        fleet=FixedServers([server.url]),
        renderer=load_renderer(config),
        vocab_size=1 << 20,
        store=store,
        state=state,
    )
    try:
        yield side
    finally:
        side.source.close()
        store.close()


def serve(side: RolloutSide, version: int) -> None:
    """The scripted server serves `version` from now on, and the rollout side is told."""
    served.version = version
    side.source.advance(version)


def take(side: RolloutSide, num_groups: int, *, version: int = 0) -> list[ScoredGroup] | None:
    """`source.take` where no other rank waits and no server changes."""
    while (groups := side.source.take(num_groups, trainer_version=version)) is None and not side.source.is_stopping:
        pass
    return groups
