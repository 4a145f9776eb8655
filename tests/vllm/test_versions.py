"""That `compat` fits the vLLM versions that are taken, with a stand-in for vLLM; and what differs between them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny_model import build_tiny_model
from tests.support.weight_push import push_state_dict
from tests.vllm.reference import Reference, assert_exact
from tests.vllm.server import experiment, running_server

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "grpo_async/servers/vllm/compat.py"


def test_only_compat_and_patches_import_vllm() -> None:
    importers = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "grpo_async").rglob("*.py"))
        if any(name.split(".")[0] == "vllm" for name in _imported(path))
    ]
    assert importers == [f"grpo_async/servers/vllm/{name}.py" for name in ("compat", "patches")]


def _imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    return names


# A stand-in for vLLM: every name that `compat` imports exists, but for those that the version lacks.
_STAND_IN = """
import ast, importlib.machinery, sys, types
version, missing, script = sys.argv[1], set(sys.argv[2].split(",")), sys.argv[3]
for node in ast.walk(ast.parse(open({compat!r}).read())):
    if isinstance(node, ast.Import):
        wanted = [(alias.name, []) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        wanted = [(node.module, [alias.name for alias in node.names])]
    else:
        continue
    for module, names in wanted:
        if module.split(".")[0] != "vllm":
            continue
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].__path__ = []
        for name in names:
            if f"{{module}}.{{name}}" not in missing:
                made = type(name, (Exception,) if name.endswith("Error") else (), {{}})
                setattr(sys.modules[module], name, made)
sys.modules["vllm"].__version__ = version
sys.modules["vllm.logger"].init_logger = lambda name: None
exec(script)
"""


def _run_with_stand_in(version: str, *, missing: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _STAND_IN.format(compat=str(COMPAT)), version, missing, script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("version", "missing", "caught"),
    [
        ("0.25.1", "vllm.exceptions.VLLMClientError", "ValueError"),  # what it raises for a wrong request
        ("0.26.0+cpu", "vllm.exceptions.VLLMClientError", "ValueError"),
        ("0.27.0", "", "VLLMClientError"),
        ("0.29.0", "", "VLLMClientError"),
    ],
)
def test_a_wrong_request_is_recognised_in_versions_without_an_error_class_for_it(
    version: str, missing: str, caught: str
) -> None:
    script = "from grpo_async.servers.vllm import compat; print(compat.VLLMClientError.__name__)"
    done = _run_with_stand_in(version, missing=missing, script=script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [caught]


# ---- seeds: vLLM would start the noise of a request anew with each continuation ----


def test_continuations_sample_from_the_policy_on_an_engine_that_restarts_the_generator_of_a_request() -> None:
    script = "import runpy; runpy.run_module('tests.vllm.sampled_continuations', run_name='__main__')"
    done = _run_with_stand_in("0.29.0", missing="", script=script)
    assert done.returncode == 0, done.stderr
    # p = 1/5 for each of 5 tokens, 600 draws: standard deviation 0.016
    assert json.loads(done.stdout) == {how: pytest.approx(0.2, abs=0.06) for how in ("abort", "break", "resume")}


# ---- tied heads: their kernel keeps a copy of its own ----


class _Llama(Reference):
    """Its head is a module of its own in every vLLM version; Qwen's is the embeddings themselves before 0.28."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        build_tiny_model(folder)  # for its tokenizer
        vocab_size = len(PreTrainedTokenizerFast.from_pretrained(folder))
        torch.manual_seed(seed)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = LlamaConfig(
            vocab_size=vocab_size, initializer_range=0.08, tie_word_embeddings=True, pad_token_id=0, **shape, **heads
        )
        self.module = LlamaForCausalLM(config).eval()
        self.module.save_pretrained(folder)


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("needs_vllm")
def test_a_push_reaches_a_head_that_shares_the_embeddings_but_computes_with_a_packed_copy(tmp_path: Path) -> None:
    first, second = _Llama(tmp_path / "first", seed=0), _Llama(tmp_path / "second", seed=1)
    prompt = [20 + position % 200 for position in range(40)]
    with running_server(experiment(str(tmp_path / "first")), tmp_path) as server:
        for version, model in enumerate((first, second, first)):
            if version > 0:
                push_state_dict(server.url, server.token, model.parameters(), version)
            assert_exact(model, prompt, server.generate(prompt, max_tokens=8), version)
