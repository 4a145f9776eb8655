"""What can be known to be wrong before anything starts: files, functions, packages and devices that the configuration names.

Reads small files whole and some rows of others, and imports rewards, tools and environments, as the trainer will. Every
problem goes into one error. Starts and writes nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_async.chat.renderer import load_renderer
from grpo_async.chat.turn import ChatError
from grpo_async.checks.memory import ModelSize, check_run_dir_writable, disk_room
from grpo_async.checks.model_files import model_problem, text_config
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import EnvironmentSource, HubSource, Source
from grpo_async.data import Rows, first_rows, load_data, make_prompt
from grpo_async.data.look import look_at_rows
from grpo_async.errors import GrpoAsyncError, Problems
from grpo_async.processes import machine
from grpo_async.processes.machine import weights_host
from grpo_async.records import TEMPLATE_COLUMN, Prompt
from grpo_async.rewards import RewardFunction, load_rewards
from grpo_async.rewards.call import OFFERED
from grpo_async.rollout.components import Components, load_components, startup_notes, token_counter
from grpo_async.run_directory import RunDir
from grpo_async.servers.embedded.families import check_embedded_family, has_experts
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.training.families import (
    check_context_parallel,
    check_family,
    check_tokenizer_size,
    check_vocabulary,
    one_sample_per_row,
)
from grpo_async.user_code.references import resolve
from grpo_async.utils.extras import needs
from grpo_async.utils.files import downloaded_file
from grpo_async.utils.network import binding_error
from grpo_async.utils.text import backticked, count

_NUM_ROWS = 3
_NUM_FIRST = 10_000  # of a file that is too large to be read here
_NUM_MEASURED = 200
_SMALL_BYTES = 128 << 20  # about ten seconds
_LATER = "the trainer looks at all rows, and so does `grpo-async train --dry-run`"
_HUB_NAME = re.compile(r"^\w[\w.-]*(/[\w.-]+)?$")  # ./x and ../x are paths
_TRACKERS = {"tensorboard": "tensorboardX"}
"""Type -> module, where they differ."""


def check_inputs(
    config: ExperimentConfig, *, engine: EngineChoice, deep: bool = False, is_here: bool = True
) -> list[str]:
    """Look at everything that the configuration names; return notes (what could not be checked).

    Args:
        engine: what serves.
        deep: read all rows, measure prompts with the tokenizer, look at the disk; else only what takes a moment.
        is_here: the run trains on this machine; else `check_node` looks at those where it does.

    Raises:
        ConfigError: all problems, one a line, each with its dotted path.
    """
    found = _InputChecks(config=config, deep=deep)
    found.check_model(engine, trains=True)
    has_model = not found.problems
    if is_here:
        found.check_machine(engine, trains=True)
    found.check_data(has_model=has_model)
    if has_model and deep and (is_here or config.launch.ray is not None):  # the nodes of a cluster share run.dir
        found.check_room()
    found.check_own_functions()
    found.problems.raise_if_any()
    return found.notes


def check_node(config: ExperimentConfig, *, engine: EngineChoice, trains: bool) -> None:
    """Look at what a node of a cluster needs: the model, the optional packages, the devices.

    Raises:
        ConfigError: all problems, one a line, each with its dotted path.
    """
    found = _InputChecks(config=config)
    found.check_model(engine, trains=trains)
    found.check_machine(engine, trains=trains)
    found.problems.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class _InputChecks:
    config: ExperimentConfig
    deep: bool = False
    problems: Problems = field(default_factory=Problems)
    notes: Problems = field(default_factory=Problems)

    # ---- model, packages, devices, disk ----

    def check_model(self, engine: EngineChoice, *, trains: bool) -> None:
        config = self.config
        folder = self._check_folder("model.path", config.model.path)
        downloaded = None if folder else downloaded_file(config.model.path, "config.json", config.model.revision)
        if (described := folder or (downloaded and downloaded.parent)) is not None:
            with self.problems.collecting():
                text, longest = text_config(described), config.inference.max_model_len
                if trains:
                    check_family(text, config.model.path, longest)
                    if config.training.context_parallel > 1:
                        check_context_parallel(text, config.model.path, config.training.context_parallel)
                    if one_sample_per_row(text) and config.training.pack:
                        self.notes.append(
                            "training.pack: layers of this model carry a state, or count positions, along the row, so samples "
                            "cannot share one; each gets its own, and those of similar length are computed together (GPUs pack "
                            "Qwen 3.5, Qwen3-Next and OLMo hybrid with flash-linear-attention and causal-conv1d)"
                        )
                if engine.engine == "embedded":
                    check_embedded_family(text, longest)
                if config.adapter_slots and not engine.on_gpu and engine.engine == "vllm" and has_experts(text):
                    self.problems.append(
                        "model.lora.push: adapter_swap: vLLM computes the experts of a mixture beside adapters on GPUs only; set "
                        "merged"
                    )
        template = config.model.chat_template
        if template is not None and not template.is_file():
            self.problems.append(f"model.chat_template: {template} is not a file (working directory: {Path.cwd()})")
        if trains and config.loss.reference != "initial":
            reference = self._check_folder("loss.reference", config.loss.reference)
            if folder is not None and reference is not None:
                ours, theirs = (text_config(path).get("vocab_size") for path in (folder, reference))
                with self.problems.collecting():
                    check_vocabulary(config.loss.reference, ours=ours, theirs=theirs)

    def _check_folder(self, key: str, path: str) -> Path | None:
        """The folder; None where it is broken (a problem) or a name on a hub (a note)."""
        folder = Path(path)
        if _HUB_NAME.match(path) and not folder.exists():
            self.notes.append(f"{key}: {path} is not a local folder; it is taken as a hub name and not checked here")
            return None
        if problem := model_problem(path):
            self.problems.append(f"{key}: {problem}")
            return None
        return folder

    def check_machine(self, engine: EngineChoice, *, trains: bool) -> None:
        """Check that optional packages and devices are there, and that addresses can be bound."""
        config = self.config
        addresses = {}
        needed = [
            (f"{key}.type: hub", "datasets") for key, source in self.config.sources.items() if source.type == "hub"
        ]
        devices = {}
        if trains:
            devices["launch.device"] = config.launch.device
            if (agent := config.rollout.agent) is not None:
                addresses["rollout.agent.host"] = (agent.host, agent.port)
            with self.notes.collecting():  # the server may still be about to come
                addresses["weights.host"] = (weights_host(config, config.inference.urls), 0)
            needed += [
                (f"tracking.{i}.type: {t.type}", _TRACKERS.get(t.type, t.type)) for i, t in enumerate(config.tracking)
            ]
            lora = config.model.lora
            needed += [("model.lora", "peft")] if lora is not None else []
            needed += [("model.lora.load_in_4bit", "bitsandbytes")] if lora is not None and lora.load_in_4bit else []
        missing = [(key, module) for key, module in needed if importlib.util.find_spec(module) is None]
        self.problems.extend(f"{key}: {needs(module)}" for key, module in missing)
        if engine.engine == "embedded":
            devices["inference.embedded.device"] = config.inference.embedded.device
        keys = [key for key, device in devices.items() if device == "cuda"]
        if keys and (reason := _no_cuda()):
            self.problems.extend(
                f"{key}: cuda, but {reason}; set cpu, or start the run where there is a GPU" for key in keys
            )

        for key, (host, port) in addresses.items():
            if fault := binding_error(host, port):
                self.problems.append(f"{key}: {host} cannot be bound on this machine ({fault}); it is its own address")

    def check_room(self) -> None:
        """Check that run.dir can be written to and its disk has room for the checkpoints."""
        run_dir = RunDir(self.config.run_path)
        with self.problems.collecting():
            check_run_dir_writable(run_dir)
            if (size := ModelSize.read(self.config.model.path)) is not None:
                status, text = disk_room(self.config, run_dir, size)
                if status != "pass":
                    (self.problems if status == "fail" else self.notes).append(f"run.dir: {text}")

    # ---- data ----

    def check_data(self, *, has_model: bool) -> None:
        rows = self.read_rows()
        for key, some in rows.items():
            self.notes.extend(look_at_rows(key, some, self.config, self.problems))
        components = self.check_components(rows)
        try:
            if components is not None and has_model:
                self.check_text(components, rows)
            self.check_rewards(components, rows)
        finally:
            if components is not None:
                asyncio.run(components.aclose())

    def read_rows(self) -> dict[str, Rows]:
        """Rows of each source that can be read: all where that takes a moment only, else the first ones."""
        sees_all = self.deep or all(map(_is_small, self.config.sources.values()))
        rows: dict[str, Rows] = {}
        for key, source in self.config.sources.items():
            if not self.deep and isinstance(source, HubSource) and not Path(source.name).exists():
                self.notes.append(f"{key}: the dataset {source.name} is not checked here; {_LATER}")
                continue
            with self.problems.collecting(f"{key}: "):
                num_rows = _NUM_FIRST if hasattr(source, "path") else _NUM_ROWS
                rows[key] = first_rows(source, num_rows, needs_prompt=not self.config.environments)
        if sees_all and len(rows) == len(self.config.sources):
            with self.problems.collecting():
                rows = self._load_all()
        elif not sees_all:
            seen = (f"{key}: {count(len(some), 'row')} looked at here; {_LATER}" for key, some in rows.items())
            self.notes.extend(seen)
        config = self.config
        for key, train in rows.items():
            is_text = train and key in config.data.sources and isinstance(train[0]["prompt"], str)
            if is_text and not config.templates_text(self.config.sources[key]):
                self.notes.append(
                    f"{key}: the prompts are plain text, so they reach the model without the chat template and completions "
                    f"reach the rewards as text; with {key}.system_prompt, or with messages as prompts, the template is used"
                )
        evaluated = self.config.sources.keys() - config.data.sources.keys() or config.data.sources.keys()
        for name in ("baseline_column", "group_by"):
            column = getattr(config.evaluation, name, None)
            for held_out in (rows[key] for key in sorted(evaluated & rows.keys()) if column is not None):
                if held_out and column not in held_out[0]:
                    self.problems.append(f"evaluation.{name}: {column} is not one of the columns {sorted(held_out[0])}")
        return rows

    def _load_all(self) -> dict[str, Rows]:
        """Load and filter the rows as a run does, except by tokens, for which the tokenizer would be needed."""
        data, training = self.config.data, self.config.training
        loaded = load_data(data, self.config.evaluation, needs_prompt=not self.config.environments)
        self.notes.extend(loaded.notes)
        num_rows = loaded.num_rows
        groups, counted = training.num_prompts(num_rows), self.config.with_rows(num_rows)
        is_filtered = any(source.max_prompt_tokens is not None for source in data.sources.values())
        if groups is not None and not is_filtered:
            cut = "" if self.config.warmup_steps == counted.warmup_steps else ", and so is optimizer.warmup_steps"
            self.notes.append(
                f"training.epochs: {training.epochs:g} x {count(num_rows, 'row')} = {count(groups, 'group')}, at most "
                f"{count(counted.num_steps, 'step')}{cut}"
            )
        found = {**loaded.evaluation, **loaded.train}
        return {key: found[key].rows for key in self.config.sources}

    # ---- tools, environments, the rollout function, the agent, prompts ----

    def check_components(self, rows: Mapping[str, Rows]) -> Components | None:
        """Load them and check them against the rows of each source; None when one cannot be used."""
        try:
            components = load_components(self.config)
            self.notes.extend(components.notes)
        except GrpoAsyncError as error:
            self.problems.append(str(error))
            return None
        for key, found in rows.items():
            with self.problems.collecting(f"{key}: "):
                components.check_rows(found)
            if components.environments is not None:
                self.problems.extend(f"{key}, {problem}" for problem in components.environments.check_rows(found))
        return components

    def check_text(self, components: Components, rows: Mapping[str, Rows]) -> None:
        """Load the tokenizer, where tools or templates of rows need it or `deep`; render the tools, compare its ids with the
        model's, and measure what prompts leave of inference.max_model_len (where there are many, some of them)."""
        config, folder = self.config, Path(self.config.model.path)
        has_templates = any(row.get(TEMPLATE_COLUMN) for found in rows.values() for row in found)
        if not (self.deep or has_templates or components.tool_sets):
            return
        with self.problems.collecting():
            renderer = load_renderer(config)
            for schemas in components.tool_sets:
                self.notes.extend(note for note in renderer.check_tools(schemas) if note not in self.notes)
            if folder.is_dir():
                check_tokenizer_size(len(renderer.tokenizer), text_config(folder).get("vocab_size"))
            for key, found in rows.items():
                with self.problems.collecting(f"{key}: "):
                    components.check_rows(found, renderer)
                if self.deep and not config.has_own_rollouts:
                    self._measure(key, _sample(found), token_counter(renderer, components))

    def _measure(self, key: str, rows: Rows, counted: Callable[[Prompt], int]) -> None:
        """Render a sample of the prompts of a source, and compare their lengths with the longest sequence."""
        lengths, refused = [], []
        for row, location in zip(rows, rows.locations, strict=True):
            try:
                lengths.append(counted(make_prompt(row, 0, self.config.sources[key].system_prompt)))
            except ChatError as error:
                refused.append(f"{location}: {error}")
        if refused:
            self.problems.append(f"{key}: {len(refused)} prompts are refused, such as {refused[0]}")
        most, longest = self.config.sources[key].max_prompt_tokens, self.config.inference.max_model_len
        kept = [length for length in lengths if most is None or length <= most]
        if lengths and not kept:
            self.problems.append(
                f"{key}.max_prompt_tokens: {most} leaves none of the {len(lengths)} prompts measured; raise it"
            )
        if too_long := sum(length >= longest for length in kept):
            (self.problems if too_long == len(kept) else self.notes).append(
                f"{key}: {too_long} of {len(kept)} prompts measured have {longest} tokens or more, and "
                f"inference.max_model_len is {longest}: nothing can be generated for them; raise it, or drop them with "
                f"{key}.max_prompt_tokens"
            )

    # ---- rewards and other functions ----

    def check_rewards(self, components: Components | None, rows: Mapping[str, Rows]) -> None:
        config = self.config
        try:
            rewards = load_rewards(config.rewards)
        except GrpoAsyncError as error:
            self.problems.append(str(error))
            return
        for key, found in rows.items():
            self.problems.extend(reward_problems(config, rewards, found[0], key) if found else ())
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
        kind, _, metric = config.checkpoint.best_metric.partition("/")
        if kind == "rewards" and metric not in names | own:
            known = sorted(names | own)
            self.problems.append(
                f"checkpoint.best_metric: rewards/{metric}: there is no such reward; the rewards are {known}"
            )
        for section, reward in zip(config.rewards, rewards, strict=True):
            with self.problems.collecting(f"reward {reward.name!r}: "):
                self.notes.extend(startup_notes(resolve(section.reference), section.keywords))
            reward.close()

    def check_own_functions(self) -> None:
        with self.problems.collecting():
            if self.config.loss.type == "custom":
                from grpo_async.training.loss import UserLoss  # here: it imports torch

                UserLoss(self.config.loss)


