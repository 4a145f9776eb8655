"""Every kind of mistake, as a person reads it: where it is, what is wrong, what to write instead; and nothing else fails."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.field_types import FieldType
from grpo_async.config.loader import dump_config, load_config
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
rewards:
  - function: a:b
  - function: nope
    wieght: 2
inference:
  vllm:
    gpu_memory_utilization: 1.4
model: {path: n}
"""
    assert _problems(tmp_path, text, "optim.lrr=3") == [
        "x.yaml:3: unknown key 'rollout.group_sise'; did you mean 'group_size'?",
        "x.yaml:8: rewards.1.function: 'nope' is not written module:attribute, with a colon, such as my_rewards:length_reward",
        "x.yaml:9: unknown key 'rewards.1.wieght'; did you mean 'weight'?",
        "x.yaml:12: inference.vllm.gpu_memory_utilization: input should be less than or equal to 1 (got 1.4)",
        "x.yaml:13: 'model' is given twice (first at x.yaml:4)",
        "--set optim.lrr=3: unknown key 'optim.lrr'; did you mean 'optimizer.lr'?",
    ]


def test_required_keys_are_asked_for_where_they_would_stand(tmp_path: Path) -> None:
    assert _problems(tmp_path, "\nrun:\n  seed: 1\ndata:\n  train: {type: hub}\n") == [
        "x.yaml: model: this key is required",
        "x.yaml:2: run.name: this key is required",
        "x.yaml:5: data.train.name: this key is required",
    ]


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("optim: {lr: 1}", "unknown key 'optim'; did you mean 'optimizer'?"),
        ("rollout: {lr: 1}", "unknown key 'rollout.lr'; did you mean 'optimizer.lr'?"),
        ("rollout: {zzz: 1}", "unknown key 'rollout.zzz'"),
        ("rollout: {temperature: null}", "rollout.temperature: input should be a valid number (got null)"),
        ("rollout: [1]", "rollout: input should be a mapping of keys (got a list)"),
        ("loss: {reference: 12}", "loss.reference: input should be a valid string (got 12); put it in quotes"),
        (
            "inference: {engine: vlm}",
            "inference.engine: input should be 'auto', 'vllm' or 'embedded' (got 'vlm'); did you mean 'vllm'?",
        ),
        ("optimizer: {betas: [0.9]}", "optimizer.betas.1: this key is required"),
        (
            "evaluation: {data: {type: jsnl, path: x}}",
            "evaluation.data.type: input should be one of 'jsonl', 'csv', 'parquet', 'hub', 'reasoning_gym', "
            "'generator', 'environment' (got 'jsnl'); did you mean 'jsonl'?",
        ),
        ("evaluation: {data: {path: x, limt: 3}}", "unknown key 'evaluation.data.limt'; did you mean 'limit'?"),
        (
            "evaluation: {data: {path: x, subset: y}}",
            "unknown key 'evaluation.data.subset' of type 'jsonl'; it belongs to type 'hub'",
        ),
        ("evaluation: {data: x.jsonl}", "evaluation.data: input should be a mapping of keys (got 'x.jsonl')"),
        ("rollout: !mine {}", "rollout: the tag '!mine' is not supported"),
        ("rollout: {<<: {group_size: 2}}", "'rollout.<<' is a merge key, which is not supported; share settings by `extends`"),
        ("rollout: {? [1] : 2}", "'rollout.?' is a list or a mapping; keys are single words"),
    ],
)  # fmt: skip
def test_a_mistake_is_explained(tmp_path: Path, added: str, expected: str) -> None:
    assert _problems(tmp_path, MINIMAL + added + "\n") == [f"x.yaml:5: {expected}"]


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ("x: " + "[" * 2000 + "]" * 2000, "nested deeper"),
        ("x: &x {a: *x}", "alias refer to itself"),
        ("\n".join(["a0: &a0 [0]", *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9))]), "unfold"),
        ("run: {seed: " + "9" * 5000 + "}", "run.seed: 9999"),
        ("run: {seed: 0x" + "f" * 5000 + "}", "run.seed: 0xff"),
        ("training:\n  max_steps: ${DIGITS}", "training.max_steps: 9999"),
        ('run: {dir: "a\\ud800"}', "run.dir: holds '\\ud800'"),
        ('run: {"a\\0b": 1}', "a\\x00b"),
        ("run: {dir: ~nobody-of-this-name/x}", "run.dir: there is no home"),
        ('extends: "a\\0b"', "extends: holds"),
        (f"extends: {'x' * 300}", "File name too long"),
        ("tool_calling: {max_result_chars: !!bool yes}", "tool_calling.max_result_chars: the tag"),
        ("inference: {urls: ['http://[']}", "inference.urls.0: 'http://['"),
        (f"inference: {{host: {'a' * 300}}}", "inference.host: "),
        (f"inference: {{engine: {'x' * 2000}}}", "inference.engine: "),
        ("optimizer: {lr: 1e38}", "optimizer.lr"),
        ("optimizer: {lr: .inf}", "optimizer.lr"),
        ("evaluation: {temperature: 1e-6}", "evaluation.temperature"),
        ("tools: [{function: my.module.name}]", "did you mean 'my.module:name'?"),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"run: {name: demo\nmodel: 3\n", "x.yaml:2: not valid YAML: "),
        (b"run:\n\tname: demo\n", "x.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        (b"a: \x07\n", "x.yaml: not valid YAML: special characters are not allowed at character 3"),
        (b"- a\n", "x.yaml: a configuration is a mapping of sections"),
        (b"\xff\xfe", "x.yaml: cannot be read: it is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_line(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "x.yaml")
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(told)
    assert len(str(caught.value).splitlines()) == 1


def test_a_home_folder_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "x.yaml").write_text(MINIMAL)
    config = load_config(tmp_path / "x.yaml", ["run.dir=~/runs", "model.path=~/m", "loss.reference=~/r", "loss.beta=1"])
    assert (config.run.dir, config.model.path, config.loss.reference) == (
        Path("/home/me/runs"),
        "/home/me/m",
        "/home/me/r",
    )


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("optimizer.learning_rate", "'optimizer.lr'"),
        ("num_generations", "'rollout.group_size'"),
        ("training.gradient_accumulation_steps", "training.micro_batch_tokens"),
        ("num_iterations", "'training.num_iterations'"),
        ("deepspeed", "not needed"),
        ("rollout.zzz_size", ""),
    ],
)
def test_names_of_other_trainers_are_known_and_no_likeness_of_sections_makes_a_suggestion(
    tmp_path: Path, key: str, told: str
) -> None:
    (problem,) = _problems(tmp_path, MINIMAL, f"{key}=1")
    assert told in problem
    assert told or problem.endswith(f"'{key}'")


