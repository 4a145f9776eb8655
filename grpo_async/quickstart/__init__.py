"""A task, a tiny model and a reward with which a run visibly learns on two CPU cores within a minute.

    task -> train.jsonl, heldout.jsonl        tokenizer + model -> warmup -> model/        reward: is the final text the answer?

`prepare()` makes all of it. torch is imported only when something has to be made.
"""

from grpo_async.quickstart.prepare import PreparedQuickstart, default_folder, prepare

__all__ = ["PreparedQuickstart", "default_folder", "prepare"]
