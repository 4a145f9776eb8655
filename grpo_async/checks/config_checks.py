"""What can be known to be wrong before anything starts: files, folders and functions that the configuration names.

Reads small files whole and a few rows of others, and imports rewards, tools and environments, as the trainer will. Every
problem goes into one error.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.chat.build import load_renderer
from grpo_async.chat.errors import ChatError
from grpo_async.checks.model_files import model_problem, text_config
from grpo_async.checks.surroundings import check_devices, check_packages
from grpo_async.config import ExperimentConfig
from grpo_async.config.data_sections import CsvSource, EnvironmentSource, HubSource, JsonlSource, ParquetSource, Source
from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.inference.surface import token_from_environment
from grpo_async.processes.addresses import weights_host
from grpo_async.rewards import RewardFunction, load_rewards
from grpo_async.rewards.call import OFFERED
from grpo_async.rollout.participants import Participants, load_participants, startup_notes, token_counter
from grpo_async.scoring.user_advantage import UserAdvantage
from grpo_async.servers.embedded.families import check_embedded_family
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.training.families import check_family, check_tokenizer_size, other_vocabulary
from grpo_async.user_code.references import resolve

if TYPE_CHECKING:
    from grpo_async.data import LoadedData, Rows

_NUM_ROWS = 3
_NUM_MEASURED = 200
_SMALL_BYTES = 32 << 20  # about a second
_HUB_NAME = re.compile(r"^\w[\w.-]*(/[\w.-]+)?$")  # ./x and ../x are paths


def check_inputs(
    config: ExperimentConfig, *, engine: EngineChoice, node_rank: int = 0, trains: bool = True, deep: bool = False
) -> list[str]:
    """Look at everything that the configuration names; returns notes (what could not be checked).

    Args:
        engine: what serves.
        node_rank: of this machine; addresses are those of node 0.
        trains: false where it is only evaluated: the trainer's needs are no one's.
        deep: load the tokenizer, too (seconds), and measure prompts with it, as the trainer does when it runs.

    Raises:
        ConfigError: all problems, one a line, each with its dotted path.
    """
    problems: list[str] = []
    notes: list[str] = []
    _check_model(config, engine, problems, notes, trains=trains)
    has_model = not problems
    problems.extend(check_packages(config, trains=trains))
    problems.extend(check_devices(config, engine, trains=trains))
    train_rows, held_out_rows = _check_data(config, problems, notes)
    participants = _check_participants(
        config, {"data.train": train_rows, "evaluation.data": held_out_rows}, problems, notes
    )
    if participants is not None and has_model:
        _check_template(config, participants, problems, notes)
        if deep:
            _check_tokens(config, participants, train_rows, problems, notes)
    _check_evaluation_columns(config, held_out_rows or train_rows, problems)
    _check_rewards(config, participants, train_rows, problems, notes)
    _check_own_functions(config, problems)
    if participants is not None:
        asyncio.run(participants.aclose())
    _check_tls(config, problems)
    if node_rank == 0:
        _check_weights_host(config, problems, notes)
    if config.inference.urls and token_from_environment() is None:
        notes.append(
            "inference.urls is set and $GRPO_ASYNC_TOKEN is not: the server must be one that asks for no token"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return notes


def _check_weights_host(config: ExperimentConfig, problems: list[str], notes: list[str]) -> None:
    try:
        host = weights_host(config)
    except ConfigError as error:  # the server may still be about to come
        notes.append(str(error))
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            problems.append(
                f"weights.host: {host} cannot be bound on this machine ({error}); it is the trainer's own address"
            )


def _check_tls(config: ExperimentConfig, problems: list[str]) -> None:
    tls = config.inference.tls
    if tls is None:
        return
    for name in ("certificate", "key", "authority"):
        path: Path | None = getattr(tls, name)
        if path is not None and not os.access(path, os.R_OK):
            problems.append(f"inference.tls.{name}: {path} cannot be read (working directory: {Path.cwd()})")


def _check_model(
    config: ExperimentConfig, engine: EngineChoice, problems: list[str], notes: list[str], *, trains: bool
) -> None:
    folder = _check_model_folder("model.path", config.model.path, problems, notes)
    if folder is not None:
        _check_family(config, folder, engine, problems, trains=trains)
    template = config.model.chat_template
    if template is not None and not template.is_file():
        problems.append(f"model.chat_template: {template} is no file (working directory: {Path.cwd()})")
    if trains and config.loss.reference != "initial":
        reference = _check_model_folder("loss.reference", config.loss.reference, problems, notes)
        if folder is not None and reference is not None:
            ours, theirs = (text_config(path).get("vocab_size") for path in (folder, reference))
            if isinstance(ours, int) and isinstance(theirs, int) and ours != theirs:
                problems.append(other_vocabulary(config.loss.reference, ours=ours, theirs=theirs))


def _check_model_folder(key: str, path: str, problems: list[str], notes: list[str]) -> Path | None:
    """The folder; None where it is broken (a problem) or a name on a hub (a note)."""
    folder = Path(path)
    if _HUB_NAME.match(path) and not Path(folder.parts[0]).exists():
        notes.append(f"{key}: {path} is no local folder; it is taken as a hub name and not checked here")
        return None
    problem = model_problem(path)
    if problem is not None:
        problems.append(f"{key}: {problem}")
        return None
    return folder


def _check_family(
    config: ExperimentConfig, folder: Path, engine: EngineChoice, problems: list[str], *, trains: bool
) -> None:
    """Whether the trainer, and the embedded engine where it serves, know the model's family."""
    text, longest = text_config(folder), config.inference.max_model_len
    try:
        if trains:
            check_family(text, config.model.path, longest)
        if engine.engine == "embedded":
            check_embedded_family(text, longest)
    except ConfigError as error:
        problems.append(str(error))


