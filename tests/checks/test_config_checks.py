"""What the startup finds in model, data, tools and environments before any process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_async.checks.config_checks import check_inputs
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.quickstart.model import train_tokenizer
from grpo_async.servers.engine_choice import EngineChoice
from tests.launch.support import EMBEDDED, VLLM_ON_CPU, VLLM_ON_GPU, make_config
from tests.support.chat_families import family

GAME = {"game": {"factory": "examples.game.guessing_game:GuessingGame"}}
MATCH = "grpo_async.rewards.text:exact_match"
AGENT = {"function": "examples.agent.agent:run", "max_concurrent": 3}
CALCULATOR = "grpo_async.tools.calculator:calculator"
FORMAT = {"rewards": [{"function": "grpo_async.rewards.format:think_format"}]}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _row(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{number} + 1 ="}], "answer": str(number + 1), **more}


def _in_folder(folder: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """With the folder's path wherever `{folder}` is written."""
    filled: dict[str, Any] = json.loads(json.dumps(sections).replace("{folder}", str(folder)))
    return filled


def _refused(config: ExperimentConfig, told: str, *, engine: EngineChoice = EMBEDDED, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config, engine=engine, **options)
    assert told in str(caught.value)


HELD_OUT = {"data": {"type": "jsonl", "path": "{folder}/held.jsonl"}}
TRAIN = [_row(number) for number in range(20)]
TWO = [{"path": "{folder}/train.jsonl"}, {"path": "{folder}/held.jsonl"}]
TOKEN_WEIGHTS = {"proximal": "recomputed", "correction": {"level": "token"}}


