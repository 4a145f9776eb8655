"""How long the rollout table takes on a large run: open it, filter, search, sort, show one rollout.

    python -m benchmarks rollouts [--rollouts 100000] [--tokens 256] [--repeats 5] [--threads N] [--json FILE]
        [--folder FOLDER]

Makes a store of that many rollouts from a seed, in the blocks that a run leaves (Parquet, the same columns, order and compression;
the last block as JSON lines by the real writer), or takes up the one that is in FOLDER already. Then it measures:

    cold    a new process: Python starts, imports, opens the store, and the first page of groups and of rollouts is there;
            with the files in the page cache, and with them dropped from it
    warm    each question to a table that is open: median, lowest, highest of the repeats, and the first time it is asked

Exit 1 where a target is missed: the first table within 2 s, a filter within 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FIRST_TABLE_S, FILTER_S = 2.0, 1.0
GROUP_SIZE = 8
GROUPS_PER_STEP = 32
BLOCK_BYTES = 16_000_000  # the default of record.rollouts.block_mb
BYTES_PER_TOKEN = 68  # of a line, with the figures of the trainer
WORDS = """the of a sum number first then we add two three four seven result so therefore let x be equal to answer is what how many
apples left boxes each with per hour distance total check again step carry over minus times divided capital river Paris function
returns python list error value because maybe wait actually final tokens question given find largest smallest""".split()  # noqa: SIM905 - words

FILTERS = (
    ("reward<0.2 and truncated", "numbers"),
    ("tool=python and failed", "a tool"),
    ("reward.format<1", "a part of the reward"),
    ("step in 100..120 and not finished", "a range of steps"),
    ("group.std=0", "a figure of the group"),
    ("staleness>=2 or clipped_share>10%", "two of them"),
    ("columns.answer=9", "a column of the data set"),
    ('"zyzzyva"', "text search, rare word"),
    ('completion~"so therefore" and reward>0.5', "text search and a number"),
)


def make_store(folder: Path, *, rollouts: int, tokens: int, seed: int = 0, threads: int | None = None) -> None:
    """A store of `rollouts` rollouts (rounded to whole groups) with about `tokens` tokens each. The same arguments give the same
    rollouts. A hundredth has "zyzzyva" in its completion; the last 8 groups are JSON lines."""
    import duckdb

    from grpo_async.store.schema import COLUMNS, SCHEMA
    from grpo_async.store.seal import ROWS_PER_GROUP

    folder.mkdir(parents=True, exist_ok=True)
    groups = max(rollouts // GROUP_SIZE - 8, 1)
    per_block = max(BLOCK_BYTES // (GROUP_SIZE * (BYTES_PER_TOKEN * tokens + 3000)), 1)
    made = ",\n".join(f"({_EXPRESSIONS[column.name]})::{column.type} AS {column.name}" for column in COLUMNS)
    config = {"threads": threads or cores(), "temp_directory": ""}
    with duckdb.connect(config=config) as connection:  # waits: nobody, it is in memory
        connection.execute("CREATE TABLE words AS SELECT ?::VARCHAR[] AS words", (WORDS,))
        connection.execute("CREATE MACRO share(a, b, c) AS (hash(a, b, c) % 1000003) / 1000003.0")
        connection.execute(
            "CREATE MACRO gauss(a, b, c) AS share(a, b, c) + share(a, b, c || '+') + share(a, b, c || '-') - 1.5"
        )
        for first in range(0, groups, per_block):
            last = min(first + per_block, groups) - 1
            source = f"""
                SELECT {made}
                FROM (SELECT seq, i, seq * {GROUP_SIZE} + i AS k, seq // {GROUPS_PER_STEP} + 1 AS step, {seed} AS seed,
                        (hash(seq, {seed}) % 4000)::INTEGER AS prompt, share(seq, {seed}, 'skill') AS skill, words,
                        16 + (share(seq * {GROUP_SIZE} + i, {seed}, 'length') * {2 * tokens - 32})::INTEGER AS n
                      FROM range({first}, {last + 1}) AS s(seq), range({GROUP_SIZE}) AS r(i), words)
                ORDER BY seq, rollout_index"""
            path = folder / f"block-{first:012d}-{last:012d}.parquet"
            connection.execute(
                f"COPY ({source}) TO '{path}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, "
                f"ROW_GROUP_SIZE {ROWS_PER_GROUP}, KV_METADATA {{grpo_async_schema: '{SCHEMA}'}})"
            )
    _append_lines(folder, tokens)


_DONE = "share(k, seed, 'cut') > 0.1"
_REWARD = "if(share(k, seed, 'right') < 0.2 + 0.6 * skill * least(step / 300.0, 1.0), 1.0, 0.0)"
_FORMAT = "if(share(k, seed, 'form') < 0.9, 1.0, 0.5)"
_CALLS = "(hash(k, seed, 'calls') % 4)::INTEGER"
_PROMPT = (
    "array_to_string(list_transform(range(40), lambda j: words[1 + (hash(prompt, j, 'p') % len(words))::INTEGER]), ' ')"
)
_COMPLETION = (
    "array_to_string(list_transform(range(greatest(n // 2, 8)), lambda j: "
    "words[1 + (hash(k, j, seed) % len(words))::INTEGER]), ' ')"
    " || if(hash(k, 'rare') % 100 = 0, ' zyzzyva', '')"
)
_LOGPROBS = "list_transform(range(n), lambda j: -3 * share(k, j, 'lp') * share(k, j, 'lq'))"
_VERSION = "greatest(step - 1 - (hash(k, seed, 'old') % 4)::INTEGER, 0)"
_TURNS = f"""to_json(list_transform(range({_CALLS} + 1), lambda j: {{
    'num_tokens': n // ({_CALLS} + 1), 'finish_reason': 'stop', 'generation_duration_s': 0.8, 'tool_execution_duration_s': 0.1,
    'parse_error': NULL, 'started_at': 1.8e9 + k / 8,
    'tool_calls': if(j < {_CALLS}, [{{'tool_call_id': 'abcdefghi', 'name': if(hash(k, j, 'tool') % 3 = 0, 'search', 'python'),
        'arguments': {{'code': 'print(' || (k + j)::VARCHAR || ')'}}, 'result': (k + j)::VARCHAR,
        'failed': hash(k, j, 'bad') % 12 = 0, 'duration_s': 0.1}}], [])}}))"""
_MESSAGE = "to_json([{{'role': '{0}', 'content': {1}, 'origin': '{2}', 'tool_calls': [], 'name': NULL, 'tool_call_id': NULL}}])"

_EXPRESSIONS = {
    "seq": "seq",
    "group_id": "seq",
    "prompt_id": "seq",
    "step": "step",
    "group_status": "if(hash(seq, 's') % 10 = 0, 'filtered', 'trained')",
    "group_size": str(GROUP_SIZE),
    "rollout_index": "i",
    "prompt_hash": "printf('%016x', (hash(prompt) // 2)::BIGINT)",
    "prompt_text": _PROMPT,
    "prompt_messages": _MESSAGE.format("user", _PROMPT, "prompt"),
    "columns": "to_json({'answer': prompt % 100, 'source': 'synthetic'})",
    "rollout_id": "'g' || seq || '-r' || i",
    "status": f"if({_DONE}, if(hash(k, 'f') % 200 = 0, 'failed', 'finished'), 'truncated')",
    "truncated": f"NOT ({_DONE})",
    "done": "false",
    "error": "if(hash(k, 'f') % 200 = 0, 'the server refused the request', NULL)",
    "reward": f"0.8 * {_REWARD} + 0.2 * {_FORMAT}",
    "advantage": "gauss(k, seed, 'adv')",
    "rewards": f"map {{'exact': {_REWARD}, 'format': {_FORMAT}}}",
    "group_reward_mean": f"avg(0.8 * {_REWARD} + 0.2 * {_FORMAT}) OVER (PARTITION BY seq)",
    "group_reward_std": f"stddev_samp(0.8 * {_REWARD} + 0.2 * {_FORMAT}) OVER (PARTITION BY seq)",
    "num_prompt_tokens": "60",
    "num_tokens": "n",
    "num_completion_tokens": "n",
    "num_turns": f"{_CALLS} + 1",
    "num_tool_calls": _CALLS,
    "num_failed_tool_calls": f"len(list_filter(range({_CALLS}), lambda j: hash(k, j, 'bad') % 12 = 0))",
    "tool_names": f"list_transform(range({_CALLS}), lambda j: if(hash(k, j, 'tool') % 3 = 0, 'search', 'python'))",
    "completion_text": _COMPLETION,
    "messages": _MESSAGE.format("assistant", _COMPLETION, "policy"),
    "reset_messages": "NULL",
    "turns": _TURNS,
    "extra": "to_json({'parsed': prompt % 7})",
    "version_min": _VERSION,
    "version_max": _VERSION,
    "staleness": f"step - 1 - {_VERSION}",
    "logprob_mean": "-0.7 * share(k, seed, 'lpm')",
    "logprob_min": "-3 * share(k, seed, 'lpn')",
    "entropy_mean": "0.2 + 0.5 * share(k, seed, 'ent')",
    "ratio_mean": "1 + 0.02 * gauss(k, seed, 'rm')",
    "ratio_min": "0.6 + 0.3 * share(k, seed, 'ri')",
    "ratio_max": "1.1 + share(k, seed, 'rx')",
    "clipped_share": "0.15 * share(k, seed, 'cl') * share(k, seed, 'cm')",
    "masked_share": "0.05 * share(k, seed, 'ms')",
    "mismatch_mean": "0.02 * share(k, seed, 'mm')",
    "started_at": "1.8e9 + k / 8",
    "total_duration_s": "n / 50.0",
    "generation_duration_s": "n / 60.0",
    "tool_duration_s": "0.1",
    "waiting_duration_s": "2.5",
    "written_at": "1.8e9 + seq",
    "prompt_ids": "list_transform(range(60), lambda j: hash(prompt, j) % 50000)",
    "completion_ids": "list_transform(range(n), lambda j: hash(k, j) % 50000)",
    "mask": "list_transform(range(n), lambda j: 1)",
    "logprobs": _LOGPROBS,
    "versions": f"list_transform(range(n), lambda j: {_VERSION})",
    "trainer_logprobs": _LOGPROBS,
    "proximal_logprobs": _LOGPROBS,
    "weights": "list_transform(range(n), lambda j: 1 + 0.1 * gauss(k, j, 'w'))",
    "entropies": "list_transform(range(n), lambda j: share(k, j, 'e'))",
    "marks": "list_transform(range(n), lambda j: if(hash(k, j, 'm') % 20 = 0, 1 + (hash(k, j) % 2)::INTEGER, 0))",
}


def _append_lines(folder: Path, tokens: int) -> None:
    """The newest groups, by the writer, as a run that still goes has them."""
    from grpo_async.records import (
        FinishReason,
        GroupStatus,
        Origin,
        Prompt,
        RolloutCompletion,
        RolloutGroup,
        RolloutSample,
        RolloutStatus,
        TaggedMessage,
        TurnRecord,
    )
    from grpo_async.store import RolloutStore

    with RolloutStore(folder, seals_at_close=False) as store:
        for number in range(8):
            completions = []
            for index in range(GROUP_SIZE):
                turn = TurnRecord(
                    output_ids=list(range(tokens)),
                    output_logprobs=[-0.5] * tokens,
                    policy_versions=[400] * tokens,
                    finish_reason=FinishReason.STOP,
                    messages=[TaggedMessage(role="assistant", content=" ".join(WORDS), origin=Origin.POLICY)],
                )
                completions.append(
                    RolloutCompletion(
                        rollout_id=f"new{number}-r{index}",
                        prompt_ids=[1, 2, 3],
                        turns=[turn],
                        status=RolloutStatus.FINISHED,
                    )
                )
            message = TaggedMessage(role="user", content="what is the newest number?", origin=Origin.PROMPT)
            prompt = Prompt(prompt_id=10**6 + number, messages=[message], columns={"answer": 9})
            samples = [
                RolloutSample(
                    group_id=10**6 + number,
                    rollout_id=each.rollout_id,
                    token_ids=[1, 2, 3, *each.completion_ids],
                    loss_mask=[0, 0, 0, *each.completion_mask],
                    sampler_logprobs=[0.0, 0.0, 0.0, *each.logprobs],
                    policy_versions=[-1, -1, -1, *each.versions],
                    advantage=0.5,
                    reward=1.0,
                    rewards={"exact": 1.0, "format": 1.0},
                    truncated=False,
                )
                for each in completions
            ]
            group = RolloutGroup(group_id=10**6 + number, prompt=prompt, completions=completions)
            store.append(group, samples, GroupStatus.TRAINED, 400)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def first_table(folder: Path, threads: int | None) -> dict[str, Any]:
    """What a new process does until the first table can be drawn."""
    from grpo_async.store.table import RolloutTable

    with RolloutTable.open(folder, threads=threads) as table:
        counts = table.count()
        groups = table.group_page(limit=40)
        rollouts = table.page(limit=40)
        return {"rollouts": counts.rollouts, "groups": len(groups), "page": len(rollouts), "notes": table.notes}


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cold(folder: Path, repeats: int, threads: int | None, *, dropped: bool) -> tuple[list[float], str]:
    """Seconds of each repeat, and the CPU time, which another load of the machine does not change."""
    command = [sys.executable, __file__, "--first-table", str(folder), "--threads", str(threads or 0)]
    taken = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(repeats):
        if dropped:
            drop_from_cache(folder)
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        taken.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / repeats
    return taken, f"{cpu:.2f} s of CPU time"


def timed(ask: Callable[[], Any], repeats: int) -> tuple[float, list[float], Any]:
    """Seconds of the first time, of the repeats after it, and what was answered."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        answer = ask()
        taken.append(time.perf_counter() - start)
    return taken[0], taken[1:], answer


