"""`import --check`: scripts in the shapes of TRL's examples give the same two steps in TRL and here."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from grpo_async.cli import main
from grpo_async.launch.check_import import _compared
from tests.support.tiny_model import build_tiny_model, build_tool_model

pytest.importorskip("trl")

QUICKSTART = """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": [{"role": "user", "content": f"What is {n} and one?"}]} for n in range(7)]
    dataset = Dataset.from_list(rows)

    def reward_num_unique_chars(completions, **kwargs):
        completion_contents = [completion[0]["content"] for completion in completions]
        return [float(len(set(content))) for content in completion_contents]

    training_args = GRPOConfig(output_dir="tiny-GRPO")
    trainer = GRPOTrainer(
        model="tiny", reward_funcs=reward_num_unique_chars, args=training_args, train_dataset=dataset
    )
    trainer.train()
    raise SystemExit("what comes after training runs too")
"""

GSPO = """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

    def short(completion_ids, **kwargs):
        return [-float(len(ids)) for ids in completion_ids]

    if __name__ == "__main__":
        parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
        script_args, training_args, model_args = parser.parse_args_and_config()
        trainer = GRPOTrainer(
            model=model_args.model_name_or_path,
            args=training_args,
            reward_funcs=[short],
            train_dataset=Dataset.from_list([{"prompt": f"hello {n}"} for n in range(4)]),
            peft_config=get_peft_config(model_args),
        )
        trainer.train()
"""
GSPO_ARGUMENTS = (
    "--model_name_or_path tiny --output_dir gspo --importance_sampling_level sequence --epsilon 3e-4 "
    "--epsilon_high 4e-4 --beta 0.04 --loss_type grpo --num_iterations 2 --learning_rate 1e-6"
)

LORA = """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    def vowels(completions, **kwargs):
        return [sum(letter in "aeiou" for letter in c[0]["content"]) / 8 for c in completions]

    trainer = GRPOTrainer(
        model="tiny",
        reward_funcs=[vowels],
        args=GRPOConfig(output_dir="lora", beta=0.1, learning_rate=1e-4, num_generations=4),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "hello"}]}] * 3),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM"),
    )
    trainer.train()
"""

TOOLS = """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def multiply(a: int, b: int) -> int:
        '''
        Multiplies two integers.

        Args:
            a: The first integer.
            b: The second integer.

        Returns:
            The product of the two integers.
        '''
        return a * b

    def calls(completions, completion_ids, **kwargs):
        both = zip(completions, completion_ids)
        return [len(ids) / 20 + sum(m["role"] == "tool" for m in completion) for completion, ids in both]

    trainer = GRPOTrainer(
        model="tool",
        args=GRPOConfig("tools", chat_template_kwargs={"enable_thinking": False}, max_tool_calling_iterations=2),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n} times 3?"}]} for n in range(4)]),
        tools=[multiply],
        reward_funcs=calls,
    )
    trainer.train()
"""

SHAPES = {
    "quickstart": (QUICKSTART, ""),
    "lora": (LORA, ""),
    "gspo": (GSPO, GSPO_ARGUMENTS),
    "tools": (TOOLS, ""),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_tiny_model(tmp_path / "tiny")
    return tmp_path


def _tool_model(folder: Path) -> None:
    """With a template that TRL knows, because it parses calls of known ones only."""
    template = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates/qwen3.jinja"  # type: ignore[union-attr, arg-type]
    build_tool_model(folder)
    (folder / "chat_template.jinja").write_text(template.read_text())


def _check(folder: Path, script: str, *arguments: str) -> int:
    path = folder / "train_it.py"
    path.write_text(textwrap.dedent(script))
    with pytest.raises(SystemExit) as caught:
        main(["import", str(path), "--check", *arguments])
    return int(str(caught.value.code or 0))


@pytest.mark.parametrize(
    "shape", [*list(SHAPES)[:2], *(pytest.param(each, marks=pytest.mark.nightly) for each in list(SHAPES)[2:])]
)
def test_two_steps_are_those_of_trl(shape: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, arguments = SHAPES[shape]
    if '"tool"' in script:
        _tool_model(folder / "tool")
    code = _check(folder, script, "--args", arguments)
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    assert "differs" not in printed.out
    assert printed.out.count("gradient norm") == 2
    assert "rewards/spread" in printed.out


@pytest.mark.nightly
def test_a_setting_that_was_lost_shows_after_the_first_update(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And files that are there, which the user may have changed, are checked as they are."""
    script = QUICKSTART.replace('"tiny-GRPO"', '"tiny-GRPO", weight_decay=0.5')
    (folder / "train_it.py").write_text(textwrap.dedent(script))
    with pytest.raises(SystemExit):
        main(["import", str(folder / "train_it.py")])
    config = folder / "train_it.yaml"
    text = config.read_text()
    assert "weight_decay: 0.5" in text
    config.write_text(text.replace("weight_decay: 0.5", "weight_decay: 0.0"))
    assert _check(folder, script) == 1
    printed = capsys.readouterr().out
    assert "not equal" in printed
    assert "of step 2: look at `optimizer`" in printed


def test_numbers_that_are_not_equal_are_found() -> None:
    ours = {"rewards/f": [1.0, None], "advantages": [0.5, -0.5], "loss": [0.2]}
    same = {"rewards/f": [1.0, float("nan")], "advantages": [0.50001, -0.5], "loss": [0.20001]}
    assert all(row.is_equal for row in _compared([{"compared": ours}], [same]))
    other = {"rewards/f": [1.0, 0.0], "advantages": [0.5, -0.499], "loss": [0.2], "rewards/g": [1.0, 1.0]}
    differing = {row.name: row.difference for row in _compared([{"compared": ours}], [other]) if not row.is_equal}
    assert list(differing) == ["rewards/f", "advantages", "rewards/g"]
    assert differing["advantages"] == pytest.approx(1e-3)


def test_without_trl_or_the_model_the_error_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert _check(folder, QUICKSTART.replace('model="tiny"', 'model="org/absent"')) == 2
    assert "--check-model FOLDER" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _check(folder, QUICKSTART) == 2
    assert "pip install trl" in capsys.readouterr().err
