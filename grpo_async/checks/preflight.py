"""The preflight: after the first push and before the first rollout, does everything fit together?

    context -> scores of the trainer (a collective, on the calling thread) -> each check, alone and with a time limit
            -> preflight.json, list of checks

Reads only: nothing of the run is changed, no rollout is made. Parts: `preflight_servers` (weights, log-probabilities,
generation, dtypes), `preflight_chat` (template, tokenizer), `preflight_machine` (addresses, memory, disk).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from grpo_async.checks import preflight_chat, preflight_machine, preflight_servers
from grpo_async.checks.preflight_context import PreflightContext
from grpo_async.checks.report import Check, as_json, failed, print_checks, run_check, worst_status
from grpo_async.errors import GrpoAsyncError
from grpo_async.rundir import write_atomically
from grpo_async.weights.verify import coarsest_dtype

__all__ = ["Check", "PreflightContext", "print_checks", "run_preflight", "worst_status"]


_LOCAL_LIMIT_S = 30.0  # checks that ask no server; they take milliseconds


_Part = Callable[[PreflightContext], Check | Sequence[Check]]

# name -> check, and whether it asks servers
_CHECKS: tuple[tuple[str, _Part, bool], ...] = (
    ("logprobs", preflight_servers.check_logprobs, True),
    ("weights", preflight_servers.check_weights, False),
    ("generation", preflight_servers.check_generation, True),
    ("tokenizer", preflight_chat.check_tokenizer, True),
    ("chat template", preflight_chat.check_chat, False),
    ("dtypes", preflight_servers.check_dtypes, False),
    ("context length", preflight_servers.check_context_length, False),
    ("seeds", preflight_servers.check_seeds, False),
    ("addresses", preflight_machine.check_addresses, True),
    ("memory", preflight_machine.check_memory, False),
    ("disk", preflight_machine.check_disk, False),
)


def run_preflight(context: PreflightContext) -> list[Check]:
    """Run every check, write them to the run directory, and return them in the order of the table.

    A check that breaks or takes too long is a failed check; the others go on.
    """
    config = context.config
    checks: list[Check] = []
    try:
        rounding = coarsest_dtype(config, [server.info.dtype for server in context.servers if server.info])
        context = replace(context, trainer_scores=context.score_on_trainer(context.probes, rounding))
    except GrpoAsyncError as error:
        checks.append(failed("logprobs", f"the trainer could not score the probes: {error}"))
    for name, check, asks_servers in _CHECKS:
        limit_s = config.weights.timeout_s if asks_servers else _LOCAL_LIMIT_S
        setting = "weights.timeout_s" if asks_servers else None
        checks += run_check(name, partial(check, context), limit_s=limit_s, setting=setting)
    write_atomically(context.rundir.preflight, as_json(checks))
    return checks