def measure(folder: Path, repeats: int, threads: int | None) -> list[dict[str, Any]]:
    from grpo_async.store.query import parse_query
    from grpo_async.store.table import RolloutTable

    found: list[dict[str, Any]] = []

    def note(
        kind: str, name: str, first: float | None, taken: Sequence[float], answer: str = "", target: float | None = None
    ) -> None:
        row = {
            "kind": kind, "what": name, "first_s": first, "median_s": statistics.median(taken), "lowest_s": min(taken),
            "highest_s": max(taken), "repeats": len(taken), "target_s": target, "answer": answer,
        }  # fmt: skip
        found.append(row)
        print(_line(row), flush=True)

    for dropped in (False, True):
        taken, cpu = cold(folder, repeats, threads, dropped=dropped)
        name = f"first table, new process, files {'not ' if dropped else ''}cached"
        note("cold", name, None, taken, cpu, FIRST_TABLE_S)
    with RolloutTable.open(folder, threads=threads) as table:
        everything = parse_query("")
        for text, meaning in FILTERS:
            query = parse_query(text)

            def filtered(query: Any = query) -> tuple[int, int]:
                return table.count(query).rollouts, len(table.page(query, limit=40))

            first, taken, (count, _) = timed(filtered, repeats)
            note("filter", f"{text}  ({meaning})", first, taken, f"{count} rollouts", FILTER_S)
        newest = table.page(limit=1)[0]
        some = table.page(sort="seq", limit=1)[0]
        for name, ask in (
            ("page of groups, newest", lambda: table.group_page(limit=40)),
            ("page of groups by group.std", lambda: table.group_page(sort="-std", limit=40)),
            ("page of rollouts by length", lambda: table.page(sort="-length", limit=40)),
            (
                "page of rollouts by reward.format, far down",
                lambda: table.page(sort="reward.format", offset=50_000, limit=40),
            ),
            ("histogram of reward", lambda: table.histogram("reward", everything)),
            ("figures of every step", lambda: table.by_step(everything)),
            ("best, worst, most improved", lambda: table.extremes(everything, 10)),
            ("the same prompt over all steps", lambda: table.same_prompt(some.prompt_hash)),
            ("one rollout with its tokens, sealed", lambda: table.rollout(some.rollout_id)),
            ("one rollout with its tokens, open block", lambda: table.rollout(newest.rollout_id)),
            ("refresh without news", table.refresh),
        ):
            first, taken, answer = timed(ask, repeats)
            note("other", name, first, taken, f"{len(answer)} rows" if isinstance(answer, list) else "", None)
    return found


