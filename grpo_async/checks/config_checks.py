"""What can be known to be wrong before anything starts: files, functions, packages and devices that the configuration names.

Reads small files whole and a few rows of others, and imports rewards, tools and environments, as the trainer will. Every
problem goes into one error. Starts and writes nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import math
import netrc
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from grpo_async.chat.renderer import load_renderer
from grpo_async.chat.turn import ChatError
from grpo_async.checks.disk import check_run_place, disk_room
from grpo_async.checks.memory import ModelSize
from grpo_async.checks.model_files import model_problem, text_config
from grpo_async.config import ExperimentConfig
from grpo_async.config.data_sections import CsvSource, EnvironmentSource, HubSource, JsonlSource, ParquetSource, Source
from grpo_async.errors import ConfigError, GrpoAsyncError, InferenceError
from grpo_async.inference.control import ServerControl
from grpo_async.inference.fleet import why_hopeless
from grpo_async.inference.token import token_from_environment
from grpo_async.processes import machine
from grpo_async.processes.addresses import weights_host
from grpo_async.records import Prompt
from grpo_async.rewards import RewardFunction, load_rewards
from grpo_async.rewards.call import OFFERED
from grpo_async.rollout.components import Components, load_components, startup_notes, token_counter
from grpo_async.run_directory import RunDir
from grpo_async.scoring.compare import UserAdvantage
from grpo_async.servers.embedded.families import check_embedded_family
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.training.families import check_family, check_tokenizer_size, other_vocabulary
from grpo_async.user_code.references import resolve
from grpo_async.utils.extras import needs
from grpo_async.utils.network import binding_error

if TYPE_CHECKING:
    from grpo_async.data import Rows

_NUM_ROWS = 3
_NUM_MEASURED = 200
_SMALL_BYTES = 32 << 20  # about a second
_ASK_S = 3.0  # that a server has for an answer
_HUB_NAME = re.compile(r"^\w[\w.-]*(/[\w.-]+)?$")  # ./x and ../x are paths
_TRACKERS = {"tensorboard": "tensorboardX", "prometheus": "prometheus_client"}
"""Type -> module, where they differ."""


def check_inputs(
    config: ExperimentConfig, *, engine: EngineChoice, node_rank: int = 0, trains: bool = True, deep: bool = False
) -> list[str]:
    """Look at everything that the configuration names; returns notes (what could not be checked).

    Args:
        engine: what serves.
        node_rank: of this machine; addresses are those of node 0.
        trains: false where it is only evaluated: the trainer's needs are no one's.
        deep: load the tokenizer in any case (seconds), and measure prompts with it; else only where one may be too long.

    Raises:
        ConfigError: all problems, one a line, each with its dotted path.
    """
    found = _Findings(config=config, engine=engine, trains=trains)
    found.check_model()
    has_model = not found.problems
    found.check_packages()
    found.check_devices()
    train_rows, held_out_rows = found.check_data()
    components = found.check_components(train_rows, held_out_rows)
    if components is not None and has_model:
        prompts = found.measured_prompts(train_rows, held_out_rows)
        deep = deep or any(map(found.may_be_too_long, prompts.values()))
        if components.tool_sets or deep:
            found.check_text(components, prompts, deep=deep)
    if has_model and trains and deep:
        found.check_room()
    for name in ("baseline_column", "group_by"):
        column, rows = getattr(config.evaluation, name, None), held_out_rows or train_rows
        if rows and column is not None and column not in rows[0]:
            found.problems.append(f"evaluation.{name}: {column} is not one of the columns {sorted(rows[0])}")
    found.check_rewards(components, train_rows, held_out_rows)
    found.check_own_functions()
    if components is not None:
        asyncio.run(components.aclose())
    found.check_connections(node_rank)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return found.notes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """What the checks of one configuration have found so far."""

    config: ExperimentConfig
    engine: EngineChoice
    trains: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def collecting(self, prefix: str = "") -> Iterator[None]:
        """An error that is raised inside is a problem like the others."""
        try:
            yield
        except GrpoAsyncError as error:
            self.problems.append(f"{prefix}{error}")

    @property
    def sources(self) -> dict[str, Source]:
        """By the path of each."""
        evaluation = self.config.evaluation
        of_evaluation = {} if evaluation is None or evaluation.data is None else {"evaluation.data": evaluation.data}
        return {"data.train": self.config.data.train, **of_evaluation}

    def note(self, texts: Sequence[str]) -> None:
        self.notes.extend(text for text in texts if text not in self.notes)

    # ---- model ----

    def check_model(self) -> None:
        config = self.config
        folder = self._check_folder("model.path", config.model.path)
        if (described := folder or _downloaded(config.model.path)) is not None:
            with self.collecting():
                text, longest = text_config(described), config.inference.max_model_len
                if self.trains:
                    check_family(text, config.model.path, longest)
                if self.engine.engine == "embedded":
                    check_embedded_family(text, longest)
        if folder is not None and config.model.revision is not None:
            self.problems.append(
                f"model.revision: {config.model.revision} is one of a hub name, and model.path: {folder} is a folder; leave it out"
            )
        for name, section in (("rollout", config.rollout), ("evaluation", config.evaluation)):
            if self.engine.engine == "embedded" and section is not None and section.structured_outputs is not None:
                self.problems.append(
                    f"{name}.structured_outputs: the embedded engine has no grammars, and is the one that serves here "
                    f"({self.engine.reason}); set inference.engine: vllm, or leave it out"
                )
        template = config.model.chat_template
        if template is not None and not template.is_file():
            self.problems.append(f"model.chat_template: {template} is not a file (working directory: {Path.cwd()})")
        if self.trains and config.loss.reference != "initial":
            reference = self._check_folder("loss.reference", config.loss.reference)
            if folder is not None and reference is not None:
                ours, theirs = (text_config(path).get("vocab_size") for path in (folder, reference))
                if ours is not None and theirs is not None and ours != theirs:
                    self.problems.append(other_vocabulary(config.loss.reference, ours=ours, theirs=theirs))

    def _check_folder(self, key: str, path: str) -> Path | None:
        """The folder; None where it is broken (a problem) or a name on a hub (a note)."""
        folder = Path(path)
        if _HUB_NAME.match(path) and not Path(folder.parts[0]).exists():
            looked_at = "of which only config.json is checked here" if _downloaded(path) else "and not checked here"
            self.notes.append(f"{key}: {path} is not a local folder; it is taken as a hub name {looked_at}")
            return None
        problem = model_problem(path)
        if problem is not None:
            self.problems.append(f"{key}: {problem}")
            return None
        return folder

    # ---- packages and devices ----

    def check_packages(self) -> None:
        """Optional packages that the configuration needs and that are not installed."""
        config, lora = self.config, self.config.model.lora
        needed = [(f"{key}.type: hub", "datasets") for key, source in self.sources.items() if source.type == "hub"]
        if self.trains:
            needed += [
                (f"tracking.{i}.type: {t.type}", _TRACKERS.get(t.type, t.type)) for i, t in enumerate(config.tracking)
            ]
            needed += [("model.lora", "peft")] if lora is not None else []
        self.problems.extend(
            f"{key}: {needs(module)}" for key, module in needed if importlib.util.find_spec(module) is None
        )

    def check_devices(self) -> None:
        """A device that is asked for and is not there."""
        wanted = {"launch.device": self.config.launch.device} if self.trains else {}
        if self.engine.engine == "embedded":
            wanted["inference.embedded.device"] = self.config.inference.embedded.device
        keys = [key for key, device in wanted.items() if device == "cuda"]
        if keys and (reason := _no_cuda()):
            remedy = "set cpu, or start the run where there is a GPU"
            self.problems.extend(f"{key}: cuda, but {reason}; {remedy}" for key in keys)

    def check_room(self) -> None:
        """On the disk of run.dir."""
        run_dir = RunDir(self.config.run_path)
        with self.collecting():
            check_run_place(run_dir)
            if (size := ModelSize.read(self.config.model.path)) is not None:
                status, text = disk_room(self.config, run_dir, size)
                if status != "pass":
                    (self.problems if status == "fail" else self.notes).append(f"run.dir: {text}")

    # ---- data ----

    def check_data(self) -> tuple[Rows | None, Rows | None]:
        """Rows to train on and rows of evaluation.data: all of them where that takes a moment only, else the first few; None where
        they could not be read."""
        config, train = self.config, self.config.data.train
        found: tuple[Rows | None, Rows | None]
        if all(map(_is_small, self.sources.values())):
            found = self._load_all()
        else:
            some = {key: self._first_rows(key, source) for key, source in self.sources.items()}
            found = some["data.train"], some.get("evaluation.data")
        is_text = found[0] and isinstance(found[0][0]["prompt"], str) and train.system_prompt is None
        if is_text and not (config.tools or config.environments):
            self.notes.append(
                "data.train: the prompts are plain text, so they reach the model without the chat template and completions reach "
                "the rewards as text; with data.train.system_prompt, or with messages as prompts, the template is used"
            )
        return found

    def _first_rows(self, key: str, source: Source) -> Rows | None:
        from grpo_async.data import first_rows

        if isinstance(source, HubSource):
            self.notes.append(f"{key}: the dataset {source.name} is not checked here")
            return None
        try:
            return first_rows(source, _NUM_ROWS)
        except GrpoAsyncError as error:
            self.problems.append(f"{key}: {error}")
            return None

    def _load_all(self) -> tuple[Rows | None, Rows | None]:
        """Everything but the filter by tokens, which needs the tokenizer."""
        from grpo_async.data import load_data

        data, evaluation = self.config.data, self.config.evaluation
        unfiltered = {"max_prompt_tokens": None}
        data = data.model_copy(update={"train": data.train.model_copy(update=unfiltered)})
        if evaluation is not None and evaluation.data is not None:
            evaluation = evaluation.model_copy(update={"data": evaluation.data.model_copy(update=unfiltered)})
        try:
            loaded = load_data(data, evaluation)
        except GrpoAsyncError as error:
            self.problems.append(str(error))
            return None, None
        self.notes.extend(loaded.notes)
        training, num_rows = self.config.training, len(loaded.train)
        if self.trains and training.epochs is not None and self.config.data.train.max_prompt_tokens is None:
            self.notes.append(
                f"training.epochs: {training.epochs:g} x {num_rows} rows are {training.num_prompts(num_rows)} groups, at most "
                f"{self.config.with_rows(num_rows).num_steps} steps"
            )
        return loaded.train, loaded.evaluation

    # ---- tools, environments, the rollout function, the agent ----

    def check_components(self, train: Rows | None, held_out: Rows | None) -> Components | None:
        """Against the rows of each source; None when one cannot be used."""
        components = None
        with self.collecting():
            components = load_components(self.config)
        if components is not None:
            with self.collecting():
                self.notes.extend(components.notes)
            if self.config.rollout_function is not None:
                self.notes.append(
                    "rollout_function makes whole rollouts: rollout.max_in_flight, max_turns, max_turn_tokens, rollout_timeout_s "
                    "and tool_calling are not used"
                )
            self.check_agent(components)
            if components.environments is not None:
                for key, rows in {"data.train": train, "evaluation.data": held_out}.items():
                    found = components.environments.check_rows(rows or ())
                    self.problems.extend(f"{key}, {problem}" for problem in found)
        return components

    def check_agent(self, components: Components) -> None:
        """What a run with an agent does, and where the endpoint listens."""
        section, rollout = self.config.rollout.agent, self.config.rollout
        if section is None or components.agent is None:
            return
        what = section.function or section.environment or f"the command {' '.join(section.command or ())}"
        where = " in the sandbox" if section.sandbox else ""
        self.notes.append(
            f"rollout.agent: {what} makes the rollouts{where}, {rollout.group_size} of each row, "
            f"{components.agent.max_concurrent} at once, each for at most {section.timeout_s:g} s; it calls the model at an "
            f"endpoint on {section.host}, at most {rollout.max_turns} times and for {rollout.max_completion_tokens} tokens in "
            "all. Not used: rollout.rollout_timeout_s, tool_calling.max_result_chars"
        )
        if rewards := [reward.name or reward.function or reward.own_name for reward in self.config.rewards]:
            self.notes.append(
                f"rollout.agent: its own reward (`agent`, weight {section.reward_weight:g}) is added to that of "
                f"{', '.join(rewards)}; if its result has none, only they count"
            )
        if problem := _cannot_bind(section.host, section.port):
            self.problems.append(f"rollout.agent.host: {problem}; the endpoint has to listen there")

    def measured_prompts(self, train: Rows | None, held_out: Rows | None) -> dict[str, list[Prompt]]:
        """Of each source, evenly over its rows; none where a rollout function or an agent makes its own."""
        from grpo_async.data import make_prompt

        prompts: dict[str, list[Prompt]] = {}
        if self.config.rollout_function is None and self.config.rollout.agent is None:
            for (key, source), rows in zip(self.sources.items(), (train, held_out), strict=False):
                with self.collecting():
                    chosen = rows.take(range(0, len(rows), math.ceil(len(rows) / _NUM_MEASURED))) if rows else ()
                    prompts[key] = [make_prompt(row, 0, source.system_prompt) for row in chosen]
        return prompts

    def may_be_too_long(self, prompts: Sequence[Prompt]) -> bool:
        """Whether one has as many bytes as a sequence may have tokens: a token has at least one, but for those of the template."""
        longest = self.config.inference.max_model_len
        return any(sum(len(each.content.encode(errors="replace")) for each in p.messages) >= longest for p in prompts)

    def check_text(self, components: Components, prompts: Mapping[str, Sequence[Prompt]], *, deep: bool) -> None:
        """What takes the tokenizer: tools are really rendered; `deep`: its ids against the model's, and what prompts leave of
        inference.max_model_len."""
        config = self.config
        try:
            folder = Path(config.model.path)
            if not folder.is_dir():
                _check_hub(config.model.path)
            renderer = load_renderer(config)
            for schemas in components.tool_sets:
                self.note(renderer.check_tools(schemas))
            if deep and folder.is_dir():
                check_tokenizer_size(len(renderer.tokenizer), text_config(folder).get("vocab_size"))
            for key, some in prompts.items() if deep else ():
                self._check_lengths(key, list(map(token_counter(renderer, components), some)))
        except (ConfigError, ChatError) as error:
            self.problems.append(str(error))

    def _check_lengths(self, key: str, lengths: list[int]) -> None:
        """Those of prompts of a source, in tokens, against what a sequence may have."""
        most, longest = self.sources[key].max_prompt_tokens, self.config.inference.max_model_len
        kept = [length for length in lengths if most is None or length <= most]
        if lengths and not kept:
            self.problems.append(f"{key}.max_prompt_tokens: {most} leaves no prompt; raise it")
        if too_long := sum(length >= longest for length in kept):
            (self.problems if too_long == len(kept) else self.notes).append(
                f"{key}: {too_long} of {len(kept)} prompts measured have {longest} tokens or more, and "
                f"inference.max_model_len is {longest}: nothing can be generated for them; raise it, or drop them with "
                f"{key}.max_prompt_tokens"
            )

    # ---- rewards and other functions ----

    def check_rewards(self, components: Components | None, train: Rows | None, held_out: Rows | None) -> None:
        config = self.config
        try:
            rewards = load_rewards(config.rewards)
        except ConfigError as error:
            self.problems.append(str(error))
            return
        for key, rows in zip(self.sources, (train, held_out), strict=False):
            self.problems.extend(reward_problems(config, rewards, rows[0], key) if rows else ())
        environments = components.environments if components else None
        own = components.reward_weights.keys() if components is not None else set()
        names = {reward.name for reward in rewards}
        if not rewards and environments is not None and not environments.all_have_rewards:
            self.problems.append(
                "rewards: there are no reward functions, and not every environment has a `get_reward`; name at least one"
            )
        self.problems.extend(
            f"rewards: `{name}` is also the reward of an environment or of the agent; give the function another `name`"
            for name in sorted(own & names)
        )
        best = config.checkpoint.best_metric
        if best.partition("/")[0] == "rewards" and best.split("/")[1:2] not in [[name] for name in names | own]:
            known = sorted(names | own)
            self.problems.append(f"checkpoint.best_metric: {best}: there is no such reward; the rewards are {known}")
        for section, reward in zip(config.rewards, rewards, strict=True):
            with self.collecting(f"reward {reward.name!r}: "):
                self.note(startup_notes(resolve(section.reference), section.keywords))
            reward.close()

    def check_own_functions(self) -> None:
        with self.collecting():
            if self.config.advantage.type == "custom":
                UserAdvantage(self.config.advantage)
        with self.collecting():
            if self.config.loss.type == "custom":
                from grpo_async.training.loss import UserLoss  # here: it imports torch

                UserLoss(self.config.loss)
        with self.collecting():
            if self.config.optimizer.schedule_kwargs:
                from grpo_async.training.schedule import lr_factors  # here: it imports torch

                lr_factors(self.config)

    # ---- addresses, certificates, the token ----

    def check_connections(self, node_rank: int) -> None:
        config, tls = self.config, self.config.inference.tls
        for name in ("certificate", "key", "ca_certs") if tls is not None else ():
            path: Path | None = getattr(tls, name)
            if path is not None and not os.access(path, os.R_OK):
                place = f"working directory: {Path.cwd()}"
                self.problems.append(f"inference.tls.{name}: {path} cannot be read ({place})")
        if node_rank == 0:
            self._check_weights_host()
            self._check_trackers()
        self._ask_servers()
        if config.inference.urls and token_from_environment() is None:
            self.notes.append(
                "inference.urls is set and $GRPO_ASYNC_TOKEN is not: the server must be one that requires no token"
            )

    def _check_weights_host(self) -> None:
        try:
            host = weights_host(self.config, self.config.inference.urls)
        except ConfigError as error:  # the server may still be about to come
            self.notes.append(str(error))
            return
        if problem := _cannot_bind(host):
            self.problems.append(f"weights.host: {problem}; it is the trainer's own address")

    def _check_trackers(self) -> None:
        for number, section in enumerate(self.config.tracking if self.trains else ()):
            if section.type == "prometheus" and (problem := _cannot_bind(section.host, section.port)):
                self.problems.append(f"tracking.{number}.port: {problem}; set another, or 0 for any free one")
            elif section.type == "wandb" and section.mode == "online" and not _has_wandb_login():
                self.notes.append(
                    f"tracking.{number}: neither $WANDB_API_KEY nor {_netrc()} has a login of Weights & Biases; the run would end "
                    "at its start: `wandb login`, or mode: offline"
                )

    def _ask_servers(self) -> None:
        """Those that others have started: they may come later, but not be something else."""
        tls = self.config.inference.tls
        for url in self.config.inference.urls:
            is_healthy = False
            with (
                self.collecting(),
                ServerControl(
                    url, token=token_from_environment(), timeout_s=_ASK_S, ca_certs=tls.trusted if tls else None
                ) as server,
            ):
                try:
                    server.health(timeout_s=_ASK_S)
                    is_healthy = True
                    server.info(retries=0)
                except InferenceError as error:
                    if hopeless := why_hopeless(error, is_healthy=is_healthy):
                        self.problems.append(f"inference.urls: {url}: {hopeless}")
                    else:
                        self.notes.append(
                            f"inference.urls: {url} is not serving now ({error}); the run waits up to inference.startup_timeout_s "
                            "for it"
                        )


def _downloaded(name: str) -> Path | None:
    """The folder in the cache that has the config.json of a model on the hub; None: there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # it can be no name on the hub
        return None
    return Path(found).parent if isinstance(found, str) else None