@pytest.mark.parametrize(
    ("train", "held_out", "sections", "told"),
    [
        ([*TRAIN, {"prompt": 7}], [], {}, "train.jsonl:21: "),  # far down a small file
        (TRAIN, TRAIN[:4], {"evaluation": HELD_OUT}, "4 of 4 prompts to evaluate on are trained on as well"),
        ([_row(1, environment="game")], [_row(2, environment="gmae")], {"evaluation": HELD_OUT, "environments": GAME},
         "evaluation.data, row 0: "),
        (TRAIN, [{"prompt": "9 + 9 ="}], {"data": {"train": TWO}}, "rename with `data.train.1.columns`"),
        (TRAIN, TRAIN, {"data": {"train": [{**each, "rewards": ["typo"]} for each in TWO]}},
         "data.train.0.rewards: there is no reward `typo`"),
        ([_row(1, tools=["calculator"]), _row(2, tools=["add"])], [], {"tools": [{"function": CALCULATOR}]},
         "train.jsonl:2: the column `tools` lists names of the run's tools that the row may use, ['calculator']"),
        ([_row(1, completions=1)], [], {}, "remove_columns: [completions]"),
        (TRAIN, [], {"environments": GAME, "rewards": [{"function": MATCH, "name": "GuessingGame"}]},
         "`GuessingGame` is also the reward of an environment"),
        (TRAIN, [], {"rollout": {"agent": {"function": "examples.agent.agent:runn"}}}, "did you mean 'run'"),
        # addresses of a network that exists in documents only
        (TRAIN, [], {"rollout": {"agent": {"command": ["true"], "host": "192.0.2.7"}}},
         "rollout.agent.host: 192.0.2.7 cannot be bound"),
        (TRAIN, [], {"weights": {"host": "192.0.2.7"}}, "weights.host: 192.0.2.7 cannot be bound on this machine"),
        (TRAIN, [], {"checkpoint": {"best_metric": "rewards/typo"}}, "checkpoint.best_metric: rewards/typo"),
        (TRAIN, [], {"loss": {"type": "custom", "function": "tests.checks:no"}}, "loss.function: tests.checks:no"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_rows_functions_and_addresses_that_cannot_be_used_are_found(
    tmp_path: Path, train: list[dict[str, Any]], held_out: list[dict[str, Any]], sections: dict[str, Any], told: str
) -> None:
    _write(tmp_path / "held.jsonl", held_out)
    config = make_config(tmp_path, **_in_folder(tmp_path, sections))
    _write(tmp_path / "train.jsonl", train)
    _refused(config, told)


def _model(folder: Path, *, config: str = "{}", weights: bytes = (2).to_bytes(8, "little") + b"{}") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)


_HEADER = b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'
_REFERENCE = {"type": "dapo", "beta": 0.1}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"launch": {"device": "cuda"}}, "launch.device: cuda, but"),
        ({"inference": {"embedded": {"device": "cuda"}}}, "inference.embedded.device: cuda, but"),
        ({"model": {"lora": {}}}, "model.lora: needs the package"),
        ({"tracking": [{"type": "wandb", "project": "x"}]}, "tracking.0.type: wandb: needs the package"),
        ({"loss": {**_REFERENCE, "reference": "{folder}/none"}}, "loss.reference: {folder}/none does not exist"),
        ({"loss": {**_REFERENCE, "reference": "{folder}/other"}}, "has a vocab_size of 9, model.path one of 7"),
        ({"model": {"path": "{folder}/train.jsonl"}}, "model.path: {folder}/train.jsonl is a file"),
        ({"model": {"path": "{folder}/cut"}}, "model.safetensors is not a complete safetensors file: "),
        ({"model": {"path": "{folder}/renamed"}}, "neither model.safetensors nor model.safetensors.index.json exists"),
        ({"model": {"path": "{folder}/gpt_oss"}}, "has attention sinks; set inference.engine: vllm"),
        ({"model": {"path": "{folder}/moe"}}, "embedded cannot serve qwen3_moe, which is a mixture of experts"),
        ({"model": {"path": "{folder}/mistral"}}, "set inference.max_model_len (now 2048) to at most 32, or inference.engine"),
        ({"model": {"path": "{folder}/mamba"}}, "has layers of the kind recurrent"),
        ({"model": {"path": "{folder}/fp8"}}, "are quantized"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_model_a_package_or_a_device_that_would_fail_later_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _model(tmp_path / "other", config='{"vocab_size": 9}')
    _model(tmp_path / "cut", weights=len(_HEADER).to_bytes(8, "little") + _HEADER + b"0" * 30)
    _model(tmp_path / "renamed")
    (tmp_path / "renamed" / "model.safetensors").rename(tmp_path / "renamed" / "weights.safetensors")
    _model(tmp_path / "gpt_oss", config='{"model_type": "gpt_oss", "sliding_window": 128, "num_local_experts": 1}')
    _model(tmp_path / "fp8", config='{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}')
    _model(tmp_path / "moe", config='{"model_type": "qwen3_moe", "num_experts": 8}')
    _model(tmp_path / "mistral", config='{"model_type": "mistral", "sliding_window": 32}')
    _model(tmp_path / "mamba", config='{"model_type": "zamba2"}')
    config = make_config(tmp_path, **_in_folder(tmp_path, sections))
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 7}')
    _refused(config, told.replace("{folder}", str(tmp_path)))


def test_adapters_beside_experts_are_refused_where_vllm_has_no_gpu(tmp_path: Path) -> None:
    _model(tmp_path / "moe", config='{"model_type": "qwen3_moe", "num_experts": 8}')
    config = make_config(tmp_path, model={"path": str(tmp_path / "moe"), "lora": {"push": "adapter_swap"}})
    _refused(config, "model.lora.push: adapter_swap", engine=VLLM_ON_CPU)
    check_inputs(config, engine=VLLM_ON_GPU)


