"""A reward of a run whose disk is slow: writing a checkpoint takes four seconds longer. Patched in the trainer only."""

from __future__ import annotations

import sys
import time
from typing import Any

from grpo_async.rewards.text import exact_match

DELAY_S = 4.0


def exact_answer_with_a_slow_disk(**arguments: Any) -> list[float]:
    module = sys.modules.get("grpo_async.training.checkpoint")
    if module is not None and not getattr(module, "is_slow", False):
        save = module.dcp.save

        def slowly(*args: Any, **named: Any) -> Any:
            time.sleep(DELAY_S)
            return save(*args, **named)

        module.dcp.save = slowly
        module.is_slow = True
    return exact_match(**arguments)