def _no_cuda() -> str:
    """Why torch cannot use a GPU here; empty: it can, as far as is known without starting it."""
    version = importlib.metadata.version("torch")
    if machine.is_torch_for_cpus():
        return f"torch {version} is built for CPUs"
    if machine.inspect_machine().gpus:
        return ""
    import torch  # here: it takes seconds; the driver may be one that is found by no file

    return "" if torch.cuda.is_available() else f"torch {version} sees no GPU"


def _sample(rows: Rows) -> Rows:
    """Rows at even distances, and the first with each sequence of roles: a template may refuse some."""
    first: dict[tuple[str, ...], int] = {}
    for index, row in enumerate(rows):
        if not isinstance(row["prompt"], str):
            first.setdefault(tuple(message["role"] for message in row["prompt"]), index)
    even = range(0, len(rows), max(1, math.ceil(len(rows) / _NUM_MEASURED)))
    return rows.take(sorted({*even, *list(first.values())[:_NUM_MEASURED]}))


def _is_small(source: Source) -> bool:
    if isinstance(source, EnvironmentSource):
        return True
    path = getattr(source, "path", None)  # a generator or a package may take its time
    num_bytes = path.stat().st_size * (4 if source.type == "parquet" else 1) if path and path.is_file() else 0
    return 0 < num_bytes <= _SMALL_BYTES


def reward_problems(
    config: ExperimentConfig, rewards: Sequence[RewardFunction], columns: Collection[str], source: str = "data.train"
) -> list[str]:
    """One sentence for each reward function that lacks something it needs, and would fail every group, and for each column that no
    function would get. `source`: whose columns they are."""
    chosen = config.sources[source].rewards
    unknown = sorted(set(chosen or ()) - {reward.name for reward in rewards})
    if unknown:
        known = [reward.name for reward in rewards]
        return [f"{source}.rewards: there is no reward {backticked(unknown)}; the rewards are {known}"]
    if config.has_own_rollouts:
        return []
    given = sorted(set(columns) - {"prompt"})
    hidden = [
        f"{source}: the column `{name}` would hide what rewards get under this name; leave it out with "
        f"remove_columns: [{name}], or rename it with columns: {{{name}: gold_{name}}}"
        for name in sorted(OFFERED & set(given))
    ]
    return hidden + [
        f"reward {reward.name!r} {problem}"
        for reward in rewards
        if (chosen is None or reward.name in chosen)
        and (problem := reward.missing_inputs(given, has_environments=bool(config.environments), source=source))
        is not None
    ]