def _with_tokenizer(folder: Path, *, vocab_size: int = 500, **sections: Any) -> ExperimentConfig:
    config = make_config(folder, **{**FORMAT, **sections})
    train_tokenizer(["1 + 2 = 3"]).save_pretrained(config.model.path)
    (folder / "model" / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return config


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
USER = {"role": "user", "content": "1 + 1 ="}
ASSISTANT = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([_row(1), {"prompt": [USER, ASSISTANT]}], "1 of 2 prompts end in an assistant's message"),
        ([_row(1), {"prompt": [{"role": "system", "content": "Be brief."}]}], "1 of 2 prompts end in neither"),
        ([_row(1), {"prompt": [{"role": "user", "content": " "}]}], "1 of 2 prompts have no text"),
        ([_row(1), {"prompt": json.dumps([USER])}, {"prompt": "1 + 1"}], "1 of 3 prompts are the JSON text of messages"),
        ([{"prompt": "a"}, {"prompt": [USER]}, {"prompt": "b"}], "1 of 3 prompts are messages, unlike the others"),
        ([_row(1, tools=[]), _row(2, tools=CALLS)], "1 of 2 rows have the column `tools`"),
        ([_row(1), _row(2, environment="game")], "1 of 2 rows have the column `environment`"),
        ([_row(1), _row(2) | {"answer": [ASSISTANT]}], "1 of 2 rows have messages as their answer"),
    ],
    ids=lambda value: str(value)[-40:],
)  # fmt: skip
def test_rows_that_mean_something_else_here_are_counted_and_the_first_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], told: str
) -> None:
    config = _with_tokenizer(tmp_path)
    _write(tmp_path / "train.jsonl", rows)
    for notes in (check_inputs(config, engine=EMBEDDED), check_inputs(config, engine=EMBEDDED, deep=True)):
        (note,) = [note for note in notes if told in note]
        assert "train.jsonl:2" in note
    agent = make_config(tmp_path, rollout={"agent": AGENT})  # it reads rows in its own way
    _write(tmp_path / "train.jsonl", rows)
    assert not [note for note in check_inputs(agent, engine=EMBEDDED) if told in note]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"images": ["a.png"]}, "data.train: 1 of 2 rows have the column `images`"),
        ({"prompt": [USER, {**ASSISTANT, "tool_calls": CALLS}]}, "1 of 2 prompts end in tool calls without results"),
    ],
)
def test_rows_that_no_run_can_use_are_refused(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    config = make_config(tmp_path)
    _write(tmp_path / "train.jsonl", [_row(1, images=[]), _row(2) | row])
    _refused(config, told.replace("{folder}", str(tmp_path)))


def test_a_role_that_the_template_refuses_is_found_in_the_one_row_that_has_it(tmp_path: Path) -> None:
    config = make_config(tmp_path, **FORMAT)
    family("mistral").save_pretrained(config.model.path)
    rows = [_row(number) for number in range(1000)]
    rows[777]["prompt"] = [{"role": "critic", "content": "Be brief."}, USER]
    _write(tmp_path / "train.jsonl", rows)
    _refused(config, "train.jsonl:778: the chat template refuses", deep=True)


def _limits(tokens: int) -> dict[str, Any]:
    return {"inference": {"max_model_len": tokens}, "rollout": {"max_completion_tokens": 4}}


@pytest.mark.parametrize(
    ("vocab_size", "sections", "told"),
    [
        (5, {}, "model.path: the tokenizer has"),
        (500, _limits(8), "data.train: 2 of 2 prompts"),
        (500, {**_limits(300), "evaluation": HELD_OUT}, "evaluation.data: 1 of 1 prompts measured have 300 tokens"),
    ],
)
def test_a_dry_run_measures_prompts_with_the_tokenizer(
    tmp_path: Path, vocab_size: int, sections: dict[str, Any], told: str
) -> None:
    train = _write(tmp_path / "rows.jsonl", [{"prompt": "1 + 2 = " * 3}, {"prompt": "1 + 2 = " * 30}])
    _write(tmp_path / "held.jsonl", [{"prompt": "9 + 9 = " * 100}])
    sections = _in_folder(tmp_path, {"data": {"train": {"type": "jsonl", "path": str(train)}}, **sections})
    _refused(_with_tokenizer(tmp_path, vocab_size=vocab_size, **sections), told, deep=True)
    if told.startswith("data.train: 2"):  # where some fit, it is a note
        noted = check_inputs(_with_tokenizer(tmp_path, **sections | _limits(60)), engine=EMBEDDED, deep=True)
        assert any(note.startswith("data.train: 1 of 2 prompts") for note in noted)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("train.jsonl", '{"prompt": "1", "answer": %s}' % ("9" * 5000), "train.jsonl:1: this line cannot be read as JSON"),
        ("model/config.json", "[]", "config.json is no mapping"),
        ("model/model.safetensors", "", "is not a complete safetensors file"),
        ("model/tokenizer.json", "{}", "cannot load a tokenizer"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_and_no_traceback(tmp_path: Path, name: str, content: str, told: str) -> None:
    config = make_config(tmp_path)
    (tmp_path / name).write_text(content)
    _refused(config, told, deep=True)
