"""A rollout function for a whole run: it generates with the served policy and writes down which step it saw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STEPS_FILE = "GRPO_ASYNC_TEST_STEPS_FILE"


def generate_and_note_the_step(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    with Path(os.environ[STEPS_FILE]).open("a") as file:
        file.write(f"{trainer.state.global_step}\n")
    outputs = trainer.generate(prompts)
    return {key: [output[key] for output in outputs] for key in ("prompt_ids", "completion_ids", "logprobs")}
