"""`grpo-async import`: a training script of TRL as a configuration, without running it.

    train.py -> train.yaml       settings of GRPOConfig and of the trainer, by their names here (names.json), and of accelerate's
                                 YAML beside it
             -> train_parts.py   the script's own statements that rewards, tools, environments and data need, unchanged

The script is read as a syntax tree. A value that only running it would give, and a setting that has no counterpart, becomes a
comment with the reason, so that nothing is lost in silence.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
import shlex
import symtable
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_async.config.names import OTHER_NAMES
from grpo_async.errors import ConfigError

TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer")
_SAME_NAMES = {
    "rollout": ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_staleness"),
    "loss": ("beta", "epsilon", "epsilon_high", "delta", "use_bias_correction_kl", "sync_ref_model", "ref_model_mixup_alpha",
             "ref_model_sync_steps"),
    "training": ("num_iterations", "max_steps"),
    "optimizer": ("max_grad_norm", "weight_decay", "warmup_steps"),
    "model": ("chat_template_kwargs", "trust_remote_code"),
    "run": ("seed",),
}  # fmt: skip
_PATHS = {name: f"{section}.{name}" for section, names in _SAME_NAMES.items() for name in names}
_PATHS |= {each.name: each.here for each in OTHER_NAMES if each.trainer == "TRL" and each.here}
_WHY = {each.name: each.why for each in OTHER_NAMES if each.trainer == "TRL" and each.here is None}
_LORA = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
_DEFAULTS = {"learning_rate": 1e-6, "lr_scheduler_type": "linear", "num_train_epochs": 3.0, "seed": 42}
"""Of TRL's, where ours are others; and of what decides the number of groups."""
_ASYNC_DEFAULTS = {**_DEFAULTS, "lr_scheduler_type": "constant", "max_completion_length": 2048, "max_staleness": 4}
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8}
_PROMPT_TOKENS = 1536
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_CORRECTION = (
    "vllm_importance_sampling_correction: by default GRPOTrainer leaves out completions whose weight is above 3; "
    "here the clip bounds the ratio to the sampler. For the same: loss.proximal: recomputed, "
    "loss.correction: {level: sequence, action: mask, cap: 3}"
)
_BY_HAND = ("model.lora", "loss.correction", "inference.urls", "tracking")
_KNOWN = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "tools", "environment_factory", "rollout_func",
          "peft_config", "processing_class")  # fmt: skip


class _UnknownError(Exception):
    """A value that only running the script gives."""


@dataclass(slots=True)
class ImportedScript:
    """`values`: the configuration. `comments`: what is not in it, and why. `parts`: content of the module of the script's own code,
    empty if none is needed."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    parts: str = ""

    def put(self, path: str, value: Any) -> None:
        *sections, last = path.split(".")
        place = self.values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value

    def as_yaml(self, script: str) -> str:
        comments = "".join(f"#   {line}\n" for each in self.comments for line in textwrap.wrap(each, 96))
        note = f"#\n# What it leaves out, and why:\n{comments}" if comments else ""
        body = yaml.safe_dump(self.values, sort_keys=False, default_flow_style=None, width=100)
        return f"# From {script} by `grpo-async import`. `grpo-async validate` checks it.\n{note}\n{body}"


def import_script(path: Path, arguments: str = "") -> ImportedScript:
    """Read a script. `arguments`: the command line that it would get, for scripts that read their settings from it.

    Raises:
        ConfigError: it cannot be read, or calls neither trainer.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(f"{path}: cannot be read as a Python script: {error}") from error
    return _Script(path, tree, text.splitlines(), arguments).imported()


def _accelerate_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations of `accelerate launch` in a folder, by name."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and {"distributed_type", "num_processes"} <= content.keys():
                found[path.name] = content
    return found