def _check_hub(name: str) -> None:
    """huggingface_hub retries for a minute before it says that there is no network.

    Raises:
        ConfigError: the hub cannot be reached, and the model is not in its cache.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _downloaded(name):
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=_ASK_S)
    except httpx.TransportError as error:
        raise ConfigError(
            f"model.path: {name} is neither a local folder nor in the hub's cache ({constants.HF_HUB_CACHE}), and the hub "
            f"{constants.ENDPOINT} cannot be reached ({error}); connect this machine, copy a filled cache to it, or name a folder"
        ) from error


def _netrc() -> Path:
    return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()


def _has_wandb_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(_netrc()).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _cannot_bind(host: str, port: int = 0) -> str:
    """Why nothing can listen at an address; "" where it can."""
    error = binding_error(host, port)
    return "" if error is None else f"{host}{f' port {port}' if port else ''} cannot be bound on this machine ({error})"


def _no_cuda() -> str:
    """Why torch cannot use a GPU here; empty: it can, as far as is known without starting it."""
    version = importlib.metadata.version("torch")
    if machine.is_torch_for_cpus():
        return f"torch {version} is built for CPUs"
    if machine.inspect().gpus:
        return ""
    import torch  # here: it takes seconds; the driver may be one that is found by no file

    return "" if torch.cuda.is_available() else f"torch {version} sees no GPU"


def _is_small(source: Source) -> bool:
    if isinstance(source, EnvironmentSource):
        return True
    if not isinstance(source, JsonlSource | CsvSource | ParquetSource):
        return False  # a generator, a package or a hub may take its time
    try:
        return source.path.is_file() and source.path.stat().st_size <= _SMALL_BYTES
    except OSError:
        return False  # reading it says what is wrong


def reward_problems(
    config: ExperimentConfig, rewards: Sequence[RewardFunction], columns: Collection[str], source: str = "data.train"
) -> list[str]:
    """One sentence for each reward function that lacks something it needs, and would fail every group, and for each column that no
    function would get. `source`: whose columns they are."""
    if config.rollout_function is not None or config.rollout.agent is not None:
        return []  # it may add columns, which nobody knows before
    given = sorted(set(columns) - {"prompt"})
    hidden = [
        f"{source}: the column `{name}` would hide what rewards get under this name; leave it out with "
        f"remove_columns: [{name}], or rename it with columns: {{{name}: gold_{name}}}"
        for name in sorted(OFFERED & set(given))
    ]
    return hidden + [
        f"reward {reward.name!r} {problem}"
        for reward in rewards
        if (problem := reward.lack(given, has_environments=bool(config.environments), source=source)) is not None
    ]
