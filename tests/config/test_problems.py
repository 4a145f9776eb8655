"""Every kind of mistake, word for word: what a person reads is the interface."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from grpo_async.config.base import StrictModel
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.loader import dump_config, load_config
from grpo_async.config.problems import report, to_plain
from grpo_async.config.shape import _FOREIGN, Shape
from grpo_async.config.tree import Place, Problems, read_yaml_value
from grpo_async.errors import ConfigError

MINIMAL = """\
run: {name: demo}
model: {path: m}
data: {train: {type: jsonl, path: t}}
rewards: [{function: "a:b"}]
"""  # 4 lines: what a test adds begins at line 5


def _problems(folder: Path, text: str, *overrides: str) -> list[str]:
    path = folder / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.replace(f"{folder}/", "") for line in str(caught.value).splitlines()]


def test_everything_wrong_is_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
run: {name: demo}
rollout:
  group_sise: 4
model: {path: m}
data: {train: {type: jsonl, path: t}}
rewards: [{function: "a:b"}]
inference:
  vllm:
    gpu_memory_utilization: 1.4
model: {path: n}
"""
    assert _problems(tmp_path, text, "optim.lrr=3") == [
        "x.yaml:3: unknown key 'rollout.group_sise'; did you mean 'group_size'?",
        "x.yaml:9: inference.vllm.gpu_memory_utilization: input should be less than or equal to 1 (got 1.4)",
        "x.yaml:10: 'model' is given twice (first at x.yaml:4)",
        "--set optim.lrr=3: unknown key 'optim.lrr'; did you mean 'optimizer.lr'?",
    ]


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("optim: {lr: 1}", "unknown key 'optim'; did you mean 'optimizer'?"),
        ("rollout: {lr: 1}", "unknown key 'rollout.lr'; did you mean 'optimizer.lr'?"),
        ("rollout: {zzz: 1}", "unknown key 'rollout.zzz'"),
        (
            "rollout: {group_size: many}",
            "rollout.group_size: input should be a valid integer, unable to parse string as an integer (got 'many')",
        ),
        ("rollout: {temperature: null}", "rollout.temperature: input should be a valid number (got null)"),
        ("rollout:", "rollout: input should be a mapping of keys (got null)"),
        ("rollout: [1]", "rollout: input should be a mapping of keys (got a list)"),
        (
            "inference: {engine: vlm}",
            "inference.engine: input should be 'auto', 'vllm' or 'embedded' (got 'vlm'); did you mean 'vllm'?",
        ),
        (
            "checkpoint: {keep_last: true, every_steps: 0.5}",
            "checkpoint.every_steps: input should be a valid integer, got a number with a fractional part (got 0.5)",
        ),
        ("optimizer: {betas: [0.9]}", "optimizer.betas.1: this key is required"),
        ("optimizer: {lr: .inf}", "optimizer.lr: input should be a finite number (got inf)"),
        (
            "loss: {type: ppo}",
            "loss.type: input should be one of 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'sapo', 'custom' (got 'ppo')",
        ),
        (
            "evaluation: {data: {type: jsnl, path: x}}",
            "evaluation.data.type: input should be one of 'jsonl', 'csv', 'parquet', 'hub', 'reasoning_gym', "
            "'generator', 'environment' (got 'jsnl'); did you mean 'jsonl'?",
        ),
        ("evaluation: {data: {type: csv}}", "evaluation.data.path: this key is required"),
        (
            "evaluation: {data: {type: csv, path: x, limt: 3}}",
            "unknown key 'evaluation.data.limt'; did you mean 'limit'?",
        ),
        (
            "evaluation: {data: {type: csv, path: x, split: y}}",
            "unknown key 'evaluation.data.split' of type 'csv'; it belongs to type 'hub'",
        ),
        (
            "evaluation: {data: {path: x, subset: y}}",
            "unknown key 'evaluation.data.subset' of type 'jsonl'; it belongs to type 'hub'",
        ),
        ("evaluation: {data: x.jsonl}", "evaluation.data: input should be a mapping of keys (got 'x.jsonl')"),
        ("rollout: !mine {}", "rollout: the tag '!mine' is not supported"),
        ("rollout: {group_size: !!int four}", "rollout.group_size: 'four' does not fit its tag '!!int'"),
        (
            "rollout: {<<: {group_size: 2}}",
            "'rollout.<<': merge keys (<<) are not supported; share settings by `extends`",
        ),
        ("rollout: &r {group_size: *r}", "rollout.group_size: refers to itself"),
        ("rollout: {? [1] : 2}", "rollout: keys are single words, not lists or mappings"),
    ],
)
def test_a_mistake_is_explained(tmp_path: Path, added: str, expected: str) -> None:
    assert _problems(tmp_path, MINIMAL + added + "\n") == [f"x.yaml:5: {expected}"]


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ("x: " + "[" * 2000 + "]" * 2000, "nested deeper"),
        ("x: " + "{a: " * 2000 + "}" * 2000, "nested deeper"),
        (
            "\n".join(["a0: &a0 [0]", *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9))]),
            "unfold",
        ),
        ("run: {seed: " + "9" * 5000 + "}", "run.seed: 9999"),
        ("run: {seed: 0x" + "f" * 5000 + "}", "run.seed: 0xff"),
        ("run: {seed: 99999999999}", "run.seed"),
        ("training:\n  max_steps: ${DIGITS}", "training.max_steps: ${DIGITS}: 9999"),
        ('run: {dir: "a\\ud800"}', "run.dir: holds '\\ud800'"),
        ('run: {dir: "a\\0b"}', "run.dir: holds '\\x00'"),
        ('run: {"a\\0b": 1}', "'a\\x00b'"),
        ("run: {dir: ~nobody-of-this-name/x}", "run.dir: there is no home"),
        (f"run: {{dir: {'x' * 300}}}", "run.dir: a name has at most 255"),
        (f"model: {{path: {'x/' * 3000}}}", "model.path: a name has"),
        ('extends: "a\\0b"', "extends: holds"),
        (f"extends: {'x' * 300}", "File name too long"),
        ("tool_calling: {max_result_chars: !!bool yes}", "tool_calling.max_result_chars: 'yes'"),
        ("inference: {replicas: 99999999999999999999}", "inference.replicas: 99999999999999999999"),
        ("inference: {replicas: 100000}", "inference.replicas"),
        ("inference: {max_model_len: 9999999999}", "inference.max_model_len: 9999999999"),
        ("inference: {urls: ['http://[']}", "inference.urls.0: 'http://['"),
        ("inference: {urls: ['http://a:99999']}", "inference.urls.0: 'http://a:99999'"),
        ("inference: {host: a b}", "inference.host: 'a b'"),
        (f"inference: {{host: {'a' * 100}}}", "inference.host: 'aaa"),
        ("inference: {startup_timeout_s: 1e300}", "inference.startup_timeout_s"),
        ("optimizer: {betas: [0.9, 1.5]}", "optimizer.betas.1"),
        ("optimizer: {lr: 1e38}", "optimizer.lr"),
        ("optimizer: {eps: 1e-320}", "optimizer.eps"),
        ("rollout: {temperature: 1e-6}", "rollout.temperature"),
        ("evaluation: {temperature: 1e-6}", "evaluation.temperature"),
        ("tools: [{function: my.module.name}]", "did you mean 'my.module:name'?"),
        ("tools: [{function: '.:.'}]", "tools.0.function"),
    ],
    ids=lambda text: text[:30],
)
def test_what_would_stall_or_break_what_comes_after_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: str, told: str
) -> None:
    monkeypatch.setenv("DIGITS", "9" * 5000)
    key = added.split(":")[0]
    kept = [line for line in MINIMAL.splitlines() if not line.startswith(f"{key}:")]
    if key == "run":
        added = added.replace("{", "{name: demo, ", 1)
    problems = _problems(tmp_path, "\n".join([*kept, added]) + "\n")
    assert any(told in problem for problem in problems), problems
    assert all(len(problem) < 1000 and problem.isprintable() for problem in problems)


