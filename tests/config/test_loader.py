"""Loading: what is read from files, the environment and overrides; and every kind of mistake, as a person reads it: where it is,
what is wrong, what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.config.loader import dump_config, load_config
from grpo_async.errors import ConfigError
from tests.support.configs import MINIMAL


def _write(folder: Path, text: str, name: str = "x.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.replace(f"{path.parent}/", "") for line in str(caught.value).splitlines()]


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-6 as text, 010 as 8, on as true and 1:30 as 90
    arguments = "{a: 1e-6, b: 010, c: on, d: 1:30, e: 0o17, f: .5, g: ~, h: -.INF, i: '1', j: 1_000}"
    text = MINIMAL.replace('"a:b"', f'"a:b", arguments: {arguments}')
    config = load_config(_write(tmp_path, text + "optimizer: {lr: 1e-6}\n"))
    assert config.optimizer.lr == 1e-6
    read = config.rewards[0].arguments
    expected = {"a": 1e-6, "b": 10, "c": "on", "d": "1:30", "e": 15, "f": 0.5, "g": None, "i": "1", "j": "1_000"}
    assert read == {**expected, "h": float("-inf")}
    assert isinstance(read["a"], float)


def test_a_dump_is_read_back_to_an_equal_object(tmp_path: Path) -> None:
    arguments = r"""{t: "1e-6", u: "yes", v: "$${HOME} $$$${X}", w: [1.5e-9, null, .inf], x: "a: #b\n", z: "012"}"""
    text = MINIMAL.replace('"a:b"', f'"a:b", arguments: {arguments}') + "optimizer: {lr: 3e-7, betas: [0.9, 0.95]}\n"
    config = load_config(_write(tmp_path, text))
    assert config.rewards[0].arguments["v"] == "${HOME} $$${X}"
    dumped = dump_config(config)
    again = load_config(_write(tmp_path, dumped, "dumped.yaml"))
    assert again == config
    assert again.rewards[0].arguments == config.rewards[0].arguments
    assert dump_config(again) == dumped


def test_a_file_extends_others_and_later_ones_win(tmp_path: Path) -> None:
    _write(tmp_path, MINIMAL + "rollout: {group_size: 4, temperature: 0.5}\n", "bases/base.yaml")
    _write(tmp_path, "rollout: {temperature: 0.7, groups_per_step: 3}\n", "bases/more.yaml")
    path = _write(
        tmp_path, "extends: [bases/base.yaml, bases/more.yaml]\nrollout: {groups_per_step: 5}\nrun: {seed: 7}\n"
    )
    config = load_config(path)
    rollout = config.rollout
    assert (rollout.group_size, rollout.temperature, rollout.groups_per_step) == (4, 0.7, 5)
    assert (config.run.name, config.run.seed) == ("demo", 7)


def test_an_error_points_at_the_file_that_the_value_came_from(tmp_path: Path) -> None:
    _write(tmp_path, MINIMAL + "rollout:\n  group_size: 1\n", "base.yaml")
    path = _write(tmp_path, "extends: base.yaml\n\nrollout:\n  groups_per_step: 0\n")
    assert _problems(path) == [
        "x.yaml:4: rollout.groups_per_step: input should be greater than or equal to 1 (got 0)",
        "base.yaml:6: rollout.group_size: input should be greater than or equal to 2 (got 1)",
    ]


def test_files_that_are_not_there_and_cycles_are_named(tmp_path: Path) -> None:
    _write(tmp_path, "extends: x.yaml\n", "b.yaml")
    path = _write(tmp_path, MINIMAL + "extends: b.yaml\n")
    assert _problems(path) == ["b.yaml:1: extends: it closes a cycle: x.yaml -> b.yaml -> x.yaml"]
    (problem,) = _problems(_write(tmp_path, MINIMAL + "extends: bsae.yaml\n"))
    assert problem.startswith("x.yaml:5: extends: there is no file bsae.yaml")
    (problem,) = _problems(_write(tmp_path, MINIMAL + "extends: xx.yaml\n"))
    assert "did you mean 'x.yaml'" not in problem, "the file itself"
    (problem,) = _problems(tmp_path / "y.yaml")
    assert problem == "there is no file y.yaml; did you mean 'x.yaml'?"


def test_the_environment_fills_in_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RATE": "3e-6", "NAME": "12", "EMPTY": "", "ROOT": "/data"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MISSING", raising=False)
    text = """
run: {name: "${NAME}", seed: "${MISSING:-5}"}
model: {path: "${ROOT}/m-${EMPTY:-small}"}
data: {train: {type: jsonl, path: t}}
rewards: [{function: "a:b", arguments: {literal: "$${HOME}", text: "costs $5"}}]
optimizer:
  lr: ${RATE}
inference:
  dtype: ${EMPTY}
