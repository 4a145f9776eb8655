"""The store: what goes in comes out, whatever interrupts the writer."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import orjson
import pytest

from grpo_async.errors import RunError
from grpo_async.records import FinishReason, GroupStatus, Origin, RolloutStatus, ScoredGroup
from grpo_async.store import read_group_at, read_groups, scan_groups
from grpo_async.store.rows import SCHEMA, from_json, group_row, to_json
from tests.store.builders import (
    OpenStore,
    append_simple,
    build_failed_rollout,
    build_group,
    build_rollout,
    build_sample,
    build_tool_rollout,
)


def _ids(folder: Path) -> list[int]:
    return [row.group_id for row in read_groups(folder)]


def test_a_row_holds_everything_of_a_group(tmp_path: Path, open_store: OpenStore) -> None:
    tool, failed = build_tool_rollout("7-0"), build_failed_rollout("7-1")
    store = open_store(tmp_path)
    store.append(
        build_group(7, [tool, failed], answer=3), [build_sample(7, tool, 0.5, advantage=1.25)], GroupStatus.TRAINED, 4
    )
    (row,) = read_groups(tmp_path)
    assert (row.schema, row.group_id, row.prompt_id, row.step, row.status) == (SCHEMA, 7, 107, 4, GroupStatus.TRAINED)
    assert [(m.role, m.content, m.origin) for m in row.messages] == [
        ("system", "be brief", Origin.PROMPT),
        ("user", "what is 1 + 1?", Origin.PROMPT),
    ]
    assert row.columns == {"answer": 3}
    first, second = row.rollouts
    assert (first.rollout_id, first.status, first.done, first.truncated) == ("7-0", RolloutStatus.FINISHED, True, False)
    assert (first.reward, first.advantage, first.rewards) == (0.5, 1.25, {"exact": 0.5, "format": None})
    assert first.prompt_ids == [1, 2]
    assert first.completion_ids == [5, 6, 90, 91, 7]
    assert first.mask == [1, 1, 0, 0, 1]
    assert first.logprobs == [-0.5, -1.5, 0.0, 0.0, -3.5]
    assert first.versions == [2, 3, -1, -1, 3]
    assert (first.num_tokens, first.sampled_versions) == (3, {2, 3})
    assert [message.origin for message in first.messages] == [Origin.POLICY, Origin.TOOL, Origin.POLICY]
    assert [turn.num_tokens for turn in first.turns] == [2, 1]
    assert first.turns[0].finish_reason is FinishReason.STOP
    assert first.turns[0].tool_execution_duration_s == 0.125
    (call,) = first.turns[0].tool_calls
    assert (call.name, call.failed, call.arguments) == ("add", True, {"a": 1, "b": "{2}"})
    assert call.result == "\\ud83d"  # half a surrogate pair: UTF-8 cannot hold it
    assert (second.status, second.error, second.reward) == (
        RolloutStatus.FAILED,
        "the server refused the request",
        None,
    )


def test_a_row_comes_back_equal_from_its_line() -> None:
    completion = build_rollout("1-0")
    row = group_row(build_group(1, [completion]), [build_sample(1, completion, 1.0)], GroupStatus.STALE, None)
    assert from_json(to_json(row)) == row


def test_columns_that_json_cannot_hold_become_their_repr() -> None:
    columns: dict[Any, Any] = {"big": 2**70, "set": {1}, "nested": {"a": [{2}]}, "bad": "\ud800", 3: {4: 5}}
    group = build_group(1, [])
    group = replace(group, prompt=replace(group.prompt, columns=columns))
    assert group_row(group, [], GroupStatus.FAILED, None).columns == {
        "big": str(2**70), "set": "{1}", "nested": {"a": ["{2}"]}, "bad": "'\\ud800'", "3": {"4": 5},
    }  # fmt: skip


def test_text_that_json_cannot_hold_never_keeps_a_row_from_being_written(tmp_path: Path, open_store: OpenStore) -> None:
    """A policy writes half a surrogate pair in ASCII: \\ud800 inside JSON."""
    half, told = "a\ud800b", "a\\ud800b"
    completion = build_tool_rollout("1-0")
    turn, last = completion.turns
    policy, tool = turn.messages
    made = {"id": half, "type": "function", "function": {"name": half, "arguments": {half: half}}}
    turn = replace(
        turn,
        parse_error=half,
        messages=[replace(policy, content=half, tool_calls=(made,)), replace(tool, name=half, tool_call_id=half)],
        tool_calls=[replace(turn.tool_calls[0], name=half, tool_call_id=half, arguments={half: 1}, result=half)],
    )
    completion = replace(
        completion,
        turns=[turn, last],
        error=half,
        prompt_messages=[replace(policy, role=half)],
        reward_columns={half: _Named(half)},
    )
    scored = ScoredGroup(
        group=build_group(1, [completion], **{half: 1}),
        samples=[],
        rewards=[1.0],
        reward_parts=[{half: 1.0}],
        extra_columns={f"{half} noted": [half]},
    )
    open_store(tmp_path).append(scored.group, [], GroupStatus.FILTERED, None, scored=scored)
    (row,) = read_groups(tmp_path)
    (rollout,) = row.rollouts
    assert row.columns == {told: 1}
    assert (rollout.error, rollout.rewards) == (told, {told: 1.0})
    assert rollout.extra == {told: told, f"{told} noted": repr(half)}
    assert rollout.prompt_messages is not None
    assert rollout.prompt_messages[0].role == told
    assert rollout.turns[0].parse_error == told
    (call,) = rollout.turns[0].tool_calls
    assert (call.name, call.tool_call_id, call.arguments, call.result) == (told, told, {told: 1}, told)
    assert (rollout.messages[1].name, rollout.messages[1].tool_call_id) == (told, told)
    assert rollout.messages[0].content == told
    assert rollout.messages[0].tool_calls[0]["function"] == {"name": repr(half), "arguments": {told: repr(half)}}


class _Named:
    """Something that JSON cannot hold, and neither can its repr."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def test_columns_of_a_rollout_function_are_kept_and_log_extra_wins_a_clash(
    tmp_path: Path, open_store: OpenStore
) -> None:
    first = replace(build_rollout("1-0"), reward_columns={"seat": 3, "note": "returned"})
    second = replace(build_rollout("1-1"), reward_columns={"seat": {4}})
    group = build_group(1, [first, second])
    scored = ScoredGroup(
        group=group,
        samples=[],
        rewards=[1.0, 1.0],
        reward_parts=[{}, {}],
        extra_columns={"note": ["logged", None]},
    )
    open_store(tmp_path).append(group, [], GroupStatus.FILTERED, None, scored=scored)
    open_store(tmp_path).append(build_group(2, [first]), [], GroupStatus.CANCELLED, None)  # never scored
    scored_row, unscored_row = read_groups(tmp_path)
    assert [rollout.extra for rollout in scored_row.rollouts] == [
        {"seat": 3, "note": "logged"},
        {"seat": "{4}", "note": None},
    ]
    assert unscored_row.rollouts[0].extra == {"seat": 3, "note": "returned"}


