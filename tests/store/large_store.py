"""A rollout store of any size from a seed: blocks as a run leaves them, by DuckDB, and the newest groups by the real writer."""

from __future__ import annotations

import os
from pathlib import Path

GROUP_SIZE = 8
GROUPS_PER_STEP = 32
BLOCK_BYTES = 16_000_000  # the default of record.rollouts.block_mb
BYTES_PER_TOKEN = 68  # of a line, with the figures of the trainer
WORDS = """the of a sum number first then we add two three four seven result so therefore let x be equal to answer is what how many
apples left boxes each with per hour distance total check again step carry over minus times divided capital river Paris function
returns python list error value because maybe wait actually final tokens question given find largest smallest""".split()  # noqa: SIM905 - words


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    config: dict[str, str | bool | int | float | list[str]] = {"threads": threads or cores(), "temp_directory": ""}
    with duckdb.connect(config=config) as connection:
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
