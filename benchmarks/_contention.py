"""How much slower two computing processes make each other on this machine: a plain torch loop like training, one like generation.

    parent: start both -> each alone -> both at once -> each alone -> iterations per second of each

Nothing of ours runs in the loops: what they lose side by side (memory bandwidth, caches, clock, other tenants) no scheduling of
ours can give back.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks._asynchrony_workload import Shape

_START_S, _GRACE_S = 90.0, 30.0
_VOCABULARY, _TRAIN_ROWS, _TRAIN_LENGTH = 384, 23, 89  # a micro-batch of 2048 tokens
KINDS = ("training", "generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Seconds of an iteration beside the other loop / alone: 1.0 is no contention."""

    training: float
    generation: float


class Loops:
    """The two loops in processes of their own, idle until `measure`. Use it as a context.

    Args:
        shape: sizes of the model that they compute with.
    """

    def __init__(self, shape: Shape) -> None:
        self._children = {kind: _Child(kind, shape) for kind in KINDS}

    def __enter__(self) -> Loops:
        """Raises: TimeoutError: a loop does not start."""
        try:
            for child in self._children.values():
                child.answer(_START_S)  # "ready"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.end()

    def measure(self, seconds: float) -> Slowdown:
        """Run the loops alone, together, and alone again, `seconds` each time.

        Raises:
            TimeoutError: a loop did not answer in time.
        """
        before = [self._run([kind], seconds)[kind] for kind in KINDS]
        together = self._run(KINDS, seconds)
        after = [self._run([kind], seconds)[kind] for kind in KINDS]
        alone = {kind: (a + b) / 2 for kind, a, b in zip(KINDS, before, after, strict=True)}
        return Slowdown(**{kind: alone[kind] / together[kind] for kind in KINDS})

    def _run(self, kinds: Sequence[str], seconds: float) -> dict[str, float]:
        """Iterations per second of each."""
        for kind in kinds:
            self._children[kind].begin(seconds)
        return {kind: self._children[kind].answer(seconds + _GRACE_S) for kind in kinds}


class _Child:
    def __init__(self, kind: str, shape: Shape) -> None:
        self._kind = kind
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._contention", kind, json.dumps(asdict(shape))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )

    def begin(self, seconds: float) -> None:
        print(seconds, file=_pipe(self._process.stdin), flush=True)

    def answer(self, timeout_s: float) -> float:
        """Iterations per second of the last turn; 0 when it is ready."""
        pipe = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(timeout=timeout_s):
                raise TimeoutError(f"the {self._kind} loop said nothing for {timeout_s:.0f} s")
        return float(pipe.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=_GRACE_S)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # asked for in Popen
    return pipe


def _work(kind: str, shape: Shape) -> Callable[[], object]:
    """One iteration: forward and backward of a micro-batch, or a forward of one token in every slot."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(shape.model_config(_VOCABULARY))
    if kind == "training":
        ids = torch.randint(_VOCABULARY, (_TRAIN_ROWS, _TRAIN_LENGTH))
        return lambda: model(input_ids=ids, labels=ids).loss.backward()
    token = torch.randint(_VOCABULARY, (shape.slots, 1))

    def decode() -> None:
        with torch.inference_mode():
            model(input_ids=token, use_cache=False)

    return decode


def _child(kind: str, shape: Shape) -> None:
    work = _work(kind, shape)
    work()
    print(0.0, flush=True)
    for line in sys.stdin:
        began, count, seconds = time.perf_counter(), 0, float(line)
        while (elapsed := time.perf_counter() - began) < seconds:
            work()
            count += 1
        print(count / elapsed, flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], Shape(**json.loads(sys.argv[2])))
