"""`import`: scripts in the shapes of TRL's examples and docs, as configurations that can be loaded."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_async.cli import main
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.config.trl_script import import_script

MAPPED = '''
    import argparse
    import math

    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    SUMS = [{"question": f"{n} + 1", "answer": f"# {n + 1}"} for n in range(4)]
    UNUSED = open("never read")


    class length:
        def __call__(self):  # a name of the script's own
            return math.inf


    def right(completions, solution, **kwargs):
        """Ends in the solution."""
        length = 1.0
        return [length * c[-1]["content"].endswith(s) for c, s in zip(completions, solution)]  # unchanged


    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--num-rows", type=int, default=3)
        parser.add_argument("--model-id", default="org/large")
        options = parser.parse_args()

        def chat(row):
            return {"prompt": [{"role": "user", "content": row["question"]}], "solution": row["answer"].split("# ")[-1]}

        dataset = Dataset.from_list(SUMS).select(range(options.num_rows))
        dataset = dataset.map(chat, remove_columns=dataset.column_names)
        size = 4
        steps = 100
        steps = steps * 2
        config = AsyncGRPOConfig(
            output_dir="out/sums",
            per_device_train_batch_size=2 * size,
            gradient_accumulation_steps=3,
            num_generations=size,
            max_completion_length=8192,
            learning_rate=1e-5,
            max_steps=200,
            save_steps=steps,
            lr_scheduler_type="cosine_with_restarts",
            lr_scheduler_kwargs={"num_cycles": 3},
            bf16=True,
            scale_rewards=False,
            adam_beta2=0.99,
            run_name=f"run-{size}",
            report_to=["wandb"],
            max_staleness=2,
        )
        config.temperature = 0.7
        AsyncGRPOTrainer(model=options.model_id, args=config, train_dataset=dataset, reward_funcs=[right]).train()


    if __name__ == "__main__":
        main()
'''

PARSED = """
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

    def look_up(word: str) -> str:
        '''Look a word up.

        Args:
            word: the word
        '''
        return word

    if __name__ == "__main__":
        script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
        train, test = load_dataset(script_args.dataset_name, split=["train[:5%]", "test[:5%]"])
        trainer = GRPOTrainer(
            model=model_args.model_name_or_path, args=training_args, reward_funcs=["org/reward-model"], tools=[look_up],
            train_dataset=train, eval_dataset=test, peft_config=get_peft_config(model_args),
        )
        trainer.train()
"""
ARGUMENTS = (
    "--model_name_or_path org/base --dataset_name=org/words --use_peft --lora_r 4 --learning-rate 2e-6 --beta 0.04"
)


def _imported(folder: Path, text: str, arguments: str = "") -> tuple[ExperimentConfig, str, str]:
    """The configuration, its comments, and the module of the script's own code."""
    script = folder / "train_it.py"
    script.write_text(textwrap.dedent(text))
    found = import_script(script, arguments)
    config = folder / "train_it.yaml"
    config.write_text(found.as_yaml(script.name))
    compile(found.parts, "parts", "exec")
    return load_config(config), "\n".join(found.comments), found.parts


def test_a_script_with_a_main_function_keeps_its_own_code_and_data(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    config, comments, text = _imported(tmp_path, MAPPED)
    assert config.model.path == "org/large"  # argparse's default
    assert (str(config.run.dir), config.run.name) == ("out", "sums")
    assert (config.rollout.group_size, config.rollout.groups_per_step) == (4, 6)
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-5, (0.9, 0.99))
    assert (config.training.max_steps, config.training.epochs) == (200, None)
    assert (config.rollout.temperature, config.rollout.max_staleness) == (0.7, 2)
    assert (config.model.compute_dtype, config.advantage.type) == ("bfloat16", "none")
    assert config.inference.max_model_len > 8192
    assert config.training.micro_batch_tokens >= config.inference.max_model_len
    assert config.optimizer.schedule_kwargs == {"num_cycles": 3}
    for word in ("run_name", "wandb", "save_steps", "argparse.Namespace(num_rows=3"):
        assert word in comments
    assert "UNUSED" not in text  # nothing else of the script runs
    assert "class length" not in text
    assert "# unchanged" in text
    parts: dict[str, Any] = {}
    exec(text, parts)
    rows: Iterator[dict[str, Any]] = parts["train_rows"]()
    assert [row["solution"] for row in rows] == ["1", "2", "3"]
    assert parts["right"]([[{"content": "it is 2"}], [{"content": "3"}]], ["2", "4"]) == [1.0, 0.0]


def test_the_processes_of_accelerate_beside_the_script_are_ranks_here(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 8\nnum_machines: 2\n")
    (tmp_path / "other.yaml").write_text("num_processes: 3\n")
    config, _, _ = _imported(tmp_path, MAPPED)
    assert (config.launch.num_trainer_ranks, config.launch.trainer_nodes) == (4, 2)
    assert (config.rollout.group_size, config.rollout.groups_per_step) == (4, 48)  # 6 of each process


def test_settings_whose_values_are_others_here(tmp_path: Path) -> None:
    script = """
        from trl import AsyncGRPOTrainer, GRPOConfig
        from peft import LoraConfig

        def first(completions, **kwargs): ...
        def second(completions, **kwargs): ...

        config = GRPOConfig(loss_type="cispo", epsilon=0.1, reward_weights=[0.5, -2.0], optim="paged_adamw_8bit",
                            multi_objective_aggregation="normalize_then_sum", max_tool_calling_iterations=3,
                            warmup_steps=0.1, disable_dropout=True)
        AsyncGRPOTrainer("m", [first, second], config, [], peft_config=LoraConfig(lora_dropout=0.1))
    """
    config, comments, _ = _imported(tmp_path, script)
    assert (config.loss.type, config.loss.epsilon_high) == ("cispo", 0.1)  # type: ignore[union-attr]
    assert [each.weight for each in config.rewards] == [0.5, -2.0]
    assert config.advantage.rewards == "normalize_each"
    assert config.optimizer.type == "adamw"
    assert config.rollout.max_turns == 4
    # AsyncGRPOConfig's and peft's defaults
    assert (config.optimizer.schedule, config.rollout.max_staleness) == ("constant", 4)
    assert config.rollout.max_completion_tokens == 2048
    lora = config.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules, lora.dropout) == (8, 8, ["q_proj", "v_proj"], 0.0)
    assert "warmup_steps" in comments
    assert "peft chooses" in comments


def test_a_script_that_reads_its_command_line_gets_it_from_the_user(tmp_path: Path) -> None:
    config, _, parts = _imported(tmp_path, PARSED, ARGUMENTS)
    assert config.model.path == "org/base"
    assert config.model.lora is not None
    assert config.model.lora.rank == 4
    assert (config.optimizer.lr, config.loss.beta) == (2e-6, 0.04)
    assert config.rewards[0].model == "org/reward-model"
    assert config.tools[0].function == "train_it_parts:look_up"
    assert config.evaluation is not None
    assert "dataset_name='org/words'" in parts
    without = import_script(tmp_path / "train_it.py")
    assert "path" not in without.values.get("model", {})
    assert "--args" in "\n".join(without.comments)


def test_the_command_overwrites_nothing_and_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train_it.py"
    script.write_text(textwrap.dedent(PARSED))

    def code(*arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(["import", str(script), *arguments])
        return int(str(caught.value.code))

    assert code() == 0
    assert "model" in capsys.readouterr().out  # it is missing
    assert code("--args", ARGUMENTS) == 2
    assert "exists already" in capsys.readouterr().err