def test_a_filtered_group_keeps_the_rewards_of_its_scoring(tmp_path: Path, open_store: OpenStore) -> None:
    group = build_group(1, [build_rollout("1-0"), build_failed_rollout("1-1"), build_rollout("1-2")])
    scored = ScoredGroup(group=group, samples=[], rewards=[1.0, 1.0], reward_parts=[{"exact": 1.0}, {"exact": 1.0}])
    open_store(tmp_path).append(group, [], GroupStatus.FILTERED, None, scored=scored)
    (row,) = read_groups(tmp_path)
    assert [(rollout.reward, rollout.rewards) for rollout in row.rollouts] == [
        (1.0, {"exact": 1.0}),
        (None, {}),
        (1.0, {"exact": 1.0}),
    ]


def test_a_group_can_be_read_as_soon_as_it_is_appended(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    for group_id in range(3):
        append_simple(store, group_id)
        assert _ids(tmp_path) == list(range(group_id + 1))
    store.close()


def test_a_folder_that_does_not_exist_has_no_groups(tmp_path: Path) -> None:
    assert _ids(tmp_path / "none") == []


def test_a_torn_last_line_is_skipped_and_a_new_writer_leaves_it_alone(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    append_simple(store, 0)
    append_simple(store, 1)
    store.close()
    part = tmp_path / "part-00000.jsonl"
    torn = part.read_bytes()[:-10]  # as after a kill in the middle of a write
    part.write_bytes(torn)
    assert _ids(tmp_path) == [0]
    again = open_store(tmp_path)
    append_simple(again, 2)
    again.close()
    assert part.read_bytes() == torn
    assert _ids(tmp_path) == [0, 2]


def test_a_damaged_line_in_the_middle_is_an_error_with_file_and_line(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    for group_id in range(3):
        append_simple(store, group_id)
    store.close()
    part = tmp_path / "part-00000.jsonl"
    lines = part.read_bytes().split(b"\n")
    part.write_bytes(b"\n".join([lines[0], lines[1][:40], *lines[2:]]))
    with pytest.raises(RunError, match=r"part-00000\.jsonl:2: the line is damaged"):
        _ids(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema": 3}, r"schema is 3, this version reads \(1, 2\)"), ({"status": "odd"}, "odd"), ({"extra": 1}, "extra")],
)
def test_a_row_of_another_make_is_refused(change: dict[str, Any], message: str) -> None:
    line = to_json(group_row(build_group(1, []), [], GroupStatus.FAILED, None))
    with pytest.raises(ValueError, match=message):
        from_json(orjson.dumps({**orjson.loads(line), **change}))


def test_a_full_part_is_followed_by_the_next_and_read_in_order(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path, part_bytes=1)
    for group_id in range(12):
        append_simple(store, group_id)
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "part-00011.jsonl"
    assert _ids(tmp_path) == list(range(12))


def test_part_numbers_are_ordered_as_numbers(tmp_path: Path, open_store: OpenStore) -> None:
    for number in (99999, 100000):
        store = open_store(tmp_path / str(number))
        append_simple(store, number)
        store.close()
        (tmp_path / str(number) / "part-00000.jsonl").rename(tmp_path / f"part-{number}.jsonl")
    assert _ids(tmp_path) == [99999, 100000]


def test_threads_do_not_mix_their_lines(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path, part_bytes=20_000)

    def append_many(first: int) -> None:
        for group_id in range(first, first + 40):
            append_simple(store, group_id, answer="x" * 500)

    threads = [threading.Thread(target=append_many, args=(first,)) for first in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(_ids(tmp_path)) == [base + i for base in (0, 100, 200, 300) for i in range(40)]


def test_a_failed_write_is_a_clear_error_and_the_next_group_is_whole(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    append_simple(store, 0)
    write = FileIO.write

    class FullDisk(FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, bytes(data)[:21])

    store.close()
    store = open_store(tmp_path)
    monkeypatch.setattr("grpo_async.store.rollout_store.FileIO", FullDisk)
    with pytest.raises(RunError, match=r"cannot write rollouts to .*: No space left on device"):
        append_simple(store, 1)
    monkeypatch.undo()
    append_simple(store, 2)
    store.close()
    assert _ids(tmp_path) == [0, 2]


def test_a_closed_store_refuses_groups(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(RunError, match="is closed"):
        append_simple(store, 0)


def test_a_scanned_group_can_be_read_again_at_its_place(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    for group_id, answer in enumerate(["a", "ü🎉", "c"]):
        append_simple(store, group_id, answer=answer)
    for stored in scan_groups(tmp_path):
        assert from_json(read_group_at(stored.part, stored.offset)) == stored.row
