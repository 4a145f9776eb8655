"""The TRL side of `import --check`: a training script as its user would run it, with another class in place of its trainer.

    python -m grpo_async.launch.trl_steps PLAN.json

That class loads the tiny model, takes the prompts of the run here in their order, and returns the run's tokens where TRL would
generate. All else is TRL's and the script's: chat template, tools, rewards, advantages, loss, optimizer, schedule.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_async.config.trl_script import TRAINERS
from grpo_async.utils.processes import die_with_parent


class _TrainedError(BaseException):
    """Ends the script after `train()`: what comes then saves and uploads. Not an Exception, which the script might catch."""


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Reward tokens as a hash would, so that a random model has something to learn from, whatever its task."""
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def _main(plan: Any) -> None:
    import transformers
    from trl.trainer.grpo_trainer import GRPOTrainer

    own_init = transformers.TrainingArguments.__post_init__

    def post_init(self: Any) -> None:  # before sizes are derived from these, and bfloat16 is refused on a CPU
        _override(self, plan)
        own_init(self)

    transformers.TrainingArguments.__post_init__ = post_init
    for path in ("trl", "trl.trainer", "trl.trainer.grpo_trainer", "trl.experimental.async_grpo"):
        with suppress(ImportError):  # AsyncGRPOTrainer needs more packages than GRPOTrainer
            module = importlib.import_module(path)
            for name in TRAINERS:
                if hasattr(module, name):
                    setattr(module, name, _replaying(getattr(module, name), GRPOTrainer, plan))
    sys.argv = [plan["script"], *plan["arguments"]]
    sys.path.insert(0, str(Path(plan["script"]).parent))
    try:
        runpy.run_path(plan["script"], run_name="__main__")
    except _TrainedError:
        return
    sys.exit("the script ended without calling train() of its trainer")


def _override(args: Any, plan: Any) -> None:
    for name, value in plan["args"].items():
        setattr(args, name, value)
    args.max_steps = len(plan["steps"]) * getattr(args, "num_iterations", 1)
    if "adamw" in str(args.optim):  # in 8 bits or paged, which a CPU cannot do
        args.optim = "adamw_torch"


def _replaying(original: Any, base: Any, plan: Any) -> Any:
    """The class that replaces a trainer of TRL: also AsyncGRPOTrainer, which needs a server, by GRPOTrainer."""
    from trl import GRPOConfig

    steps: list[dict[str, Any]] = []
    losses: list[float] = []

    class Replaying(base):  # type: ignore[misc]
        def __init__(self, *positional: Any, **named: Any) -> None:
            bound = inspect.signature(original).bind_partial(*positional, **named).arguments
            given: Any = {name: bound[name] for name in inspect.signature(base).parameters if name in bound}
            if given.get("rollout_func") is not None:
                sys.exit(
                    "rollout_func: the script generates by itself, so it cannot be given the tokens of another run"
                )
            args, options = GRPOConfig(plan["folder"]), given.get("args")
            for each in dataclasses.fields(options) if options else ():
                if hasattr(args, each.name) and each.name != "accelerator_config":  # AsyncGRPOConfig's own
                    setattr(args, each.name, getattr(options, each.name))
            _override(args, plan)  # once more: scripts set fields later, too
            args.steps_per_generation, args.generation_batch_size = 1, args.per_device_train_batch_size
            args.learning_rate *= plan["lr_factor"]
            args.reward_weights = args.reward_weights and [*args.reward_weights, 1.0]
            rewards = given.get("reward_funcs") or []
            given["reward_funcs"] = [*(rewards if isinstance(rewards, list) else [rewards]), spread]
            rows = given.get("train_dataset")
            if hasattr(rows, "select"):
                numbers = [number % len(rows) for step in plan["steps"] for number in step["tokens"]["rows"]]
                given["train_dataset"] = rows.select(numbers)
            nothing = dict.fromkeys(("eval_dataset", "callbacks", "quantization_config"))
            super().__init__(**given | nothing | {"model": str(Path(plan["folder"], "model")), "args": args})
            from grpo_async.training.lora import adapter_values

            parameters = dict(self.model.named_parameters())
            for name, value in adapter_values(self.model, seed=plan["seed"]).items():
                parameters[name].data.copy_(value)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            steps.append({})
            result = super()._generate_and_score_completions(inputs)
            steps[-1] |= {f"rewards/{name}": list(values) for name, values in self._logs["rewards"].items()}
            steps[-1]["advantages"] = list(self._logs["advantages"])
            return result

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            """What the policy here said after these tokens."""
            tokens = plan["steps"][len(steps) - 1]["tokens"]
            left = list(zip(tokens["ids"], tokens["mask"], tokens["logprobs"], strict=True))
            completions, logprobs, lengths = [], [], []
            for prompt in map(list, prompt_ids):
                fitting = [rollout for rollout in left if rollout[0][: len(prompt)] == prompt]
                ids, mask, values = left.pop(left.index((fitting or left)[0]))
                begin = len(prompt) if fitting else mask.index(1)
                end = [*mask, 0].index(0, begin)
                completions.append(ids[begin:end])
                logprobs.append(values[begin:end])
                lengths.append(len(prompt) if fitting else None)
            steps[-1].setdefault("prompt tokens", lengths)
            return completions, logprobs

        def training_step(self, *positional: Any, **named: Any) -> Any:
            loss = super().training_step(*positional, **named)
            losses.append(float(loss))
            return loss

        def train(self, *_: Any, **__: Any) -> None:
            super().train()
            norms = [row["grad_norm"] for row in self.state.log_history if "grad_norm" in row]
            each = len(losses) // len(steps)
            for number, step in enumerate(steps):
                part = slice(number * each, (number + 1) * each)
                step |= {"loss": [sum(losses[part]) / each], "gradient norm": [sum(norms[part]) / each]}
            self.model.save_pretrained(Path(plan["folder"], "trl"))
            Path(plan["folder"], "trl.json").write_text(json.dumps(steps), encoding="utf-8")
            raise _TrainedError

    return Replaying


if __name__ == "__main__":
    die_with_parent()
    _main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
