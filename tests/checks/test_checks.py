"""What the startup finds in data, tools and environments before any process is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_async.checks import disk
from grpo_async.checks.config_checks import check_inputs
from grpo_async.errors import ConfigError
from grpo_async.quickstart.model import train_tokenizer
from grpo_async.servers.engine_choice import EngineChoice
from tests.launcher.support import EMBEDDED, make_config
from tests.support.local_server import local_server

GAME = {"game": {"factory": "grpo_async.envs.guessing_game:GuessingGame"}}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _row(number: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{number} + 1 ="}], "answer": str(number + 1)}


def test_a_row_far_down_a_small_file_is_found_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    rows = [_row(number) for number in range(20)]
    rows[16]["prompt"] = 7
    _write(tmp_path / "train.jsonl", rows)
    with pytest.raises(ConfigError, match=r"train\.jsonl:17: .*`prompt`"):
        check_inputs(config, engine=EMBEDDED)


def test_a_form_of_the_output_needs_vllm(tmp_path: Path) -> None:
    form = {"structured_outputs": {"regex": "[0-9]+"}}
    config = make_config(
        tmp_path,
        rollout=form,
        loss={"proximal": "recomputed", "correction": {"level": "token"}},
        inference={"engine": "auto"},
    )
    _write(tmp_path / "train.jsonl", [_row(number) for number in range(20)])
    with pytest.raises(ConfigError, match=r"rollout\.structured_outputs: the embedded engine has no grammars"):
        check_inputs(config, engine=EMBEDDED)


def test_prompts_to_evaluate_on_that_are_trained_on_are_found_at_once(tmp_path: Path) -> None:
    train = _write(tmp_path / "rows.jsonl", [_row(number) for number in range(4)])
    same = {"type": "jsonl", "path": str(train)}
    config = make_config(tmp_path, data={"train": same}, evaluation={"data": same})
    with pytest.raises(ConfigError, match="4 of 4 prompts to evaluate on are trained on as well"):
        check_inputs(config, engine=EMBEDDED)


def test_rows_that_an_environment_cannot_use_are_found_in_both_sources(tmp_path: Path) -> None:
    train = _write(tmp_path / "rows.jsonl", [{**_row(1), "environment": "game"}])
    held_out = _write(tmp_path / "held.jsonl", [{**_row(2), "environment": "gmae"}])
    config = make_config(
        tmp_path,
        data={"train": {"type": "jsonl", "path": str(train)}},
        evaluation={"data": {"type": "jsonl", "path": str(held_out)}},
        environments=GAME,
    )
    with pytest.raises(ConfigError, match=r"evaluation\.data, row 0: .*'gmae'.*did you mean 'game'\?"):
        check_inputs(config, engine=EMBEDDED)


def test_a_function_named_like_an_environments_reward_is_refused(tmp_path: Path) -> None:
    reward = {"function": "grpo_async.rewards.text:exact_match", "name": "GuessingGame"}
    config = make_config(tmp_path, environments=GAME, rewards=[reward])
    with pytest.raises(ConfigError, match="`GuessingGame` is also the reward of an environment"):
        check_inputs(config, engine=EMBEDDED)


def test_a_run_with_an_agent_is_described_and_what_it_names_is_looked_for(tmp_path: Path) -> None:
    reward = "grpo_async.rewards.text:exact_match"
    agent = {"function": "grpo_async.quickstart.agent:run", "max_concurrent": 3}
    config = make_config(tmp_path, rollout={"agent": agent}, rewards=[{"function": reward}])
    notes = "\n".join(check_inputs(config, engine=EMBEDDED))
    assert "rollout.agent: grpo_async.quickstart.agent:run makes the rollouts" in notes
    assert "3 at once, each for at most 300 s" in notes
    for section, told in (
        ({"function": "grpo_async.quickstart.agent:runn"}, r"rollout\.agent\.function: .*did you mean 'run'"),
        ({"function": "no_such_module:run"}, r"rollout\.agent\.function: no_such_module:run: there is no module"),
        ({"command": ["no-such-program"]}, r"no-such-program is not on PATH"),
        ({"command": ["true"], "host": "192.0.2.7"}, r"rollout\.agent\.host: 192\.0\.2\.7 cannot be bound"),
    ):
        broken = make_config(tmp_path, rollout={"agent": section}, rewards=[{"function": reward}])
        with pytest.raises(ConfigError, match=told):
            check_inputs(broken, engine=EMBEDDED)
    twice = make_config(tmp_path, rollout={"agent": agent}, rewards=[{"function": reward, "name": "agent"}])
    with pytest.raises(ConfigError, match="`agent` is also the reward of an environment or of the agent"):
        check_inputs(twice, engine=EMBEDDED)


def test_an_address_for_weights_that_is_not_of_this_machine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(tmp_path, weights={"host": "192.0.2.7"})  # of a network that exists in documents only
    with pytest.raises(ConfigError, match=r"weights\.host: 192\.0\.2\.7 cannot be bound on this machine"):
        check_inputs(config, engine=EMBEDDED)


def _model(folder: Path, *, config: str = "{}", weights: bytes = (2).to_bytes(8, "little") + b"{}") -> str:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


_HEADER = b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'
_CUT = len(_HEADER).to_bytes(8, "little") + _HEADER + b"0" * 30


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"launch": {"device": "cuda"}}, "launch.device: cuda, but"),
        ({"inference": {"embedded": {"device": "cuda"}}}, "inference.embedded.device: cuda, but"),
        ({"model": {"lora": {}}}, "model.lora: needs the package"),
        ({"tracking": [{"type": "mlflow", "experiment": "x"}]}, "tracking.0.type: mlflow: needs the package"),
        ({"data": {"train": {"type": "hub", "name": "a/b"}}}, "data.train.type: hub: needs the package"),
        (
            {"loss": {"type": "dapo", "beta": 0.1, "reference": "{folder}/none"}},
            "loss.reference: {folder}/none does not exist",
        ),
        (
            {"loss": {"type": "dapo", "beta": 0.1, "reference": "{folder}/other"}},
            "has a vocabulary of 9 tokens, model.path one of 7",
        ),
        ({"model": {"path": "{folder}/train.jsonl"}}, "model.path: {folder}/train.jsonl is a file"),
        ({"model": {"path": "{folder}/cut"}}, "model.safetensors is not a complete safetensors file: "),
        (
            {"model": {"path": "{folder}/renamed"}},
            "neither model.safetensors nor model.safetensors.index.json exists",
        ),
        ({"model": {"path": "{folder}/deep"}}, "model.path: cannot read {folder}/deep/config.json"),
        (
            {"model": {"path": "{folder}/gpt_oss"}},
            "embedded cannot serve gpt_oss, which has attention sinks; set inference.engine: vllm",
        ),
        ({"model": {"path": "{folder}/moe"}}, "embedded cannot serve qwen3_moe, which is a mixture of experts"),
        (
            {"model": {"path": "{folder}/mistral"}},
            "set inference.max_model_len (now 2048) to at most 32, or inference.engine: vllm",
        ),
        ({"model": {"path": "{folder}/mamba"}}, "linear_attention"),
        ({"checkpoint": {"best_metric": "rewards/typo"}}, "checkpoint.best_metric: rewards/typo"),
        ({"loss": {"type": "custom", "function": "tests.checks:no"}}, "loss.function: tests.checks:no"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_would_fail_later_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    _model(tmp_path / "other", config='{"vocab_size": 9}')
    _model(tmp_path / "cut", weights=_CUT)
    _model(tmp_path / "renamed")
    (tmp_path / "renamed" / "model.safetensors").rename(tmp_path / "renamed" / "weights.safetensors")
    _model(tmp_path / "deep", config="[" * 100_000)
    _model(tmp_path / "gpt_oss", config='{"model_type": "gpt_oss", "sliding_window": 128, "num_local_experts": 1}')
    _model(tmp_path / "moe", config='{"model_type": "qwen3_moe", "num_experts": 8}')
    _model(tmp_path / "mistral", config='{"model_type": "mistral", "sliding_window": 32}')
    _model(tmp_path / "mamba", config='{"model_type": "zamba2"}')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = make_config(tmp_path, **json.loads(json.dumps(sections).replace("{folder}", str(tmp_path))))
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(ConfigError) as caught:
        check_inputs(config, engine=EMBEDDED)
    assert told.replace("{folder}", str(tmp_path)) in str(caught.value)


def test_what_only_the_held_out_rows_have_or_lack_is_told_before_anything_starts(tmp_path: Path) -> None:
    held_out = _write(tmp_path / "held.jsonl", [{"prompt": "9 + 9 ="}])
    config = make_config(tmp_path, evaluation={"data": {"type": "jsonl", "path": str(held_out)}})
    with pytest.raises(
        ConfigError, match=r"needs the column\(s\) \['answer'\].*rename with `evaluation\.data\.columns`"
    ):
        check_inputs(config, engine=EMBEDDED)
    train_tokenizer(["1 + 2 = 3"]).save_pretrained(config.model.path)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 500}))
    _write(held_out, [{"prompt": "9 + 9 =" * 20, "answer": "18"}])
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"max_model_len": 60})})
    with pytest.raises(ConfigError, match=r"^evaluation\.data: 1 of 1 prompts measured have 60 tokens or more"):
        check_inputs(config, engine=EMBEDDED)


def test_a_server_that_is_none_of_ours_is_told_and_one_that_is_not_there_yet_noted(tmp_path: Path) -> None:
    external = EngineChoice(engine="external", reason="a test says so")
    with local_server(refuses={"/rollout/info": 404}) as server:
        config = make_config(tmp_path, inference={"urls": [server.url]})
        with pytest.raises(ConfigError, match=rf"inference\.urls: {server.url}: it is not a server of grpo-async"):
            check_inputs(config, engine=external)
    notes = check_inputs(config, engine=external)
    assert any(note.startswith(f"inference.urls: {server.url} is not serving now (") for note in notes)


def test_a_dry_run_knows_that_the_disk_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, rewards=[{"function": "grpo_async.rewards.format:think_format"}])
    _write(tmp_path / "train.jsonl", [{"prompt": "1 + 2 ="}])
    train_tokenizer(["1 + 2 = 3"]).save_pretrained(config.model.path)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 500}))
    save_file({"w": np.zeros((1000, 1000), np.float32)}, tmp_path / "model" / "model.safetensors")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=30_000_000))
    check_inputs(config, engine=EMBEDDED)  # a start leaves it to the preflight
    with pytest.raises(ConfigError, match=r"run\.dir: 3 checkpoint\(s\) of 11\.4 MiB .* not enough"):
        check_inputs(config, engine=EMBEDDED, deep=True)


@pytest.mark.parametrize("column", ["completions", "trainer_state"])
def test_a_column_that_would_hide_what_rewards_get_is_refused(tmp_path: Path, column: str) -> None:
    config = make_config(tmp_path)
    _write(tmp_path / "train.jsonl", [{**_row(number), column: 1} for number in range(2)])
    with pytest.raises(ConfigError, match=rf"data\.train: the column `{column}` .*remove_columns: \[{column}\]"):
        check_inputs(config, engine=EMBEDDED)


@pytest.mark.parametrize(
    ("vocab_size", "sections", "told", "is_note"),
    [
        (5, {}, "model.path: the tokenizer has", False),
        (
            500,
            {"inference": {"max_model_len": 8}, "rollout": {"max_completion_tokens": 4}},
            "data.train: 2 of 2 prompts",
            False,
        ),
        (
            500,
            {"inference": {"max_model_len": 60}, "rollout": {"max_completion_tokens": 4}},
            "data.train: 1 of 2 prompts",
            True,
        ),
        (500, {"data": {"train": {"max_prompt_tokens": 1}}}, "data.train.max_prompt_tokens: 1 leaves no prompt", False),
    ],
)
def test_a_dry_run_measures_prompts_with_the_tokenizer(
    tmp_path: Path, vocab_size: int, sections: dict[str, Any], told: str, is_note: bool
) -> None:
    train = _write(tmp_path / "rows.jsonl", [{"prompt": "1 + 2 = " * 3}, {"prompt": "1 + 2 = " * 30}])
    data = {"train": {"type": "jsonl", "path": str(train), **sections.get("data", {}).get("train", {})}}
    rewards = [{"function": "grpo_async.rewards.format:think_format"}]
    config = make_config(tmp_path, **{**sections, "data": data, "rewards": rewards})
    train_tokenizer(["1 + 2 = 3"]).save_pretrained(config.model.path)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    if is_note:
        assert any(told in note for note in check_inputs(config, engine=EMBEDDED, deep=True))
    else:
        with pytest.raises(ConfigError, match=re.escape(told)):
            check_inputs(config, engine=EMBEDDED, deep=True)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "train.jsonl",
            '{"prompt": "1 + 1", "answer": %s}' % ("9" * 5000),
            "train.jsonl:1: this line cannot be read as JSON",
        ),
        ("model/model.safetensors.index.json", "null", "model.safetensors.index.json is broken"),
        ("model/config.json", '{"layer_types": [[1]]}', "config.json has layer_types: [[1]]"),
        ("model/config.json", '{"vocab_size": "7"}', "config.json has vocab_size: '7'"),
        ("model/config.json", "[]", "config.json is no mapping"),
        ("model/model.safetensors", "", "is not a complete safetensors file"),
        ("model/tokenizer.json", "{}", "cannot load a tokenizer"),
        ("model/tokenizer.json", "[" * 5000, "cannot load a tokenizer"),
    ],
)
def test_a_broken_file_is_named_and_no_traceback(tmp_path: Path, name: str, content: str, told: str) -> None:
    config = make_config(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_inputs(config, engine=EMBEDDED, deep=True)