def test_files_that_extend_each_other_many_times_over_are_not_read_without_end(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.yaml").write_text(f"extends: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "30.yaml").write_text(MINIMAL)
    assert any("extends: more than 30 files" in problem for problem in _problems(tmp_path, "extends: 0.yaml\n"))


@pytest.mark.parametrize(
    "override", ["rewards.²=1", "rewards." + "9" * 5000 + ".weight=1", "rewards.\udcff=1", "x" * 9999 + "=1"]
)
def test_an_override_of_no_such_key_is_told_whatever_it_is_written_with(tmp_path: Path, override: str) -> None:
    (problem,) = _problems(tmp_path, MINIMAL, override)
    assert problem.startswith("--set")


def test_a_home_folder_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL)
    config = load_config(
        path, ["run.dir=~/runs", "model.path=~/m", "data.train.path=~/t", "loss.reference=~/r", "loss.beta=1"]
    )
    assert [config.run.dir, config.data.train.path] == [Path("/home/me/runs"), Path("/home/me/t")]  # type: ignore[union-attr]
    assert [config.model.path, config.loss.reference] == ["/home/me/m", "/home/me/r"]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("optimizer.learning_rate", "'optimizer.lr'"),
        ("num_generations", "'rollout.group_size'"),
        ("training.gradient_accumulation_steps", "training.micro_batch_tokens"),
        ("report_to", "'tracking'"),
        ("num_iterations", "not supported"),
        ("rollout.top_p", "not supported"),
        ("rollout.zzz_size", ""),
    ],
)
def test_names_of_other_trainers_are_known_and_no_likeness_of_sections_makes_a_suggestion(
    tmp_path: Path, key: str, told: str
) -> None:
    (problem,) = _problems(tmp_path, MINIMAL, f"{key}=1")
    assert told in problem
    assert told or problem.endswith(f"'{key}'")


