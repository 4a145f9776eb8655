"""What the page asks for: one function per view, which answers with what becomes JSON.

Every answer over rollouts takes `run` (a name of /api/runs; left out: the first), `q` (a query) and `until` (rows up to this seq
only). A page that shows rows names its `until`, so what a run writes meanwhile moves nothing; `status` says how much there is by
now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
from pydantic import BaseModel, ConfigDict, Field

from grpo_async.errors import RunError
from grpo_async.records import root_id
from grpo_async.store.query import EVERYTHING, Query, parse_query
from grpo_async.store.rows import GroupRow, RolloutRow
from grpo_async.store.schema import TOKEN_COLUMNS
from grpo_async.utils.files import read_object
from grpo_async.utils.run_state import state_of
from grpo_async.utils.safe_text import visible
from grpo_async.viewer.format import call_tree, flag_names, prompt_of
from grpo_async.viewer.runs import modified_at
from grpo_async.viewer.token_text import TokenTexts
from grpo_async.viewer.web import overview
from grpo_async.viewer.web.plots import MAX_SERIES
from grpo_async.viewer.web.sources import NotFoundError, Source


class RequestParameters(BaseModel):
    """The parameters of all views; each view reads those that it knows."""

    model_config = ConfigDict(frozen=True)

    run: str = ""
    q: str = ""
    until: int = Field(-1, ge=-1, le=2**53)  # -1: no bound
    sort: str = Field("-seq", max_length=400)
    offset: int = Field(0, ge=0, le=2**53)
    limit: int = Field(100, ge=0, le=500)
    count: bool = False
    id: str = ""  # of a group or rollout; `seq` of the group finds one of two with the same id
    seq: int = Field(-1, ge=-1, le=2**53)
    compare_with: str = Field("", max_length=4000)  # names of further runs, with commas between; %2C within


# -- views


def _status(source: Source, parameters: RequestParameters) -> dict[str, Any]:
    """How much there is by now, and where the run stands."""
    table = source.table()
    status = read_object(source.run.status, [])
    found = state_of(status, read_object(source.run.summary, []))
    return {
        "until": table.newest_seq,
        "counts": table.count(EVERYTHING),
        "notes": table.notes,
        "metrics": len(source.metrics()),
        "num_evaluations": len(source.run.evaluation_steps()),
        "status": {
            **{name: status.get(name) for name in ("phase", "step", "max_steps", "eta_s")},
            "state": found.state,
            "why": found.why,
        },
    }


def _page(source: Source, parameters: RequestParameters, *, of_groups: bool) -> dict[str, Any]:
    """Rows `offset` to `offset + limit`, and `until`: as asked for, else the newest seq (-1: no group yet), to which the rows are
    bound. With `count=1` also how many there are."""
    table = source.table()
    until = parameters.until if parameters.until >= 0 else table.newest_seq
    query = Query(f"{parse_query(parameters.q).sql} and seq <= {until}")
    read: Callable[..., Sequence[object]] = table.group_page if of_groups else table.page
    rows = read(query, sort=parameters.sort, offset=parameters.offset, limit=parameters.limit)
    counts = {"counts": table.count(query)} if parameters.count else {}
    return {"rows": rows, "offset": parameters.offset, "until": until, **counts}


def _group(source: Source, parameters: RequestParameters) -> dict[str, Any]:
    """One group with the texts of its rollouts, without tokens."""
    table = source.table()
    try:
        if parameters.seq >= 0:
            group = table.group_at(parameters.seq)
        elif parameters.id.removeprefix("-").isdecimal() and len(parameters.id) < 18:
            group = table.group(int(parameters.id))
        else:
            raise NotFoundError(f"id: '{parameters.id[:40]}' is not the number of a group")
    except RunError as error:
        raise NotFoundError(str(error)) from error
    return {
        "summary": table.group_page(_of(group))[0],
        "group": _without_rollouts(group),
        "prompt": prompt_of(group),
        "rollouts": [_without_tokens(rollout) for rollout in group.rollouts],
        "summaries": table.page(_of(group), sort="index", limit=len(group.rollouts)),
    }


def _of(group: GroupRow) -> Query:
    return Query(f"seq = {group.seq}")


def _find_rollout(source: Source, parameters: RequestParameters) -> tuple[GroupRow, RolloutRow]:
    table, wanted = source.table(), parameters.id
    try:
        if parameters.seq >= 0:
            group = table.group_at(parameters.seq)
        else:
            group, _ = table.rollout(wanted)
    except RunError as error:
        raise NotFoundError(str(error)) from error
    rollout = group.path(wanted)
    if rollout is None:
        raise NotFoundError(f"the group with seq {group.seq} has no rollout {wanted}")
    return group, rollout


def _rollout(source: Source, parameters: RequestParameters) -> dict[str, Any]:
    """One rollout, or a branch of one, with all its tokens; `tree` has the calls of all branches, where there are any."""
    group, rollout = _find_rollout(source, parameters)
    root = group.path(root_id(rollout.rollout_id)) or rollout
    return {
        "group": _without_rollouts(group),
        "prompt": prompt_of(group, rollout),
        "rollout": _without_tokens(rollout),
        "summaries": source.table().page(_of(group), sort="index", limit=len(group.rollouts)),
        "root": root.rollout_id,
        "tree": list(call_tree(group, root)) if root.branches else [],
        "tokens": token_view(rollout, source.texts()),
    }


def _together(source: Source, parameters: RequestParameters) -> list[Source]:
    """The run, and the runs that it is compared with, as many as can be told apart."""
    names = dict.fromkeys(unquote(name) for name in parameters.compare_with.split(",") if name)
    return [source, *(source.find(name) for name in names if name != source.name)][:MAX_SERIES]


VIEWS: Mapping[str, Callable[[Source, RequestParameters], object]] = {
    "status": _status,
    "groups": lambda source, given: _page(source, given, of_groups=True),
    "rollouts": lambda source, given: _page(source, given, of_groups=False),
    "group": _group,
    "rollout": _rollout,
    "card": lambda source, _: overview.card(source),
    "run": lambda source, _: overview.page(source),
    "curves": lambda source, given: overview.curves(_together(source, given)),
    "config": lambda source, given: overview.settings(_together(source, given)),
}


# -- rows and tokens


def _without_rollouts(group: GroupRow) -> dict[str, Any]:
    """Without its prompt, too, which is asked for by `prompt_of`."""
    return {name: getattr(group, name) for name in group.__dataclass_fields__ if name not in ("rollouts", "messages")}


def _without_tokens(rollout: RolloutRow) -> dict[str, Any]:
    left_out = {*TOKEN_COLUMNS, "branches", "reset_messages"}
    return {name: getattr(rollout, name) for name in rollout.__dataclass_fields__ if name not in left_out}


def token_view(rollout: RolloutRow, texts: TokenTexts | str) -> dict[str, Any]:
    """Lists with one entry per completion token.

    `texts` is None where there is no tokenizer, and `texts_missing` says why. `flag_names` has the names of each value that occurs
    in `token_flags`.
    """

    def texts_of(ids: Sequence[int]) -> list[str] | None:
        return [visible(texts.of(each)) for each in ids] if isinstance(texts, TokenTexts) else None

    return {
        **{name: getattr(rollout, name) for name in TOKEN_COLUMNS},
        "texts": texts_of(rollout.completion_ids),
        "texts_missing": texts if isinstance(texts, str) else None,
        "prompt_texts": texts_of(rollout.prompt_ids),
        "flag_names": {value: flag_names(value) for value in set(rollout.token_flags or ()) - {None}},
    }


def run_entry(source: Source) -> dict[str, Any]:
    """A run in the list of all, with its evaluations, and the run and the step that it was forked from, if it was."""
    evaluations = [{"name": f"{source.name}@{step}", "step": step} for step in source.run.evaluation_steps()]
    origin = read_object(source.run.fork, [])
    fork = {"parent": Path(str(origin["parent"])).name, "step": origin.get("step")} if "parent" in origin else None
    return {"name": source.name, "evaluations": evaluations, "fork": fork, "updated_at": modified_at(source.run)}


def to_json(content: Any) -> bytes:
    """Dataclasses, enums and numpy arrays included; NaN and infinities become null."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(content, default=dict, option=options)  # a row is a mapping, and no dict
