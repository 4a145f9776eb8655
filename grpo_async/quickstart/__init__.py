"""Tiny tasks and tiny models with which a run visibly learns on two CPU cores within a minute or two.

    tasks    items -> train.jsonl, heldout.jsonl; each answered the good way and the lazy way -> demonstrations
    tokenizer + model -> warmup on the demonstrations -> model/

| task            | what is learned                                        |
|-----------------|--------------------------------------------------------|
| `think`         | to work a sum out in <think> before answering          |
| `tool`          | to ask a calculator, in a conversation of two turns    |
| `game`          | to search in a guessing game, an environment           |
| `code`          | to write Python that passes tests in a sandbox         |

`prepare.prepare()` makes all of it. torch is imported only when something has to be made.
"""

CONFIGS = {
    "think": ("quickstart.yaml",),
    "tool": ("tools.yaml", "agent.yaml"),
    "game": ("environment.yaml",),
    "code": ("code.yaml",),
}
"""The files in configs/ that train each task."""
DEFAULT_TASK = "think"