def test_every_key_that_is_named_for_a_foreign_one_exists() -> None:
    shape = Shape.of(ExperimentConfig)
    for meant in _FOREIGN.values():
        for path in [meant] if " " not in meant else re.findall(r"\w+(?:\.\w+)+", meant):
            assert shape.find(tuple(path.split("."))) is not None or path == "metrics.jsonl", path


def test_reward_entries_go_by_index_and_line(tmp_path: Path) -> None:
    text = (
        MINIMAL.replace('rewards: [{function: "a:b"}]\n', "")
        + "rewards:\n  - function: a:b\n  - function: nope\n    wieght: 2\n"
    )
    assert _problems(tmp_path, text) == [
        "x.yaml:6: rewards.1.function: 'nope' is not written module:attribute, with a colon, such as my_rewards:length_reward",
        "x.yaml:7: unknown key 'rewards.1.wieght'; did you mean 'weight'?",
    ]


def test_required_keys_are_asked_for_where_they_would_stand(tmp_path: Path) -> None:
    assert _problems(tmp_path, "\nrun:\n  seed: 1\ndata:\n  train: {type: hub}\n") == [
        "x.yaml: model: this key is required",
        "x.yaml:2: run.name: this key is required",
        "x.yaml:5: data.train.name: this key is required",
    ]


def test_a_number_where_text_belongs_is_to_be_quoted(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, MINIMAL.replace("name: demo", "name: 12"))
    assert problem == "x.yaml:1: run.name: input should be a valid string (got 12); put it in quotes"


def test_rules_across_sections_are_reported_one_a_line_without_pydantics_words(tmp_path: Path) -> None:
    text = MINIMAL + "rollout:\n  max_completion_tokens: 4000\noptimizer:\n  warmup_steps: 200\n"
    problems = _problems(tmp_path, text)
    assert len(problems) == 2
    assert problems[0].startswith("x.yaml:6: rollout.max_completion_tokens: 4000 leaves no room for a prompt in")
    assert problems[1] == (
        "x.yaml:8: optimizer.warmup_steps: 200 is more than training.max_steps: 100; set both for a short run"
    )


def test_a_rule_between_a_default_and_an_override_points_at_the_override(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, MINIMAL, "training.max_steps=1", "optimizer.warmup_steps=2")
    assert problem.startswith("--set optimizer.warmup_steps=2: optimizer.warmup_steps: 2 is more than")
    (problem,) = _problems(tmp_path, MINIMAL, "training.weight_sync_steps=9")
    assert problem.startswith("--set training.weight_sync_steps=9: rollout.max_staleness: 1 with")


def test_a_rule_of_one_section_carries_its_path(tmp_path: Path) -> None:
    text = MINIMAL.replace('[{function: "a:b"}]', '[{function: "a:b"}, {function: "c:b"}]')
    assert _problems(tmp_path, text) == [
        "x.yaml:4: rewards: the reward names ['b'] are used more than once; give each a `name`"
    ]


def test_duplicate_keys_are_found_at_every_depth(tmp_path: Path) -> None:
    text = MINIMAL + "inference:\n  vllm:\n    kv_cache_mb: 64\n    kv_cache_mb: 32\n"
    assert _problems(tmp_path, text) == ["x.yaml:8: 'inference.vllm.kv_cache_mb' is given twice (first at x.yaml:7)"]


class _Share(StrictModel):
    type: Literal["share"]
    share: float


class _Count(StrictModel):
    type: Literal["count"]
    count: int


class _Root(StrictModel):
    part: Annotated[_Share | _Count, Field(discriminator="type")]


def test_a_type_with_the_name_of_a_key_is_not_taken_for_the_key() -> None:
    problems, shape = Problems(), Shape.of(_Root)
    root = read_yaml_value("part: {type: share, share: x, count: 1}", Place("here"), problems)
    assert root is not None
    with pytest.raises(ValidationError) as caught:
        _Root.model_validate(to_plain(root, shape))
    report(caught.value, root, shape, problems)
    assert problems.text().splitlines() == [
        "here: part.share: input should be a valid number, unable to parse string as a number (got 'x')",
        "here: unknown key 'part.count' of type 'share'; it belongs to type 'count'",
    ]


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, "run: {name: demo\nmodel: 3\n")
    assert problem.startswith("x.yaml:2: not valid YAML: ")
    (problem,) = _problems(tmp_path, "run:\n\tname: demo\n")
    assert problem.startswith("x.yaml:2: not valid YAML: found character '\\t' that cannot start any token")
    (problem,) = _problems(tmp_path, "a: 1\n---\nb: 2\n")
    assert problem.startswith("x.yaml:2: not valid YAML: but found another document")
    (problem,) = _problems(tmp_path, "a: \x07\n")
    assert problem == "x.yaml: not valid YAML: special characters are not allowed at character 3"


