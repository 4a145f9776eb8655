"""Tiny tasks and tiny models with which a run visibly learns on two CPU cores within a minute or two.

    tasks    items -> train.jsonl, heldout.jsonl; each answered the good way and the lazy way -> demonstrations
    tokenizer + model -> warmup on the demonstrations -> model/         rewarded by `rewards.text:exact_match`

| task            | what is learned                                        | config                     |
|-----------------|--------------------------------------------------------|----------------------------|
| `think`         | to work a sum out in <think> before answering          | configs/quickstart.yaml    |
| `tool`          | to ask a calculator, in a conversation of two turns    | configs/tools.yaml         |
|                 | the same, by an agent (agent.py)                       | configs/agent.yaml         |
| `game`          | to search in a guessing game, an environment           | configs/environment.yaml   |
| `code`          | to write Python that passes tests in a sandbox         | configs/code.yaml          |
| `reasoning_gym` | to work out a task whose rows a package makes          | configs/reasoning-gym.yaml |

`prepare()` makes all of it. torch is imported only when something has to be made.
"""

from grpo_async.quickstart.prepare import default_folder, prepare

__all__ = ["default_folder", "prepare"]
