"""What becomes of work that outlived its weights: nothing is stranded, and nothing of it is trained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_async.buffer.ledger import is_balanced
from grpo_async.records import GroupStatus
from tests.support.local_server import LIMIT_S, Request, line, local_server
from tests.support.waiting import eventually
from tests.trainer.sides import odd_or_even, open_side, serve, served, side_config, take

entered, go_on = threading.Event(), threading.Event()


def held(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """A rollout function that waits in its first call."""
    entered.set()
    assert go_on.wait(LIMIT_S)
    count, end = len(prompts), trainer.processing_class.eos_token_id
    ids = [[10 + number % 2, end] for number in range(count)]
    return {"prompt_ids": [[1, 2]] * count, "completion_ids": ids, "logprobs": [[-0.5, -0.5]] * count}


def test_a_group_of_which_only_a_part_was_dispatched_is_cancelled_whole_and_nothing_is_stranded(
    tiny_model: Path, tmp_path: Path
) -> None:
    """R6.2, R6.3: 3 slots, groups of 4, so that 3 rollouts of group 0 generate and its 4th waits.

    At version 2 their tokens of version 0 are too old. The 4th is never dispatched, its 3 slots and its place are free again, and
    every other group is made from start to end.
    """

    async def held_at_version_0(request: Request) -> AsyncIterator[bytes]:
        if served.version == 0:
            yield line([101], finish=None)
            await asyncio.Event().wait()
        async for part in odd_or_even(request):
            yield part

    config = side_config(tmp_path, tiny_model, rollout={"group_size": 4, "max_in_flight": 3, "max_staleness": 1})
    with local_server(held_at_version_0) as server, open_side(config, server) as side:
        side.source.start()
        server.wait_for(lambda: len(server.requests) == 3, "the requests that have a slot")
        assert eventually(lambda: side.source.ledger_snapshot()["tokens"]["in_flight"] == 3, LIMIT_S)
        serve(side, 1)
        side.source.resume_state()  # goes through the rollout thread, after what `advance` does there
        assert side.source.ledger_snapshot()["groups"]["stale"] == 0  # one step behind is allowed
        serve(side, 2)
        trained = []
        for _ in range(4):
            groups = take(side, 2, version=2)
            assert groups is not None
            side.source.close_groups(groups, GroupStatus.TRAINED, step=3)
            trained += [group.group.group_id for group in groups]
        assert sorted(trained) == list(range(1, 9))  # (2 + 1 + 1) x 2 places, and the one that group 0 gave back
        assert not [each for each in server.requests[3:] if each["request_id"].startswith("g0-")]
        ledger = side.source.ledger_snapshot()
    assert is_balanced(ledger)
    assert (ledger["groups"]["stale"], ledger["groups"]["in_flight"], ledger["tokens"]["stale"]) == (1, 0, 3)


def test_a_group_that_turns_out_stale_when_its_tokens_arrive_is_not_trained(tiny_model: Path, tmp_path: Path) -> None:
    """R6.3: a rollout function shows its tokens at the end only; by then version 2 is served and its call began at 0.

    R5.5: it takes the place of our own rollouts, which would find no server."""
    function = {"function": f"{__name__}:held"}
    config = side_config(tmp_path, tiny_model, rollout={"max_staleness": 1}, rollout_function=function)
    nowhere: Any = SimpleNamespace(url="http://127.0.0.1:9")
    with open_side(config, nowhere) as side:
        side.source.start()
        assert entered.wait(LIMIT_S)
        serve(side, 1)
        serve(side, 2)
        go_on.set()
        groups = take(side, 2, version=2)
        assert groups is not None
        assert [group.group.group_id for group in groups] == [2, 3]
        assert side.source.ledger_snapshot()["groups"]["stale"] == 2