def test_a_rule_points_at_a_setting_that_is_written_the_override_first(tmp_path: Path) -> None:
    text = MINIMAL + "rollout:\n  max_completion_tokens: 4000\noptimizer:\n  warmup_steps: 200\n"
    first, second = _problems(tmp_path, text)
    assert first.startswith("x.yaml:6: rollout.max_completion_tokens: 4000 leaves no room for a prompt in")
    assert second == (
        "x.yaml:8: optimizer.warmup_steps: 200 is more than training.max_steps: 100; set both for a short run"
    )
    (problem,) = _problems(tmp_path, MINIMAL, "training.weight_sync_steps=9")
    assert problem.startswith("--set training.weight_sync_steps=9: rollout.max_staleness: 1 with")
    text = MINIMAL.replace('[{function: "a:b"}]', '[{function: "a:b"}, {function: "c:b"}]')
    assert _problems(tmp_path, text) == [
        "x.yaml:4: rewards: the reward names ['b'] are used more than once; give each a `name`"
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer", "an override is written section.key=value"),
        ("optimizer..lr=3", "an override is written section.key=value"),
        ("group_size=3", "unknown key 'group_size'; did you mean 'rollout.group_size'?"),
        ("optimizer.lr.x=3", "unknown key 'optimizer.lr.x'; did you mean 'optimizer.lr'?"),
        ("rewards.1.weight=2", "'rewards' has no entry '1', only 0"),
        ("rewards.²=1", "'rewards' has no entry '²', only 0"),
        ("rewards.0.wieght=2", "unknown key 'rewards.0.wieght'; did you mean 'weight'?"),
        ("rollout.group_size=1", "rollout.group_size: input should be greater than or equal to 2 (got 1)"),
        ("rollout={group_sise: 3}", "unknown key 'rollout.group_sise'; did you mean 'group_size'?"),
        (
            "run.seed=99999999999999999999999",
            "run.seed: 99999999999999999999999 is beyond 64 bits; write a smaller number, or quote it if it is text",
        ),
        ("run.name=${NOT_SET}", "run.name: the environment variable 'NOT_SET' is not set; set it or write ${NOT_SET:-default}"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_explained(tmp_path: Path, override: str, expected: str) -> None:
    assert _problems(tmp_path, MINIMAL, override) == [f"--set {override}: {expected}"]


def test_mutated_configurations_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    """60 of the thousands that were tried: slips of the shipped files and values that belong nowhere."""
    shipped = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    keys = list(FieldType.of(ExperimentConfig).settings())
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