"""
    config = load_config(_write(tmp_path, text))
    assert (config.run.name, config.run.seed) == ("12", 5)  # in quotes: text stays text
    assert config.model.path == "/data/m-small"
    assert config.rewards[0].arguments == {"literal": "${HOME}", "text": "costs $5"}
    assert config.optimizer.lr == 3e-6
    assert config.inference.dtype is None  # nothing at all, unquoted, is YAML's null


def test_bad_references_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    missing, unclosed = _problems(_write(tmp_path, MINIMAL + "optimizer:\n  lr: ${MISSING}\n  schedule: '${OPEN'\n"))
    assert missing == (
        "x.yaml:6: optimizer.lr: the environment variable 'MISSING' is not set; set it or write ${MISSING:-default}"
    )
    assert unclosed.startswith("x.yaml:7: optimizer.schedule: '${OPEN' is not written ${NAME}")


def test_a_variable_of_a_base_that_is_replaced_need_not_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    _write(tmp_path, MINIMAL.replace("path: m}", 'path: "${MISSING}"}'), "base.yaml")
    assert load_config(_write(tmp_path, "extends: base.yaml\nmodel: {path: own}\n")).model.path == "own"


def test_overrides_take_precedence_and_are_read_as_yaml(tmp_path: Path) -> None:
    overrides = [
        *("optimizer.lr=1e-5", "rewards.0.weight=2", "evaluation.data={type: parquet, path: e.csv}"),
        *("optimizer.betas=[0.8, 0.9]", "model.path=a=b", "optimizer.lr=2e-5"),
    ]
    config = load_config(_write(tmp_path, MINIMAL + "optimizer: {lr: 1}\n"), overrides)
    assert config.optimizer.lr == 2e-5
    assert config.rewards[0].weight == 2.0
    assert config.evaluation is not None
    assert config.evaluation.data.type == "parquet"
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.model.path == "a=b"


# ---- mistakes ----


def test_everything_wrong_is_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
run: {name: demo}
rollout:
  group_sise: 4
model: {path: m}
data: {train: {type: jsonl, path: t}}
rewards:
  - function: a:b
  - function: nope
    wieght: 2
inference:
  vllm:
    gpu_memory_utilization: 1.4
model: {path: n}
"""
    assert _problems(_write(tmp_path, text), "optim.lrr=3") == [
        "x.yaml:3: unknown key 'rollout.group_sise'; did you mean 'group_size'?",
        "x.yaml:8: rewards.1.function: 'nope' is not written module:attribute, with a colon, such as my_rewards:length_reward",
        "x.yaml:9: unknown key 'rewards.1.wieght'; did you mean 'weight'?",
        "x.yaml:12: inference.vllm.gpu_memory_utilization: input should be less than or equal to 1 (got 1.4)",
        "x.yaml:13: 'model' is given twice (first at x.yaml:4)",
        "--set optim.lrr=3: unknown key 'optim.lrr'; did you mean 'optimizer.lr'?",
    ]


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("actor_rollout_ref: {rollout: {n: 8}}", "unknown key 'actor_rollout_ref.rollout.n'; here it is 'rollout.group_size'"),
        ("rollout: {lr: 1}", "unknown key 'rollout.lr'; did you mean 'optimizer.lr'?"),
        ("loss: {reference: 12}", "loss.reference: input should be a valid string (got 12); put it in quotes"),
        (
            "inference: {engine: vlm}",
            "inference.engine: input should be 'auto', 'vllm' or 'embedded' (got 'vlm'); did you mean 'vllm'?",
        ),
        (
            "evaluation: {data: {path: x, subset: y}}",
            "unknown key 'evaluation.data.subset' of type 'jsonl'; it belongs to type 'hub'",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_explained(tmp_path: Path, added: str, expected: str) -> None:
    assert _problems(_write(tmp_path, MINIMAL + added + "\n")) == [f"x.yaml:5: {expected}"]


def test_a_rule_points_at_a_setting_that_is_written_the_override_first(tmp_path: Path) -> None:
    (problem,) = _problems(_write(tmp_path, MINIMAL + "rollout:\n  max_completion_tokens: 4000\n"))
    assert problem.startswith("x.yaml:6: rollout.max_completion_tokens: 4000 leaves no room for a prompt in")
    (problem,) = _problems(_write(tmp_path, MINIMAL), "training.weight_sync_steps=9")
    assert problem.startswith("--set training.weight_sync_steps=9: rollout.max_staleness: 1 with")


@pytest.mark.parametrize(
    "override",
    [
        "model.chat_template_kwargs=sk-123",
        "tracking=[{type: wandb, project: [sk-123]}]",
        "inference.urls=[http://u:sk-123@h:1]",
    ],
)
def test_an_error_does_not_print_what_may_be_secret(tmp_path: Path, override: str) -> None:
    (problem,) = _problems(_write(tmp_path, MINIMAL), override)
    assert "sk-123" not in problem
