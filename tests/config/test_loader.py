"""Loading: the happy path, the dump, `extends`, the environment and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.config.loader import dump_config, load_config
from grpo_async.config.sections import JsonlSource
from grpo_async.errors import ConfigError

MINIMAL = """\
run: {name: demo}
model:
  path: some/model
data:
  train: {type: jsonl, path: train.jsonl}
rewards:
  - function: my.rewards:exact
"""


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
    text = (
        MINIMAL + "    arguments: {a: 1e-6, b: 010, c: on, d: 1:30, e: 0o17, f: .5, g: ~, h: -.INF, i: '1', j: 1_000}\n"
    )
    config = load_config(_write(tmp_path, text + "optimizer: {lr: 1e-6}\n"))
    assert config.optimizer.lr == 1e-6
    read = config.rewards[0].arguments
    expected = {"a": 1e-6, "b": 10, "c": "on", "d": "1:30", "e": 15, "f": 0.5, "g": None, "i": "1", "j": "1_000"}
    assert read == {**expected, "h": float("-inf")}
    assert isinstance(read["a"], float)


def test_a_dump_is_read_back_to_an_equal_object(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + r"""    arguments: {t: "1e-6", u: "yes", v: "$${HOME} $$$${X}", w: [1.5e-9, null, .inf], x: "a: #b\n", y: 1e300, z: "012"}
optimizer: {lr: 3e-7, betas: [0.9, 0.95]}
evaluation: {data: {type: csv, path: held.csv, columns: {on: prompt}}}
"""
    )
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


def test_a_section_of_another_type_starts_afresh(tmp_path: Path) -> None:
    _write(tmp_path, MINIMAL.replace("{type: jsonl, path: train.jsonl}", "{type: hub, name: x, split: y}"), "base.yaml")
    path = _write(tmp_path, "extends: base.yaml\ndata: {train: {type: csv, path: t.csv}}\n")
    assert load_config(path).data.train.type == "csv"


def test_an_error_points_at_the_file_that_the_value_came_from(tmp_path: Path) -> None:
    _write(tmp_path, MINIMAL + "rollout:\n  group_size: 1\n  temperatur: 2\n", "base.yaml")
    path = _write(tmp_path, "extends: base.yaml\n\nrollout:\n  groups_per_step: 0\n")
    assert _problems(path) == [
        "x.yaml:4: rollout.groups_per_step: input should be greater than or equal to 1 (got 0)",
        "base.yaml:9: rollout.group_size: input should be greater than or equal to 2 (got 1)",
        "base.yaml:10: unknown key 'rollout.temperatur'; did you mean 'temperature'?",
    ]


def test_extends_in_a_cycle_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "extends: x.yaml\n", "b.yaml")
    path = _write(tmp_path, MINIMAL + "extends: b.yaml\n")
    (problem,) = _problems(path)
    assert problem == "b.yaml:1: extends: it closes a cycle: x.yaml -> b.yaml -> x.yaml"


def test_a_missing_base_is_named_at_its_line(tmp_path: Path) -> None:
    (problem,) = _problems(_write(tmp_path, MINIMAL + "extends: bsae.yaml\n"))
    assert problem.startswith("x.yaml:8: extends: there is no file bsae.yaml")


def test_a_missing_file_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    _write(tmp_path, MINIMAL, "quickstart.yaml")
    with pytest.raises(ConfigError, match=r"there is no file .*quickstrat\.yaml; did you mean 'quickstart\.yaml'\?"):
        load_config(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_the_environment_fills_in_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RATE": "3e-6", "NAME": "12", "EMPTY": "", "ROOT": "/data"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MISSING", raising=False)
    text = """
run: {name: "${NAME}", seed: "${MISSING:-5}"}
model: {path: "${ROOT}/m-${MISSING:-small}"}
data: {train: {type: jsonl, path: "${EMPTY:-fallback}.jsonl"}}
rewards: [{function: "a:b", arguments: {literal: "$${HOME}", text: "costs $5"}}]
optimizer:
  lr: ${RATE}
  warmup_steps: ${MISSING:-2}
inference:
  tls: ${EMPTY}
"""
    config = load_config(_write(tmp_path, text))
    assert (config.run.name, config.run.seed) == ("12", 5)  # in quotes: text stays text
    assert config.model.path == "/data/m-small"
    assert isinstance(config.data.train, JsonlSource)
    assert config.data.train.path == Path("fallback.jsonl")
    assert config.rewards[0].arguments == {"literal": "${HOME}", "text": "costs $5"}
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (3e-6, 2)
    assert config.inference.tls is None  # nothing at all, unquoted, is YAML's null


def test_bad_references_are_problems_and_say_nothing_else_about_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    path = _write(tmp_path, MINIMAL + "optimizer:\n  lr: ${MISSING}\n  eps: ${9}\n  schedule: '${OPEN'\n")
    assert _problems(path) == [
        "x.yaml:9: optimizer.lr: the environment variable 'MISSING' is not set; set it or write ${MISSING:-default}",
        "x.yaml:10: optimizer.eps: '${9}' does not name an environment variable; write $${ for a literal ${",
        "x.yaml:11: optimizer.schedule: '${OPEN' has no closing brace; write $${ for a literal ${",
    ]


def test_what_a_batch_script_says_is_left_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.delenv("MISSING", raising=False)
    text = """
launch:
  slurm:
    account: ${SECRET}
    setup: ["export A=${SECRET}", "b ${MISSING} ${1%%.*}", "c $${SECRET}", "d ${OPEN"]
    options: ["--comment=${SECRET}"]
"""
    config = load_config(_write(tmp_path, MINIMAL + text))
    slurm = config.launch.slurm
    assert slurm.setup == ["export A=${SECRET}", "b ${MISSING} ${1%%.*}", "c ${SECRET}", "d ${OPEN"]
    assert slurm.options == ["--comment=${SECRET}"]
    assert slurm.account == "s3cret"
    assert load_config(_write(tmp_path, dump_config(config), "resolved.yaml")) == config
    config = load_config(
        tmp_path / "x.yaml", ["launch.slurm.setup.0=echo ${SECRET}", "launch.slurm.partition=${SECRET}"]
    )
    assert (config.launch.slurm.setup[0], config.launch.slurm.partition) == ("echo ${SECRET}", "s3cret")


def test_a_variable_of_a_base_that_is_replaced_need_not_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    _write(tmp_path, MINIMAL.replace("some/model", "${MISSING}"), "base.yaml")
    assert load_config(_write(tmp_path, "extends: base.yaml\nmodel: {path: own}\n")).model.path == "own"


def test_overrides_take_precedence_and_are_read_as_yaml(tmp_path: Path) -> None:
    overrides = [
        *("optimizer.lr=1e-5", "rewards.0.weight=2", "evaluation.data={type: csv, path: e.csv}"),
        *("optimizer.betas=[0.8, 0.9]", "model.path=a=b", "optimizer.lr=2e-5"),
    ]
    config = load_config(_write(tmp_path, MINIMAL + "optimizer: {lr: 1}\n"), overrides)
    assert config.optimizer.lr == 2e-5
    assert config.rewards[0].weight == 2.0
    assert config.evaluation is not None
    assert config.evaluation.data.type == "csv"
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.model.path == "a=b"
