r"""Make the model and the data of the formulas.

The good way writes a formula as a Python function; the lazy one copies it as it is, which Python cannot run or takes for something
else (^ is not a power).

    f(x) = 3 (x + 2)  ->   def f(x):\n    return 3 * (x + 2)                     or   def f(x):\n    return 3 (x + 2)

    python -m examples.code.prepare     # once: model and data in .cache/quickstart/code/seed_0
    grpo-async train examples/code/train.yaml
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_async.quickstart.prepare import prepare
from grpo_async.quickstart.tasks import Demonstration, Task, WarmupRecipe

MAX_FACTOR, MAX_CONSTANT = 9, 20
TESTED_AT = (0, 3, 10)


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula of x as people write it and as Python does: `3 (x + 2)` and `3 * (x + 2)`."""

    written: str
    python: str

    def value(self, x: int) -> int:
        return int(eval(self.python, {"x": x}))  # made below of digits, x and operators

    @property
    def tests(self) -> list[str]:
        """`["assert f(0) == 6", "assert f(3) == 15", "assert f(10) == 36"]`"""
        return [f"assert f({x}) == {self.value(x)}" for x in TESTED_AT]


def formulas() -> Iterator[Formula]:
    """680 of them."""
    for constant in range(1, MAX_CONSTANT + 1):
        for sign in "+-":
            yield Formula(f"x^2 {sign} {constant}", f"x ** 2 {sign} {constant}")
            for factor in range(2, MAX_FACTOR + 1):
                yield Formula(f"{factor} x {sign} {constant}", f"{factor} * x {sign} {constant}")
                yield Formula(f"{factor} (x {sign} {constant})", f"{factor} * (x {sign} {constant})")


def _prompt(item: Formula) -> str:
    """`f(x) = 3 (x + 2)`"""
    return f"f(x) = {item.written}"


def _function(expression: str) -> str:
    return f"```python\ndef f(x):\n    return {expression}\n```"


TASK = Task(
    name="code",
    recipe=WarmupRecipe(num_steps=400, batch_size=12),
    items=formulas,
    key=lambda item: item.written,
    row=lambda item: {"prompt": [{"role": "user", "content": _prompt(item)}], "tests": item.tests},
    good=lambda item, rng: Demonstration.of(_prompt(item), _function(item.python)),
    lazy=lambda item, rng: Demonstration.of(_prompt(item), _function(item.written)),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    prepare(task=TASK, seed=parser.parse_args().seed)
