"""Profile of the rollout thread while a benchmark measures it."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGES = (
    "httpx",
    "httpcore",
    "aiohttp",
    "yarl",
    "multidict",
    "anyio",
    "h11",
    "pydantic",
    "orjson",
    "transformers",
    "asyncio",
)
_MOST = 25
WAIT_S = 60.0


@contextmanager
def profiled(source: Any, *, title: str) -> Iterator[None]:
    """Print where the rollout thread of `source` spent its CPU time in the block, by package and by function."""
    profile = cProfile.Profile(time.thread_time)

    async def switch(on: bool) -> None:
        (profile.enable if on else profile.disable)()

    source._thread.submit(switch(True)).result(timeout=WAIT_S)
    try:
        yield
    finally:
        source._thread.submit(switch(False)).result(timeout=WAIT_S)
        text = io.StringIO()
        stats: Any = pstats.Stats(profile, stream=text)
        by_package: Counter[str] = Counter()
        for (file, _, function), (_, _, own_s, _, _) in stats.stats.items():
            by_package[_package(file, function)] += own_s
        total = sum(by_package.values())
        print(f"\n{title}: {total:.2f} s of CPU time under the profiler")
        for package, own_s in by_package.most_common(_MOST):
            print(f"  {own_s:7.2f} s  {own_s / total:4.0%}  {package}")
        stats.sort_stats("tottime").print_stats(_MOST)
        print(text.getvalue())


def _package(file: str, function: str) -> str:
    for package in _PACKAGES:
        if f"/{package}/" in file:
            return package
    if "/grpo_async/" in file:
        return "grpo_async." + Path(file.rpartition("/grpo_async/")[2]).with_suffix("").as_posix().replace("/", ".")
    return f"built in: {function}" if file == "~" else Path(file).stem
