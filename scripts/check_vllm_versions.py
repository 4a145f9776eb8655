"""Checks that releases of vLLM have everything that grpo_async/servers/vllm uses, by their sources, without installing any.

    .venv/bin/python -m scripts.check_vllm_versions                 # the newest release of every minor that is supported
    .venv/bin/python -m scripts.check_vllm_versions 0.32.0 0.34.0

It reads some thirty files of a wheel (340 MB), by range requests (fsspec, which torch brings). Imports, options and environment
variables are read from our own code; what we do with vLLM's objects is listed in USED. Exit code 1: a release lacks something.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fsspec

from grpo_async.servers.vllm.command import is_supported, release

OURS = Path(__file__).parents[1] / "grpo_async/servers/vllm"

# module and name (a class, or "" for functions) -> what we use of it, with the arguments that we give; `name=`: by its name
USED = {
    "vllm.v1.engine.async_llm:AsyncLLM": "add_request(request_id, prompt, params) abort(request_id, internal=) resume_generation() "
    "update_weight_version(new_version) "
    "is_paused() sleep(level=, mode=) wake_up() errored output_handler output_processor "
    "engine_core renderer logger_manager vllm_config",
    "vllm.v1.engine.core_client:AsyncMPClient": "add_request_async(request) "
    "pause_scheduler_async(mode=, clear_cache=) _call_utility_async(method, engine=) core_engines",
    "vllm.v1.engine.output_processor:OutputProcessor": "has_unfinished_requests() request_states",
    "vllm.v1.engine.output_processor:RequestState": "weight_version_starts",
    "vllm.v1.engine:EngineCoreRequest": "request_id cache_salt sampling_params lora_request",
    "vllm.lora.lora_model:LoRAModel": "from_lora_tensors(lora_model_id, tensors, peft_helper, device=, dtype=, weights_mapper=)",
    "vllm.lora.peft_helper:PEFTHelper": "r lora_alpha target_modules",
    "vllm.lora.request:LoRARequest": "lora_name lora_int_id lora_path",
    "vllm.lora.worker_manager:WorkerLoRAManager": "_adapter_manager lora_config",
    "vllm.lora.model_manager:LRUCacheLoRAModelManager": "model modules packed_modules capacity list_adapters() "
    "remove_adapter(adapter_id) add_adapter(lora) activate_adapter(lora_id)",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin": "lora_manager",
    "vllm.config:LoRAConfig": "max_loras max_lora_rank",
    "vllm.v1.engine.output_processor:RequestOutputCollector": "put(output) output request_id",
    "vllm.v1.metrics.loggers:StatLoggerManager": "stat_loggers",
    "vllm.v1.metrics.loggers:AggregateStatLoggerBase": "record(scheduler_stats, iteration_stats) log() log_engine_initialized()",
    "vllm.v1.metrics.stats:SchedulerStats": "kv_cache_usage num_running_reqs num_waiting_reqs num_skipped_waiting_reqs",
    "vllm.renderers.base:BaseRenderer": "clear_mm_cache_async()",
    "vllm.outputs:RequestOutput": "outputs prompt_token_ids prompt_logprobs",
    "vllm.outputs:CompletionOutput": "token_ids logprobs finish_reason stop_reason",
    "vllm.logprobs:Logprob": "logprob",
    "vllm.logprobs:FlatLogprobs": "start_indices end_indices token_ids logprobs",
    "vllm.sampling_params:SamplingParams": "max_tokens temperature top_p top_k min_p repetition_penalty stop stop_token_ids "
    "ignore_eos structured_outputs logprobs include_stop_str_in_output detokenize output_kind prompt_logprobs logprob_token_ids "
    "flat_logprobs",
    "vllm.sampling_params:StructuredOutputsParams": "json regex choice grammar",
    "vllm.sampling_params:RequestOutputKind": "DELTA FINAL_ONLY",
    "vllm.inputs:": "tokens_input(prompt_token_ids, cache_salt=)",
    "vllm.v1.worker.worker_base:WorkerBase": "rank vllm_config",
    "vllm.v1.worker.gpu_worker:Worker": "device model_runner",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "get_model()",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "get_model()",
    "vllm.config:ParallelConfig": "world_size world_size_across_dp data_parallel_index data_parallel_size",
    "vllm.config:SchedulerConfig": "max_num_seqs",
    "vllm.config:ModelConfig": "model dtype max_model_len hf_text_config enable_sleep_mode quantization "
    "get_vocab_size()",
    "vllm.config:LoadConfig": "load_format",
    "vllm._custom_ops:": "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)",
    "vllm.config:": "set_current_vllm_config(vllm_config)",
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": "load_numel load_numel_total",
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": "moe_config expert_map_manager",
    "vllm.model_executor.layers.fused_moe.expert_map_manager:ExpertMapManager": "expert_map",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": "moe_parallel_config",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig": "enable_eplb",
    "vllm.model_executor.model_loader.ep_weight_filter:": "should_skip_weight(weight_name, local_expert_ids)",
    "vllm.model_executor.model_loader.reload:": "initialize_layerwise_reload(model) finalize_layerwise_reload(model, model_config)",
}  # fmt: skip
_FRONTEND = [f"vllm.entrypoints.{package}.cli_args" for package in ("common", "launchers", "openai")]  # new ones first

Read = Callable[[str], "str | None"]
"""Path within a release ("vllm/envs.py") -> its text, or None."""
Parsed = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None


class Sources:
    """The modules of one release. `read` is asked once for each file."""

    def __init__(self, version: str, read: Read) -> None:
        self.release = release(version)
        self.text = functools.cache(read)

    @functools.cache  # noqa: B019 - as many as there are releases
    def module(self, name: str) -> tuple[str, ast.Module] | None:
        """Its package (itself, where it is one) and its syntax tree."""
        base = name.replace(".", "/")
        for path, package in ((f"{base}.py", name.rpartition(".")[0]), (f"{base}/__init__.py", name)):
            if (text := self.text(path)) is not None:
                return package, ast.parse(text)
        return None

    def find(self, module: str, name: str) -> tuple[str, Parsed] | None:
        """The module that defines a name, through imports of it, and its class or function (None: a value, or not vLLM's)."""
        if (found := self.module(module)) is None:
            return None
        package, tree = found
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                        origin = ".".join([*parts, *([node.module] if node.module else [])])
                        return self.find(origin, alias.name) if origin.startswith("vllm") else (origin, None)
            if name in _assigned(node):
                return module, None
        return (f"{module}.{name}", None) if self.module(f"{module}.{name}") is not None else None

    def members(self, module: str, name: str) -> dict[str, Parsed]:
        """Methods and fields of a class and its bases, and what its methods set on self."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        module, parsed = found
        members: dict[str, Parsed] = {}
        for base in reversed(parsed.bases):
            if isinstance(base, ast.Name) and base.id != name:
                members |= self.members(module, base.id)
        for node in ast.walk(parsed):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                members |= {each.attr: None for each in targets if isinstance(each, ast.Attribute)}
        for statement in parsed.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                members[statement.name] = statement
            members |= dict.fromkeys(_assigned(statement))
        return members


def problems(sources: Sources) -> Iterator[str]:
    """What we use and this release lacks."""
    for module, name in _imports():
        if sources.find(module, name) is None:
            yield f"from {module} import {name}"
    for owner, uses in USED.items():
        module, _, name = owner.partition(":")
        for use, arguments in re.findall(r"(\w+)(\([^)]*\))?", uses):
            if name:
                members = sources.members(module, name)
                is_there, parsed = use in members, members.get(use)
            else:
                found = sources.find(module, use)
                is_there, parsed = found is not None, found[1] if found else None
            if not is_there:
                yield f"{module}: {name}.{use}" if name else f"{module}: {use}"
            elif arguments and isinstance(parsed, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [each.strip() for each in arguments.strip("()").split(",") if each.strip()]
                if not _takes(parsed, given, is_method=bool(name)):
                    yield f"{module}: {use}{arguments} is {use}({ast.unparse(parsed.args)})"
    yield from _options(sources)


def _takes(function: ast.FunctionDef | ast.AsyncFunctionDef, given: Sequence[str], *, is_method: bool) -> bool:
    arguments = function.args
    if arguments.vararg is not None or arguments.kwarg is not None:
        return True
    positional = [each.arg for each in [*arguments.posonlyargs, *arguments.args]][1 if is_method else 0 :]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        each.arg for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    ours = [each.rstrip("=") for each in given]
    by_place = [each for each in given if not each.endswith("=")]
    everything = {*positional, *(each.arg for each in arguments.kwonlyargs)}
    return positional[: len(by_place)] == by_place and set(ours) <= everything and set(required) <= set(ours)


def _imports() -> Iterator[tuple[str, str]]:
    """(module, name) of everything that our server imports from this release of vLLM."""
    for file in sorted(OURS.glob("*.py")):
        for node in _statements(ast.parse(file.read_text(encoding="utf-8")).body):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == "vllm":
                    yield from ((str(inner.module), alias.name) for alias in inner.names)


def _options(sources: Sources) -> Iterator[str]:
    """Options and variables of the command line."""
    text = (OURS / "command.py").read_text(encoding="utf-8")
    known = sources.members("vllm.engine.arg_utils", "AsyncEngineArgs").keys()
    frontend = next(each for each in _FRONTEND if sources.module(each) is not None)
    known |= sources.members(frontend, "FrontendArgs").keys() | {"host", "port"}
    for option in sorted(set(re.findall(r'"--([a-z-]+)"', text))):
        if option.replace("-", "_") not in known:
            yield f"--{option}"
    variables = sources.text("vllm/envs.py") or ""
    yield from (each for each in sorted(set(re.findall(r'"(VLLM_\w+)"', text))) if f'"{each}"' not in variables)
    modules = re.findall(r'"(vllm\.entrypoints\.[\w.]+)"', text)
    if not any(sources.module(each) is not None for each in modules):
        yield f"neither {' nor '.join(modules)}"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those within if and try."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for each in targets if isinstance(each, ast.Name)]


# ---- where the sources are ----


def wheels() -> dict[str, str]:
    """Version -> address of its wheel, of every release of vLLM on the index."""
    request = urllib.request.Request(
        "https://pypi.org/simple/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:  # noqa: S310 - https
        files = json.load(answer)["files"]
    return {each["filename"].split("-")[1]: each["url"] for each in files if each["filename"].endswith("x86_64.whl")}


def in_wheel(url: str) -> Read:
    archive = zipfile.ZipFile(fsspec.open(url, block_size=1 << 18).open())
    names = frozenset(archive.namelist())
    return lambda path: archive.read(path).decode() if path in names else None


def in_folder(folder: Path) -> Read:
    """Read from a folder that holds the package `vllm`."""
    return lambda path: (folder / path).read_text(encoding="utf-8") if (folder / path).is_file() else None


def main(versions: Sequence[str]) -> int:
    found = wheels()
    if not versions:
        newest = {
            release(each): each for each in sorted(found, key=lambda each: [int(n) for n in re.findall(r"\d+", each)])
        }
        versions = [each for each in newest.values() if is_supported(each)]
    lacking = 0
    for version in versions:
        missing = list(problems(Sources(version, in_wheel(found[version]))))
        lacking += bool(missing)
        print(f"vllm {version}: {'fits' if not missing else 'lacks'}", *missing, sep="\n  ", flush=True)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
