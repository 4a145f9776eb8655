"""The rollout side as a run builds it, against a server that a test scripts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from grpo_async.buffer.ledger import is_balanced
from grpo_async.chat.renderer import load_renderer
from grpo_async.records import GroupStatus
from grpo_async.training.checkpoint import CheckpointState
from tests.support.local_server import Request, line, local_server
from tests.trainer.sides import number_in_group, odd_or_even, open_side, serve, side_config, take


def test_an_empty_queue_goes_on_waiting_without_a_word_while_the_server_generates(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R1.4: 12 tokens with 0.15 s between them outlast a queue timeout of 1 s, because every token is a sign of health. R1.3."""

    async def slow(request: Request) -> AsyncIterator[bytes]:
        for _ in range(11):
            yield line([5 + number_in_group(request) % 2], finish=None)
            await asyncio.sleep(0.15)
        yield line(request["stop_token_ids"][:1])

    config = side_config(tmp_path, tiny_model, rollout={"max_completion_tokens": 16}, training={"queue_timeout_s": 1.0})
    with local_server(slow) as server, open_side(config, server) as side:
        side.source.start()
        began = time.monotonic()
        with caplog.at_level(logging.DEBUG, logger="grpo_async"):
            groups = take(side, 2)
        assert groups is not None
        assert [len(group.samples) for group in groups] == [2, 2]
        assert time.monotonic() - began > 1.0
    assert [record.getMessage() for record in caplog.records if record.name.startswith("grpo_async")] == []


def test_every_rollout_in_flight_has_a_connection_at_the_same_time(tiny_model: Path, tmp_path: Path) -> None:
    """R1.10: 160 rollouts in flight (more than the 100 connections that HTTP clients allow by default): the server answers
    none of them before it holds all of them."""
    all_here = asyncio.Event()
    config = side_config(tmp_path, tiny_model, rollout={"group_size": 8, "groups_per_step": 20, "max_in_flight": 160})

    async def together(request: Request) -> AsyncIterator[bytes]:
        if len(server.requests) == 160:
            all_here.set()
        await all_here.wait()
        async for part in odd_or_even(request):
            yield part

    with local_server(together) as server, open_side(config, server) as side:
        side.source.start()
        server.wait_for(lambda: len(server.requests) == 160, "160 requests at once")
        assert server.most_connections == 160
        groups = take(side, 20)
        assert groups is not None
        assert len(groups) == 20


def test_a_run_of_two_epochs_uses_every_row_twice_also_when_it_goes_on_from_a_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Five rows of two sources, two groups a step: ten prompts, five steps. The checkpoint is that of step 2: what waits then is
    in it."""
    sources = []
    for count in (2, 3):
        sources.append({"type": "jsonl", "path": str(tmp_path / f"{count}.jsonl"), "weight": count})
        lines = [f'{{"prompt": "question {number} of {count}", "answer": "2"}}\n' for number in range(count)]
        (tmp_path / f"{count}.jsonl").write_text("".join(lines))
    config = side_config(
        tmp_path,
        tiny_model,
        data={"train": sources, "shuffle": True},
        rollout={"max_staleness": 2},
        training={"max_steps": None, "epochs": 2},
    )
    trained: list[list[int]] = []
    texts: Counter[str] = Counter()
    state: CheckpointState | None = None
    with local_server(odd_or_even) as server:
        for steps, expected in ((range(1, 3), 2), (range(3, 9), 5)):
            with open_side(config, server, state) as side:
                assert side.config.num_steps == 5
                side.source.start()
                for step in steps:
                    groups = take(side, 2, version=step - 1)
                    assert groups is not None
                    if not groups:
                        break
                    trained.append([group.group.group_id for group in groups])
                    texts.update(group.group.prompt.messages[0].content for group in groups)
                    side.source.close_groups(groups, GroupStatus.TRAINED, step=step)
                    serve(side, step)
                assert len(trained) == expected
                rollouts = side.source.resume_state()
                state = CheckpointState(step=expected, rollouts=rollouts.small(), lines=list(rollouts.lines()))
                ledger = side.source.ledger_snapshot()
    assert sorted(number for groups in trained for number in groups) == list(range(10))
    assert [len(groups) for groups in trained] == [2] * 5
    assert sorted(texts.values()) == [2] * 5
    assert is_balanced(ledger)
    assert (ledger["groups"]["started"], ledger["groups"]["trained"]) == (10, 10)


def test_the_workers_prompts_are_those_of_the_configured_template_and_end_at_the_configured_token(
    tiny_model: Path, tmp_path: Path
) -> None:
    """R1.14: a template of our own, its argument (a row's goes first) and end-of-turn token reach the server's requests."""
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for message in messages %}{{ message['role'] ~ tone ~ message['content'] }}{% endfor %}<|im_start|>"
    )
    data = tmp_path / "chat.jsonl"
    data.write_text(
        '{"prompt": [{"role": "user", "content": "hello"}], "answer": "2"}\n'
        '{"prompt": [{"role": "user", "content": "hello"}], "answer": "2", "chat_template_kwargs": {"tone": "?"}}\n'
    )
    config = side_config(
        tmp_path,
        tiny_model,
        data={"train": {"type": "jsonl", "path": str(data)}},
        model={
            "chat_template": str(template),
            "chat_template_kwargs": {"tone": "!"},
            "end_of_turn_tokens": ["<|endoftext|>"],
        },
    )
    tokenizer = load_renderer(config).tokenizer
    with local_server(odd_or_even) as server, open_side(config, server) as side:
        side.source.start()
        server.wait_for(lambda: len(server.requests) == 4, "the requests of a step")
    assert {tokenizer.decode(request["token_ids"]) for request in server.requests} == {
        "user!hello<|im_start|>",
        "user?hello<|im_start|>",
    }
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert all(sorted(request["stop_token_ids"]) == sorted(ends) for request in server.requests)