def _check_source(key: str, source: Source, problems: list[str], notes: list[str]) -> Rows | None:
    """Read the first rows; None where they could not be read."""
    if isinstance(source, HubSource):
        notes.append(f"{key}: the dataset {source.name} is not checked here")
        return None
    from grpo_async.data import first_rows

    try:
        return first_rows(source, _NUM_ROWS)
    except GrpoAsyncError as error:
        problems.append(f"{key}: {error}")
        return None


def _check_data(config: ExperimentConfig, problems: list[str], notes: list[str]) -> tuple[Rows | None, Rows | None]:
    """Rows to train on and rows of evaluation.data: all of them where that takes a moment only, else the first few."""
    evaluation = config.evaluation
    sources = {"data.train": config.data.train}
    if evaluation is not None and evaluation.data is not None:
        sources["evaluation.data"] = evaluation.data
    train = config.data.train
    if all(_is_small(source) for source in sources.values()):
        rows = _load_all(config, problems, notes)
        found: tuple[Rows | None, Rows | None] = (rows.train, rows.evaluation) if rows else (None, None)
    else:
        some = {key: _check_source(key, source, problems, notes) for key, source in sources.items()}
        found = some["data.train"], some.get("evaluation.data")
    if (
        found[0]
        and isinstance(found[0][0]["prompt"], str)
        and train.system_prompt is None
        and not (config.tools or config.environments)
    ):
        notes.append(
            "data.train: the prompts are plain text, so they reach the model without the chat template and completions reach "
            "the rewards as text; with data.train.system_prompt, or with messages as prompts, the template is used"
        )
    return found


def _is_small(source: Source) -> bool:
    if isinstance(source, EnvironmentSource):
        return True
    if not isinstance(source, JsonlSource | CsvSource | ParquetSource):
        return False  # a generator, a package or a hub may take its time
    try:
        return source.path.is_file() and source.path.stat().st_size <= _SMALL_BYTES
    except OSError:
        return False  # reading it says what is wrong


def _load_all(config: ExperimentConfig, problems: list[str], notes: list[str]) -> LoadedData | None:
    """Everything but the filter by tokens, which needs the tokenizer."""
    from grpo_async.data import load_data

    data = config.data.model_copy(update={"train": config.data.train.model_copy(update={"max_prompt_tokens": None})})
    evaluation = config.evaluation
    if evaluation is not None and evaluation.data is not None:
        source = evaluation.data.model_copy(update={"max_prompt_tokens": None})
        evaluation = evaluation.model_copy(update={"data": source})
    try:
        loaded = load_data(data, evaluation)
    except GrpoAsyncError as error:
        problems.append(str(error))
        return None
    notes.extend(loaded.notes)
    return loaded


def _check_evaluation_columns(config: ExperimentConfig, rows: Rows | None, problems: list[str]) -> None:
    for name in ("baseline_column", "group_by"):
        column = getattr(config.evaluation, name, None)
        if rows and column is not None and column not in rows[0]:
            problems.append(f"evaluation.{name}: {column} is not one of the columns {sorted(rows[0])}")


def _check_participants(
    config: ExperimentConfig, rows: Mapping[str, Rows | None], problems: list[str], notes: list[str]
) -> Participants | None:
    """Tools, environments and the rollout function, against the rows of each source; None when one cannot be used."""
    try:
        participants = load_participants(config)
    except ConfigError as error:
        problems.append(str(error))
        return None
    try:
        notes.extend(participants.notes)
    except ConfigError as error:
        problems.append(str(error))
    if config.rollout_function is not None:
        notes.append(
            "rollout_function makes whole rollouts: rollout.max_in_flight, max_turns, max_turn_tokens, rollout_timeout_s and "
            "tool_calling are not used"
        )
    if participants.environments is not None:
        for key, some in rows.items():
            problems.extend(f"{key}, {problem}" for problem in participants.environments.check_rows(some or ()))
    return participants


