"""A trainer that pushes other weights and is killed on the way. `killed_trainer` runs this file as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOMENTS = [
    "broadcast",
    *(pytest.param(moment, marks=pytest.mark.nightly) for moment in ("pause", "start", "update")),
]


def killed_trainer(url: str, token: str | None, folder: Path, moment: str) -> None:
    """Push to the server at `url`, which serves the model of `folder`, and die by SIGKILL when the push has come to `moment`: after
    "pause" or "start", in the "broadcast", when a part of the update is loaded, or after the "update", before it is finished."""
    command = [sys.executable, "-m", "tests.support.dying_trainer", url, token or "", str(folder), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "here\n"  # ends at the latest with the process
        finally:
            trainer.kill()


def _push(url: str, token: str, folder: str, moment: str) -> None:
    from transformers import AutoModelForCausalLM

    from tests.support.weight_push import WeightPusher

    def come_to(name: str) -> None:
        if name == moment:
            print("here", flush=True)
            signal.pause()  # until killed

    model = AutoModelForCausalLM.from_pretrained(folder)
    with WeightPusher(url, token or None, timeout_s=60.0) as pusher:
        pusher.connect()
        pusher.post("/pause")
        come_to("pause")
        tensors = {name: tensor + 0.05 for name, tensor in model.named_parameters()}
        pusher.start(tensors, bucket_bytes=20_000)
        come_to("start")
        group: Any = pusher.group
        send, num_sent = group.send, 0

        def counting(bucket: Any, **limits: Any) -> Any:
            nonlocal num_sent
            send(bucket, **limits)()
            num_sent += 1
            if num_sent == 3:
                come_to("broadcast")
            return lambda: None

        group.send = counting
        pusher.update(tensors, bucket_bytes=20_000)
        come_to("update")


if __name__ == "__main__":
    _push(*sys.argv[1:])