def _line(row: dict[str, Any]) -> str:
    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{1000 * seconds:.0f}"

    worst = max(row["highest_s"], row["first_s"] or 0.0)
    verdict = "" if row["target_s"] is None else ("ok" if worst < row["target_s"] else f"over {row['target_s']:g} s")
    columns = (ms(row["first_s"]), ms(row["median_s"]), ms(row["lowest_s"]), ms(row["highest_s"]))
    numbers = "".join(f"{column:>9}" for column in columns)
    return f"{row['kind']:<7}{row['what']:<66}{numbers}  {verdict:<9}{row['answer']}"


def machine() -> dict[str, Any]:
    import duckdb

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model, "cores": cores(), "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_before": os.getloadavg()[0], "python": platform.python_version(), "duckdb": duckdb.__version__,
        "system": platform.platform(),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256, help="mean length of a rollout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of the queries; 0 = one per core")
    parser.add_argument("--folder", type=Path, help="keep the store here, and use it again")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--first-table", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(arguments)
    threads = arguments.threads or None
    if arguments.first_table is not None:
        print(json.dumps(first_table(arguments.first_table, threads)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-rollouts-") as scratch:
        folder = arguments.folder or Path(scratch) / "rollouts"
        if not any(folder.glob("block-*")):
            start = time.perf_counter()
            make_store(folder, rollouts=arguments.rollouts, tokens=arguments.tokens, seed=arguments.seed)
            print(f"store made in {time.perf_counter() - start:.0f} s")
        blocks = [path.stat().st_size for path in folder.glob("block-*")]
        about = {
            **machine(),
            "threads": threads or cores(),
            "blocks": len(blocks),
            "megabytes": round(sum(blocks) / 1e6),
        }
        print(", ".join(f"{name}: {value}" for name, value in about.items()))
        print(f"{'':7}{'milliseconds':<66}{'first':>9}{'median':>9}{'lowest':>9}{'highest':>9}")
        rows = measure(folder, arguments.repeats, threads)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "figures": rows}, indent=2) + "\n", encoding="utf-8")
    missed = [row for row in rows if row["target_s"] is not None and row["median_s"] >= row["target_s"]]
    for row in missed:
        print(f"missed: {row['what']}: median {row['median_s']:.2f} s, target {row['target_s']:g} s", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