def _check_template(
    config: ExperimentConfig, participants: Participants, problems: list[str], notes: list[str]
) -> None:
    """Really render the tools, which takes the tokenizer: only where there are tools."""
    if not participants.tool_sets:
        return
    try:
        renderer = load_renderer(config)
        for schemas in participants.tool_sets:
            notes.extend(note for note in renderer.check_tools(schemas) if note not in notes)
    except ConfigError as error:
        problems.append(str(error))


def _check_tokens(
    config: ExperimentConfig, participants: Participants, rows: Rows | None, problems: list[str], notes: list[str]
) -> None:
    """With the tokenizer: its ids against the model's, and what prompts leave of inference.max_model_len."""
    from grpo_async.data import make_prompt

    try:
        renderer = load_renderer(config)
        folder = Path(config.model.path)
        if folder.is_dir():
            check_tokenizer_size(len(renderer.tokenizer), text_config(folder).get("vocab_size"))
        if not rows or config.rollout_function is not None:
            return
        count, longest = token_counter(renderer, participants), config.inference.max_model_len
        train = config.data.train
        some = rows.take(range(0, len(rows), math.ceil(len(rows) / _NUM_MEASURED)))
        lengths = [count(make_prompt(row, 0, train.system_prompt)) for row in some]
    except (ConfigError, ChatError) as error:
        problems.append(str(error))
        return
    if train.max_prompt_tokens is not None:
        lengths = [length for length in lengths if length <= train.max_prompt_tokens]
        if not lengths:
            problems.append(f"data.train.max_prompt_tokens: {train.max_prompt_tokens} leaves no prompt; raise it")
    too_long = sum(length >= longest for length in lengths)
    text = (
        f"data.train: {too_long} of {len(lengths)} prompts measured have {longest} tokens or more, and inference.max_model_len "
        f"is {longest}: nothing can be generated for them; raise it, or drop them with data.train.max_prompt_tokens"
    )
    if too_long:
        (problems if too_long == len(lengths) else notes).append(text)


def _check_rewards(
    config: ExperimentConfig,
    participants: Participants | None,
    rows: Rows | None,
    problems: list[str],
    notes: list[str],
) -> None:
    try:
        rewards = load_rewards(config.rewards)
    except ConfigError as error:
        problems.append(str(error))
        return
    if rows:
        problems.extend(reward_problems(config, rewards, rows[0]))
    environments = participants.environments if participants else None
    if not rewards and environments is not None and not environments.all_have_rewards:
        problems.append("rewards: there are none, and not every environment has a `get_reward`; name at least one")
    if environments is not None:
        both = sorted(environments.reward_weights.keys() & {reward.name for reward in rewards})
        problems.extend(
            f"rewards: `{name}` is also the reward of an environment; give the function a `name`" for name in both
        )
    names = {reward.name for reward in rewards} | (environments.reward_weights.keys() if environments else set())
    wanted = config.checkpoint.best_metric.split("/")
    if wanted[0] == "rewards" and (len(wanted) == 1 or wanted[1] not in names):
        problems.append(
            f"checkpoint.best_metric: {config.checkpoint.best_metric}: there is no such reward; there are {sorted(names)}"
        )
    for section, reward in zip(config.rewards, rewards, strict=True):
        try:
            found = startup_notes(resolve(section.function), section.arguments)
            notes.extend(note for note in found if note not in notes)
        except ConfigError as error:
            problems.append(f"reward {reward.name!r}: {error}")
        reward.close()


def _check_own_functions(config: ExperimentConfig, problems: list[str]) -> None:
    try:
        if config.advantage.type == "custom":
            UserAdvantage(config.advantage)
    except ConfigError as error:
        problems.append(str(error))
    try:
        if config.loss.type == "custom":
            from grpo_async.training.loss import UserLoss  # here: it imports torch

            UserLoss(config.loss)
    except ConfigError as error:
        problems.append(str(error))


def reward_problems(config: ExperimentConfig, rewards: Sequence[RewardFunction], columns: Collection[str]) -> list[str]:
    """One sentence for each reward function that lacks something it needs, and would fail every group, and for each column that no
    function would get."""
    if config.rollout_function is not None:
        return []  # it may add columns, which nobody knows before
    given = sorted(set(columns) - {"prompt"})
    taken = [
        f"data.train: the column `{name}` would hide what rewards get under this name; leave it out with drop: [{name}], or rename "
        f"it with columns: {{{name}: gold_{name}}}"
        for name in sorted(OFFERED & set(given))
    ]
    return taken + [
        f"reward {reward.name!r} {problem}"
        for reward in rewards
        if (problem := reward.lack(given, has_environments=bool(config.environments))) is not None
    ]
