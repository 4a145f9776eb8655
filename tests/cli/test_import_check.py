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

HEAD = """\
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
"""

QUICKSTART = """
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

GSM8K = '''
    import argparse
    import re

    SYSTEM_PROMPT = "Answer with #### and a number."
    SUMS = [{"question": f"{n} apples and {n} more?", "answer": f"It is {2 * n} #### {2 * n}"} for n in range(5)]


    def correct(completions, answer, **kwargs):
        """Whether the first digit is that of the answer."""
        digits = [re.search(r"\\d", completion[0]["content"]) for completion in completions]
        return [2.0 if found and found[0] in a else 0.0 for found, a in zip(digits, answer)]


    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", default="nowhere")
        parser.add_argument("--num-generations", type=int, default=4)
        options = parser.parse_args()

        def chat(row):
            messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}]
            return {"prompt": messages, "answer": row["answer"].split("####")[1].strip()}

        dataset = Dataset.from_list(SUMS).map(chat, remove_columns=["question"])
        config = GRPOConfig(
            output_dir="out/gsm8k", learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1,
            warmup_steps=3, lr_scheduler_type="cosine", max_grad_norm=0.1, per_device_train_batch_size=4,
            gradient_accumulation_steps=4, num_generations=options.num_generations, max_completion_length=200,
            bf16=True, num_train_epochs=1, save_steps=100, log_completions=True, loss_type="grpo",
        )
        try:
            GRPOTrainer(options.model, correct, config, dataset).train()
        except Exception:
            print("never mind")


    if __name__ == "__main__":
        main()
'''

REASONING = """
    from trl.rewards import get_soft_overlong_punishment, think_format_reward

    overlong = get_soft_overlong_punishment(max_completion_len=24, soft_punish_cache=16)

    training_args = GRPOConfig(
        output_dir="dr", loss_type="dr_grpo", scale_rewards=False, mask_truncated_completions=True, epsilon_high=0.28,
        temperature=0.8, num_generations=4, per_device_train_batch_size=4, use_vllm=True, vllm_mode="colocate",
    )
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": word}] for word in "one two three".split()]})
    trainer = GRPOTrainer(
        model="tiny", args=training_args, reward_funcs=[think_format_reward, overlong], train_dataset=prompts
    )
    trainer.train()
"""

GSPO = """
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
    from peft import LoraConfig

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

WEIGHTS = """
    def long(completions, **kwargs):
        return [len(completion) / 20 for completion in completions]

    def odd(completion_ids, target, **kwargs):
        return [float(len(ids) % 2 == t) if t else None for ids, t in zip(completion_ids, target)]

    config = GRPOConfig(
        output_dir="several", reward_weights=[0.5, 2.0], multi_objective_aggregation="normalize_then_sum",
        loss_type="bnpo", optim="paged_adamw_8bit", num_generations=4, max_grad_norm=0.5, entropy_coef=0.01,
    )
    rows = Dataset.from_list([{"prompt": f"what is {n}", "target": n % 3} for n in range(9)])
    GRPOTrainer("tiny", [long, odd], config, rows).train()
"""

CISPO = """
    from datasets import IterableDataset

    def rows():
        for n in range(100):
            yield {"prompt": [{"role": "user", "content": f"say {n}"}], "n": n}

    def close(completions, n, log_metric=None, **kwargs):
        return [-abs(len(c[0]["content"]) - number) / 10 for c, number in zip(completions, n)]

    args = GRPOConfig(output_dir="x", loss_type="cispo", epsilon_high=5.0, max_steps=50, scale_rewards="batch",
                      adam_epsilon=1e-6, lr_scheduler_type="constant")
    trainer = GRPOTrainer(model="tiny", args=args, reward_funcs=close,
                          train_dataset=IterableDataset.from_generator(rows))
    trainer.train()
"""

TOOLS = """
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

ENVIRONMENT = """
    class Guess:
        def __init__(self):
            self.secret = 0

        def reset(self, secret, **kwargs) -> str:
            self.secret = secret
            return f" It is below {secret + 5}."

        def guess(self, number: int) -> str:
            '''
            Guess the number.

            Args:
                number: The guess.
            '''
            return "right" if number == self.secret else "wrong"

        def get_reward(self) -> float:
            return self.secret / 10

    def length(completion_ids, environments, **kwargs):
        return [len(ids) / 10 + e.secret for ids, e in zip(completion_ids, environments)]

    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "secret": n} for n in range(6)]
    trainer = GRPOTrainer(
        model="tool",
        reward_funcs=length,
        args=GRPOConfig(output_dir="guess", loss_type="dapo", beta=0.01, use_bias_correction_kl=False),
        train_dataset=Dataset.from_list(rows),
        environment_factory=Guess,
    )
    trainer.train()
"""

ASYNC = """
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    def ends(completions, solution, **kwargs):
        return [float(s in c[0]["content"]) for c, s in zip(completions, solution)]

    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "a?"}], "solution": s} for s in "abcdef"])
    config = AsyncGRPOConfig(output_dir="async", max_steps=100, learning_rate=3e-6, epsilon=0.1, report_to=["wandb"])
    config.temperature = 0.9
    trainer = AsyncGRPOTrainer(model="tiny", reward_funcs=ends, args=config, train_dataset=dataset)
    trainer.train()
"""

SAPO = """
    from transformers import AutoTokenizer

    class Trainer(GRPOTrainer):
        pass

    tokenizer = AutoTokenizer.from_pretrained("tiny")
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": c * 5}], "c": c} for c in "abcd"])

    def repeats(prompts, completions, c, **kwargs):
        return [completion[0]["content"].count(letter) / 4 for completion, letter in zip(completions, c)]

    GRPOTrainer(
        model="tiny", processing_class=tokenizer, reward_funcs=[repeats], train_dataset=rows,
        args=GRPOConfig(output_dir="sapo", loss_type="sapo", sapo_temperature_neg=1.1, off_policy_mask_threshold=0.5,
                        lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}, max_steps=9),
    ).train()
"""

SHAPES = {
    "quickstart": (QUICKSTART, ""),
    "lora": (LORA, ""),
    "gsm8k": (GSM8K, "--model tiny"),
    "reasoning": (REASONING, ""),
    "gspo": (GSPO, GSPO_ARGUMENTS),
    "weights": (WEIGHTS, ""),
    "cispo": (CISPO, ""),
    "tools": (TOOLS, ""),
    "environment": (ENVIRONMENT, ""),
    "async": (ASYNC, ""),
    "sapo": (SAPO, ""),
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
    path.write_text(HEAD + textwrap.dedent(script))
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
    (folder / "train_it.py").write_text(HEAD + textwrap.dedent(script))
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
