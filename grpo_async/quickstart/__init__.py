"""Tiny tasks and tiny models with which a run visibly learns on two CPU cores within a minute or two.

    tasks    items -> train.jsonl, heldout.jsonl; each answered the good way and the lazy way -> demonstrations
    tokenizer + model -> warmup on the demonstrations -> model/

`think` is to work a sum out in <think> before answering, `tool` to ask a calculator, in a conversation of two turns.
The examples of the repository bring tasks of their own. `prepare.prepare()` makes all of it. torch is imported only when
something has to be made.
"""

CONFIGS = {"think": "quickstart.yaml", "tool": "tools.yaml"}
"""The file in configs/ that trains each task."""
DEFAULT_TASK = "think"
