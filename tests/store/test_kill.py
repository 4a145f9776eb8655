"""kill -9 of a process that writes, at random moments: what was flushed is there, and the store goes on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_async.records import GroupStatus
from grpo_async.store import GroupRow, RolloutStore
from grpo_async.store.files import find_blocks, read_metadata
from tests.store.builders import append, build_group, build_rollout, small_blocks
from tests.support.stored import read_groups, scan_groups
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

# One writer, in a process of its own: about 200 groups of 15 kB a second, blocks of 400 kB; after every fifth it says the position.
# It goes on from the position in its second argument as a resume does.
_WRITER = """
import sys, time
from pathlib import Path
from grpo_async.records import GroupStatus
from tests.store.builders import append, build_group, build_rollout, small_blocks
from grpo_async.store import RolloutStore

folder, resume = Path(sys.argv[1]), int(sys.argv[2])
store = RolloutStore(folder, settings=small_blocks(block_mb=0.4))
if resume >= 0:
    store.supersede_from(resume, step=1)
print("ready", flush=True)
for number in range(100000):
    ids = range(number, number + 400)
    group = build_group(number, [build_rollout(f"{number}-{i}", ids=ids, text="x" * 1000) for i in range(2)])
    append(store, group, [], GroupStatus.TRAINED, number)
    time.sleep(0.005)
    if number % 5 == 4:
        print(store.position(), flush=True)
"""


def _kill_after(folder: Path, resume: int, seconds: float, *, wants_sealed: bool) -> int:
    """The last position that a writer said. With `wants_sealed` it is killed when it has sealed a block, but not earlier."""
    command = [sys.executable, "-c", _WRITER, str(folder), str(resume)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            ends_at = time.monotonic() + seconds
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                is_enough = not wants_sealed or any(block.is_sealed for block in find_blocks(folder))
                assert time.monotonic() < ends_at + 60.0, "nothing was sealed while the writer wrote"
                if time.monotonic() > ends_at and is_enough:
                    assert not _says_killed(folder), "it lives"
                    break
        finally:
            process.kill()
        said += process.communicate(timeout=30.0)[0].splitlines()
    return int(next(line for line in reversed(said) if line.strip()))


def _says_killed(folder: Path) -> bool:
    return any("was killed: groups that it had not written yet" in note for note in read_metadata(folder).notes(folder))


def _is_whole(row: GroupRow) -> bool:
    first = row.group_id
    return all(rollout.completion_ids == list(range(first, first + 400)) for rollout in row.rollouts)


def test_a_killed_writer_leaves_what_was_flushed_and_a_resume_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine may leave lines unsealed at the end of a run; here they are waited for
    monkeypatch.setattr("grpo_async.store.rollout_store.SEAL_TIMEOUT_S", 120.0)
    moments = random.Random(3)
    expected: list[int] = []  # group ids that count
    resume = -1
    last_seq = -1
    for attempt in range(5):
        first_seq = last_seq + 1
        position = _kill_after(tmp_path, resume, moments.uniform(0.05, 1.5), wants_sealed=attempt == 2)
        # eventually: a sealing process that was just being started has the writer's lock until it becomes another program
        assert eventually(lambda: _says_killed(tmp_path), 10.0)
        stored = scan_groups(tmp_path)
        rows = [each.row for each in stored if not each.superseded]
        assert all(_is_whole(row) for row in rows), attempt
        seqs = [each.row.seq for each in stored]
        last_seq = seqs[-1]
        assert seqs == sorted(set(seqs)), "a group is lost, doubled or out of order"
        assert seqs[-1] >= position - 1, "what was flushed is missing"
        first = next(row.seq for row in rows if row.seq >= first_seq)
        written = [row.group_id for row in rows if row.seq >= first]
        assert written == list(range(len(written))), "a hole"
        assert [row.group_id for row in rows if row.seq < first] == expected
        # a checkpoint of the last position: what came after it is given up
        resume = position
        expected += [row.group_id for row in rows if first <= row.seq < position]
    with RolloutStore(tmp_path, settings=small_blocks()) as last:
        last.supersede_from(resume, step=1)
        append(last, build_group(0, [build_rollout("0-0")]), [], GroupStatus.TRAINED, 1)
    assert [row.group_id for row in read_groups(tmp_path)] == [*expected, 0]
    assert not read_metadata(tmp_path).is_open
    assert all(block.is_sealed for block in find_blocks(tmp_path))
    assert not list(tmp_path.glob("*.jsonl"))