def _read_arguments(text: str) -> dict[str, Any]:
    """ "--learning_rate 1e-5 --use_peft" -> {"learning_rate": 1e-05, "use_peft": True}."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in shlex.split(text):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if value else []
        elif name:
            found[name].append(word.rstrip(","))
        else:
            raise ConfigError(f"--args: {word!r} comes before the first --NAME")
    values = {name: [_scalar(word) for word in words] for name, words in found.items()}
    return {name: True if not words else words[0] if len(words) == 1 else words for name, words in values.items()}


def _scalar(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


class _Script:
    def __init__(self, path: Path, tree: ast.Module, lines: Sequence[str], arguments: str) -> None:
        self._accelerate = _accelerate_files(path.parent)
        self._lines = lines
        self._stem = path.stem
        self._arguments = _read_arguments(arguments)
        self._result = ImportedScript()
        self._wanted: list[ast.expr] = []  # what the module of the script's own code has to define
        self._rows: dict[str, str] = {}  # generators of rows: name -> the data, as an expression
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of(node.func) in TRAINERS]
        if not calls:
            raise ConfigError(
                f"{path}: calls neither {' nor '.join(TRAINERS)}, so it is no script that this command reads"
            )
        self._call = calls[-1]
        self._scope = list(_statements_before(tree.body, self._call))
        # the last before the trainer counts
        self._options = self._command_line()
        self._assigned = {name: value for statement in self._scope for name, value in _assignments(statement)}

    def imported(self) -> ImportedScript:
        result, given = self._result, {each.arg: each.value for each in self._call.keywords if each.arg}
        given |= dict(
            zip(("model", "reward_funcs", "args", "train_dataset", "eval_dataset"), self._call.args, strict=False)
        )
        settings, left = self._settings(given.get("args"))
        result.put("run.name", self._stem.replace("_", "-"))
        self._put("model", given.get("model"), "model.path", settings.pop("model_name_or_path", None))
        self._data(given)
        self._batch(settings)
        is_async = _name_of(self._call.func) == "AsyncGRPOTrainer"
        weights, no_dropout = settings.pop("reward_weights", None), settings.pop("disable_dropout", False)
        for name, value in {**(_ASYNC_DEFAULTS if is_async else _DEFAULTS), **settings}.items():
            self._setting(name, value)
        result.put("rollout.zero_variance", "train")
        if "max_steps" in result.values["training"]:  # it goes first in TRL
            result.values["training"].pop("epochs", None)
        self._clip()
        rollout, inference = result.values["rollout"], result.values.setdefault("inference", {})
        if "max_model_len" not in inference:
            length = inference["max_model_len"] = rollout.get("max_completion_tokens", 512) + _PROMPT_TOKENS
            if length > 4096:
                result.put("training.micro_batch_tokens", length)
            result.comments.append(
                f"inference.max_model_len leaves {_PROMPT_TOKENS} tokens for a prompt; TRL has no such limit"
            )
        self._callables(given)
        rewards = result.values.get("rewards", [])
        if isinstance(weights, list) and len(weights) == len(rewards):
            for reward, weight in zip(rewards, weights, strict=True):
                reward["weight"] = weight
        elif weights is not None:
            result.comments.append(f"reward_weights: {weights!r}: see rewards[].weight")
        self._lora(given.get("peft_config"), no_dropout)
        left += [
            f"{name}: a {_name_of(self._call.func)} argument without a counterpart"
            for name in given
            if name not in _KNOWN
        ]
        if _name_of(self._call.func) == "GRPOTrainer" and "vllm_importance_sampling_correction" not in settings:
            left.append(_CORRECTION)
        result.comments += left
        result.parts = self._parts()
        return result

    # ---- values ----

    def _value(self, node: ast.expr, inside: tuple[str, ...] = ()) -> Any:
        """The value of an expression, as far as it needs nothing to be run. `inside`: the names whose values led here."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._assigned and name not in inside:
                return self._value(self._assigned[name], (*inside, name))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, inside) for item in items]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {self._value(k, inside): self._value(v, inside) for k, v in zip(keys, values, strict=True) if k}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, inside)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
                try:
                    return _OPERATORS[type(op)](self._value(left, inside), self._value(right, inside))
                except (TypeError, ZeroDivisionError) as error:
                    raise _UnknownError(ast.unparse(node)) from error
            case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
                return {str(each.arg): self._value(each.value, inside) for each in keywords}
            case ast.Attribute(attr=name) if self._options.get(name) is not None:
                return self._options[name]
        raise _UnknownError(ast.unparse(node))

    def _command_line(self) -> dict[str, Any]:
        """Defaults of argparse's arguments, and what `arguments` says."""
        found = {}
        for node in (node for statement in self._scope for node in ast.walk(statement)):
            if isinstance(node, ast.Call) and _name_of(node.func) == "add_argument" and node.args:
                flag, given = node.args[0], {each.arg: each.value for each in node.keywords}
                if isinstance(flag, ast.Constant) and isinstance(default := given.get("default"), ast.Constant):
                    found[str(flag.value).lstrip("-").replace("-", "_")] = default.value
        return {**found, **self._arguments}

    def _put(self, what: str, node: ast.expr | None, path: str, otherwise: Any = None) -> None:
        try:
            value = otherwise if node is None else self._value(node)
        except _UnknownError as error:
            value = otherwise
            if value is None:
                self._result.comments.append(f"{path}: {what} is `{error}`, which only running the script would tell")
        if value is not None:
            self._result.put(path, value)

    # ---- settings ----

    def _settings(self, node: ast.expr | None) -> tuple[dict[str, Any], list[str]]:
        """Those of the config object, and of the command line; and why others are not known."""
        call = self._assigned.get(node.id, node) if isinstance(node, ast.Name) else node
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(call, ast.Call) and _name_of(call.func).endswith("Config"):
            pairs = [(each.arg or "**", each.value) for each in call.keywords]
        if isinstance(node, ast.Name):  # training_args.max_steps = 10
            for statement in self._scope:
                match statement:
                    case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner), attr=name)], value=value):
                        pairs += [(name, value)] if owner == node.id else []
        found, left = dict(self._arguments), []
        for name, value in pairs:
            try:
                found[name] = self._value(value)
            except _UnknownError as error:
                left.append(
                    f"{name}: `{error}` is known only when the script runs; {_PATHS.get(name, 'set it')} by hand"
                )
        if node is not None and not pairs and not self._arguments:
            left.append("settings come from the command line: give it with --args '--learning_rate 1e-5 ...'")
        return found, left

    def _batch(self, settings: dict[str, Any]) -> None:
        per_device, accumulated, size = (settings.pop(name, default) for name, default in _BATCH.items())
        groups, rest = divmod(per_device * accumulated, size)
        self._result.put("rollout.group_size", size)
        self._result.put("rollout.groups_per_step", max(groups, 1))
        about = f"{per_device} x {accumulated} samples of one process in groups of {size}"
        about += "; multiply it by the processes of `accelerate launch`" + (f" ({rest} left over)" if rest else "")
        if len(self._accelerate) == 1:
            self._processes(per_device * accumulated, size)
            return
        self._result.comments.append(f"rollout.groups_per_step: {about}")

    def _processes(self, samples: int, size: int) -> None:
        """Those of accelerate's YAML, each with `samples` in groups of `size`."""
        ((name, each),) = self._accelerate.items()
        processes, machines = int(each["num_processes"]), int(each.get("num_machines") or 1)
        self._result.put("rollout.groups_per_step", max(samples * processes // size, 1))
        self._result.put("launch.num_trainer_ranks", max(processes // machines, 1))
        if machines > 1:
            self._result.put("launch.trainer_nodes", machines)
            self._result.put("launch.ray", "auto")
            self._result.comments.append(
                f"launch.trainer_nodes: {machines}, as in {name}; they are reached with launch.ray"
            )
        if (dtype := {"bf16": "bfloat16", "fp16": "float16"}.get(str(each.get("mixed_precision")))) is not None:
            self._result.put("model.compute_dtype", dtype)
        self._result.comments.append(f"{name}: {each['distributed_type']} is FSDP2 here, which shards all, as ZeRO-3")

    def _setting(self, name: str, value: Any) -> None:
        path, put = _PATHS.get(name), self._result.put
        match name, value:
            case "max_steps", int() if value <= 0:
                return
            case "dataset_name" | "dataset_config" | "dataset_train_split" | "dataset_test_split", _:
                return  # of the script's own code, which loads the data
            case "loss_type", str():
                level = self._result.values.get("loss", {}).get("type")
                put("loss.reduction" if level == "gspo" else "loss.type", value)
            case "importance_sampling_level", "sequence":
                put("loss.reduction", self._result.values.get("loss", {}).get("type", "dapo"))
                put("loss.type", "gspo")
            case "importance_sampling_level", _:
                return
            case "scale_rewards", _:
                put("advantage.type", {True: "group", False: "none"}.get(value, value))
            case "multi_objective_aggregation", str():
                put("advantage.rewards", "normalize_each" if value == "normalize_then_sum" else "sum")
            case "max_tool_calling_iterations", int():
                put("rollout.max_turns", value + 1)  # the last turn calls none
            case "optim", str() if "adamw" in value:
                return
            case "mask_truncated_completions", bool():
                put("rollout.overlong", "mask" if value else "train")
            case "bf16" | "fp16", bool():
                if value:
                    put("model.compute_dtype", "bfloat16" if name == "bf16" else "float16")
            case "gradient_checkpointing", bool():
                put("model.activation_checkpointing", "full" if value else "none")
            case "use_peft", True:
                for key, default in {"rank": 16, "alpha": 32, "dropout": 0.05}.items():  # TRL's ModelConfig
                    self._result.values["model"].setdefault("lora", {}).setdefault(key, default)
            case "lora_target_modules", _:
                put("model.lora.target_modules", value)
            case "output_dir", str():
                folder = Path(value)
                put("run.name", re.sub(r"[^A-Za-z0-9._-]", "-", folder.name).lstrip("-._") or self._stem)
                put("run.dir", str(folder.parent) if folder.parent.name else "runs")
            case "warmup_steps", float():
                self._result.comments.append(f"{name}: {value} of the run's steps: set {path} by hand")
            case "adam_beta1" | "adam_beta2", float():
                betas = self._result.values.setdefault("optimizer", {}).setdefault("betas", [0.9, 0.999])
                betas[name == "adam_beta2"] = value
            case _ if path is None or not path.islower() or "[" in path or path in _BY_HAND:
                why = _WHY.get(name) or (f"see {path}" if path else "has no counterpart that is known")
                self._result.comments.append(f"{name}: {value!r}: {why}")
            case _:
                put(path, value)

    def _clip(self) -> None:
        """TRL's clip range has one width unless it is given two; a ratio of whole samples keeps the reduction of its loss_type."""
        loss = self._result.values.setdefault("loss", {})
        if loss.get("type") == "cispo":
            loss.setdefault("epsilon_high", loss.pop("epsilon", 0.2))
            loss.pop("epsilon", None)
        if loss.get("type", "dapo") in ("dapo", "grpo", "bnpo", "dr_grpo", "gspo"):
            loss.setdefault("epsilon", 0.2)
            loss.setdefault("epsilon_high", loss["epsilon"])

    def _lora(self, node: ast.expr | None, no_dropout: bool) -> None:
        """Adapters, with what peft would choose written out."""
        call = self._assigned.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(call, ast.Call) and _name_of(call.func) == "LoraConfig":
            self._result.put("model.lora", {"rank": 8, "alpha": 8})  # peft's
            for each in call.keywords:
                if (name := _LORA.get(str(each.arg))) is not None:
                    self._put("peft_config", each.value, f"model.lora.{name}")
                elif each.arg not in ("bias", "task_type"):
                    self._result.comments.append(f"peft_config.{each.arg}: `{ast.unparse(each.value)}`; see model.lora")
        elif node is not None and not self._arguments.get("use_peft"):
            self._result.comments.append(f"peft_config: `{ast.unparse(node)}`; see model.lora")
        if (lora := self._result.values.get("model", {}).get("lora")) is None:
            return
        if no_dropout:
            lora["dropout"] = 0.0
        if "target_modules" not in lora:
            lora["target_modules"] = ["q_proj", "v_proj"]
            self._result.comments.append(
                "model.lora.target_modules: peft chooses by the family of the model: these for most, others for a few"
            )

    # ---- code and data ----

    def _callables(self, given: Mapping[str, ast.expr]) -> None:
        if rewards := [{kind: name} for kind, name in self._references(given.get("reward_funcs"))]:
            self._result.put("rewards", rewards)
        if tools := [{kind: name} for kind, name in self._references(given.get("tools"))]:
            self._result.put("tools", tools)
        for _, each in self._references(given.get("environment_factory")):
            self._result.put("environments", {each.rpartition(":")[2]: {"factory": each}})
        for _, each in self._references(given.get("rollout_func")):
            self._result.put("rollout_function.function", each)

    def _references(self, node: ast.expr | None) -> Iterator[tuple[str, str]]:
        """("function", module:name) of each callable in an expression, ("model", text) of each text."""
        if isinstance(node, ast.Name) and isinstance(self._assigned.get(node.id), ast.List | ast.Tuple):
            node = self._assigned[node.id]
        for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]:
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield "model", each.value
            elif isinstance(each, ast.Name):
                self._wanted.append(each)
                yield "function", f"{self._stem}_parts:{each.id}"
            else:
                self._result.comments.append(
                    f"`{ast.unparse(each)}`: give it a name in {self._stem}_parts.py, and name that"
                )

    def _data(self, given: Mapping[str, ast.expr]) -> None:
        for argument, path, function in (
            ("train_dataset", "data.train", "train_rows"),
            ("eval_dataset", "evaluation.data", "eval_rows"),
        ):
            node = given.get(argument)
            if node is None or (isinstance(node, ast.Constant) and node.value is None):
                continue
            source = self._assigned.get(node.id, node) if isinstance(node, ast.Name) else node
            if isinstance(source, ast.Call) and _name_of(source.func) == "load_dataset":
                try:
                    names = dict(zip(("name", "subset"), (self._value(each) for each in source.args), strict=False))
                    names |= {str(each.arg): self._value(each.value) for each in source.keywords}
                    if set(names) <= {"name", "subset", "split", "revision"} and isinstance(
                        names.get("split", ""), str
                    ):
                        self._result.put(path, {"type": "hub", **names})
                        continue
                except _UnknownError:
                    pass
            self._wanted.append(node)
            self._rows[function] = ast.unparse(node)
            self._result.put(path, {"type": "generator", "function": f"{self._stem}_parts:{function}"})

    def _parts(self) -> str:
        """The statements on which the wanted names depend, in their order, and a generator of rows for each set of data."""
        needed = {name for node in self._wanted for name in _loaded(node)}
        kept: list[ast.stmt] = []
        for statement in reversed(self._scope):
            defined = {*_defined(statement)}
            if defined & needed and not _calls(statement, (*TRAINERS, "parse_args", "parse_args_and_config")):
                kept.append(statement)
                needed |= _loaded(statement)
        if not kept and not self._rows:
            return ""
        missing = needed - {name for statement in kept for name in _defined(statement)} - {*dir(builtins), "__file__"}
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        parsed = [f"{name} = argparse.Namespace({options})" for name in sorted(missing)]
        if parsed:
            self._result.comments.append(
                f"{self._stem}_parts.py has what the script takes from its command line: look at {parsed[0]}"
            )
        rows = [f"def {name}():\n    yield from {source}" for name, source in self._rows.items()]
        head = ["import argparse", *parsed] if parsed else []
        body = "\n\n".join([*head, *(self._text(statement) for statement in reversed(kept)), *rows])
        return f'"""What the configuration needs of {self._stem}.py, copied by `grpo-async import`."""\n\n{body}\n'

    def _text(self, statement: ast.stmt) -> str:
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        return textwrap.dedent("\n".join(self._lines[first - 1 : statement.end_lineno]))


def _name_of(node: ast.expr) -> str:
    """ "GRPOConfig" of GRPOConfig and trl.GRPOConfig."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _statements_before(body: Sequence[ast.stmt], call: ast.Call) -> Iterator[ast.stmt]:
    """What may have run before the call: the statements before it in each block around it, all of the module's where the call is in
    a function."""
    for statement in body:
        if not any(node is call for node in ast.walk(statement)):
            yield statement
            continue
        for name in ("body", "orelse", "finalbody"):
            block = getattr(statement, name, [])
            if any(node is call for inner in block for node in ast.walk(inner)):
                yield from _statements_before(block, call)
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            return


def _calls(statement: ast.stmt, names: Sequence[str]) -> bool:
    found = (_name_of(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
    return not isinstance(statement, ast.FunctionDef | ast.ClassDef) and any(name in names for name in found)


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    match statement:
        case ast.Assign(targets=targets, value=value):
            yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value


def _defined(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(each.asname or each.name).partition(".")[0] for each in names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _loaded(node: ast.AST) -> set[str]:
    """Names that it takes from outside: not the parameters and variables of its functions."""
    table = symtable.symtable(ast.unparse(node), "<script>", "exec")
    return {*_free(table)} - {symbol.get_name() for symbol in table.get_symbols() if not symbol.is_referenced()}


def _free(table: symtable.SymbolTable) -> Iterator[str]:
    is_top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or is_top) and not (is_top and symbol.is_assigned()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _free(child)
