"""What becomes of work that outlived its weights, over real HTTP: nothing is stranded, nothing is scored in vain."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from grpo_async.buffer.ledger import is_balanced
from grpo_async.records import GroupStatus
from grpo_async.trainer.rollout_side import RolloutSide
from tests.support.local_server import LIMIT_S, Request, line, local_server
from tests.support.stored import read_groups
from tests.support.waiting import eventually
from tests.trainer.sides import odd_or_even, open_side, scored, serve, served, side_config, steps_seen, take

FUNCTION = {"function": "tests.trainer.sides:steps_seen"}
FIRST_STALE = 101


def _train(side: RolloutSide, num_groups: int, *, version: int) -> list[int]:
    """Take a step's groups and close them as trained; their ids."""
    groups = take(side, num_groups, version=version)
    assert groups is not None
    side.source.close_groups(groups, GroupStatus.TRAINED, step=version + 1)
    return [group.group.group_id for group in groups]


def test_a_group_of_which_only_a_part_was_dispatched_is_cancelled_whole_and_nothing_is_stranded(
    tiny_model: Path, tmp_path: Path
) -> None:
    """R6.2, R6.3: 3 slots, groups of 4, so that 3 rollouts of group 0 generate and its 4th waits.

    At version 2 their tokens of version 0 are too old. The 4th is never dispatched, group 0 is counted as stale and is not
    scored, its 3 slots and its place are free again, and every other group is made from start to end.
    """
    go_on = asyncio.Event()

    async def held_at_version_0(request: Request) -> AsyncIterator[bytes]:
        if served.version == 0:
            yield line([FIRST_STALE], finish=None)
            await go_on.wait()
            yield line(request["stop_token_ids"][:1])
        else:
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
        server.let_go(go_on)  # whoever is not cancelled would get its answer now, and be scored
        trained = [group for _ in range(4) for group in _train(side, 2, version=2)]
        assert sorted(trained) == list(range(1, 9))  # (2 + 1 + 1) x 2 places, and the one that group 0 gave back
        assert {request["request_id"] for request in server.requests[:3]} == {"g0-r0-t0", "g0-r1-t0", "g0-r2-t0"}
        assert not [r for r in server.requests[3:] if r["request_id"].startswith("g0-")]
        assert not [tokens for tokens in scored if FIRST_STALE in tokens]
        ledger, gauges = side.source.ledger_snapshot(), side.source.gauges()
        assert gauges["async/stale/mean_length"] == 3 / 4  # three completions had one token
        assert "async/stale/mean_length" not in side.source.gauges()  # none since
    assert is_balanced(ledger)
    assert (ledger["groups"]["stale"], ledger["groups"]["in_flight"]) == (1, 0)
    assert ledger["tokens"]["stale"] == 3
    rows = list(read_groups(config.run_path / "rollouts"))
    assert Counter(row.group_id for row in rows) == dict.fromkeys(range(9), 1)
    assert [row.group_id for row in rows if row.status is GroupStatus.STALE] == [0]


def test_a_group_that_turns_out_stale_when_its_tokens_arrive_is_not_scored(tiny_model: Path, tmp_path: Path) -> None:
    """R6.3: a rollout function shows its tokens at the end only; by then version 2 is served and its call began at 0.

    R5.5: it takes the place of our own rollouts, which would find no server."""
    steps_seen.begin(held=True)
    config = side_config(tmp_path, tiny_model, rollout={"max_staleness": 1}, rollout_function=FUNCTION)
    with open_side(config, "http://127.0.0.1:9") as side:
        side.source.start()
        assert steps_seen.entered.wait(10.0)
        serve(side, 1)
        serve(side, 2)
        steps_seen.go_on.set()
        assert _train(side, 2, version=2) == [2, 3]
        assert side.source.ledger_snapshot()["groups"]["stale"] == 2
    assert steps_seen.steps[:2] == [0, 2]
    assert not [tokens for tokens in scored if tokens[0] in (10, 11)]