def test_a_file_that_is_no_mapping_or_no_text_is_refused(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, "- a\n")
    assert problem.startswith("x.yaml: a configuration is a mapping of sections")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer", "an override is written section.key=value"),
        ("=3", "an override is written section.key=value"),
        ("optimizer..lr=3", "an override is written section.key=value"),
        ("rollout.group_sise=3", "unknown key 'rollout.group_sise'; did you mean 'group_size'?"),
        ("group_size=3", "unknown key 'group_size'; did you mean 'rollout.group_size'?"),
        ("rollout.lr=3", "unknown key 'rollout.lr'; did you mean 'optimizer.lr'?"),
        ("optimizer.lr.x=3", "unknown key 'optimizer.lr.x'; did you mean 'optimizer.lr'?"),
        ("rewards.1.weight=2", "'rewards' has 1 entry, so the index must be 0 (got '1')"),
        ("rewards.first.weight=2", "'rewards' has 1 entry, so the index must be 0 (got 'first')"),
        ("rewards.0.wieght=2", "unknown key 'rewards.0.wieght'; did you mean 'weight'?"),
        (
            "optimizer.lr=abc",
            "optimizer.lr: input should be a valid number, unable to parse string as a number (got 'abc')",
        ),
        ("rollout.group_size=1", "rollout.group_size: input should be greater than or equal to 2 (got 1)"),
        ("rollout={group_sise: 3}", "unknown key 'rollout.group_sise'; did you mean 'group_size'?"),
        (
            "model.path=${NOT_SET_ANYWHERE}",
            "model.path: the environment variable 'NOT_SET_ANYWHERE' is not set; set it or write "
            "${NOT_SET_ANYWHERE:-default}",
        ),
    ],
)
def test_a_wrong_override_is_explained(tmp_path: Path, override: str, expected: str) -> None:
    assert _problems(tmp_path, MINIMAL, override) == [f"--set {override}: {expected}"]


def test_an_override_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, MINIMAL, "optimizer.betas=[1")
    assert problem.startswith("--set optimizer.betas=[1: not valid YAML: ")


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, MINIMAL + f"inference: {{engine: {'x' * 500}}}\n")
    assert len(problem) < 250


def test_evaluation_needs_rows_of_its_own_and_only_one_kind(tmp_path: Path) -> None:
    (nothing,) = _problems(tmp_path, MINIMAL + "evaluation: {num_prompts: 3}\n")
    assert "evaluation.data: there is none" in nothing
    held_out = MINIMAL.replace("data: {", "data: {held_out: 0.1, ")
    assert "held_out" in held_out
    (both,) = _problems(tmp_path, held_out + "evaluation: {data: {path: e.jsonl}}\n")
    assert "data.held_out: keeps rows back for evaluation, but evaluation.data names others" in both
    (share,) = _problems(tmp_path, MINIMAL.replace("data: {", "data: {held_out: 1.5, "))
    assert "data.held_out: 1.5 is neither a share (below 1) nor a whole number of rows" in share


def test_a_shortest_prompt_above_the_longest_is_refused(tmp_path: Path) -> None:
    text = MINIMAL + "evaluation: {data: {path: e.jsonl, min_prompt_chars: 9, max_prompt_chars: 3}}\n"
    (problem,) = _problems(tmp_path, text)
    assert "evaluation.data: min_prompt_chars: 9 is more than max_prompt_chars: 3" in problem


def test_mutated_configurations_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    """60 of the thousands that were tried: slips of the shipped files and values that belong nowhere."""
    shipped = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    keys = list(Shape.of(ExperimentConfig).dotted_paths())
    values = ["", "-1", "1e308", "99999999999999999999", "~/x", '"\\0"', ".nan", "[[[]]]", "*x", "{a: 1}", "${X", "a:b"]
    chance, file = random.Random(0), tmp_path / "x.yaml"
    for _ in range(60):
        content = bytearray(chance.choice(shipped).read_bytes())
        for _ in range(chance.randint(0, 3)):
            begin = chance.randrange(len(content))
            content[begin : begin + chance.randint(0, 9)] = chance.choice([*values, "\xff"]).encode("latin-1")
        file.write_bytes(content)
        overrides = [f"{chance.choice(keys)}={chance.choice(values)}" for _ in range(chance.randint(0, 2))]
        with contextlib.suppress(ConfigError):
            config = load_config(file, overrides)
            file.write_text(dump_config(config), encoding="utf-8")
            assert load_config(file) == config
