"""How the time of a run and its devices are used: who waited for whom, tokens per second, memory, and FLOPs.

trainer idle = seconds waiting for samples / wall       generator idle = 1 - seconds generating / wall
overlap      = max(generation, wall - waiting) / wall   *_fraction: of the trainer's wall time; 1 together with trainer idle
MFU          = FLOPs that training needs / FLOPs that the GPUs could have done (arXiv 2204.02311)
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from grpo_async.tracking.timeline import span
from grpo_async.training.model import decoder_layers
from grpo_async.utils.devices import listed_peaks

ACTIVITIES = ("waiting", "training", "pushing", "checkpoint")
"""The activities of the trainer's thread: wait for samples, train, push weights, copy a checkpoint or wait for the previous one.
The rest of its time is "other"."""
_NUM_REWARDS = 3  # steps at the start and at the end of a run, of which a summary has the mean reward
_OF_SOURCE = re.compile("source/.+/reward")
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as families name it


class Activity:
    """What a thread is doing: shown by `str`, recorded in the timeline, and its seconds summed by kind. Only that thread
    writes it, any thread may read it.

    5 s of the kind "waiting", in the middle of which 2 s are "pushing" -> {"waiting": 3.0, "pushing": 2.0}."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = "starting", clock()
        self._kinds: list[str] = []  # kinds of the current blocks, the innermost last
        self._spent: dict[str, float] = {}
        self._counted_until = clock()
        self.num_begun = 0
        """Grows whenever an activity other than a push begins: pushes to servers that come and go are no progress."""

    def begin(self, what: str) -> None:
        self._now = what, self._clock()
        self.num_begun += 1

    @contextmanager
    def during(self, what: str, name: str, kind: str, **details: int) -> Iterator[None]:
        """Set the activity to `what` for this block, and record it as `name` in the timeline; afterward the previous activity is
        restored."""
        before = self._now
        self._count()
        self._now = what, self._clock()
        self.num_begun += kind != "pushing"
        self._kinds.append(kind)
        try:
            with span(name, **details):
                yield
        finally:
            self._count()
            self._kinds.pop()
            self._now = before

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call, by kind; time outside of all blocks is left out."""
        self._count()
        spent, self._spent = self._spent, {}
        return spent

    def __str__(self) -> str:
        what, since = self._now
        return f"{what}, for {self._clock() - since:.0f} s"

    def _count(self) -> None:
        now = self._clock()
        if self._kinds:
            kind = self._kinds[-1]
            self._spent[kind] = self._spent.get(kind, 0.0) + now - self._counted_until
        self._counted_until = now


def peak_bytes(device: torch.device) -> int:
    """The peak memory of this rank so far: on a GPU, including the cache of PyTorch's allocator; on a CPU, the resident
    memory of the process, including its libraries."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSnapshot:
    """Counters at one instant. Times in seconds; `generation_busy_s` and `generated_tokens` are the server's."""

    time_s: float
    generation_busy_s: float
    generated_tokens: int


class PipelineMeter:
    """Turns readings into metrics. Call `begin` when training begins, and `step` once per training step."""

    def __init__(self) -> None:
        self._last: CounterSnapshot | None = None
        self._oldest = 0  # the largest staleness so far

    def begin(self, now: CounterSnapshot) -> None:
        """Training begins: what happened before (startup, evaluation) belongs to no step."""
        self._last = now

    def step(
        self, now: CounterSnapshot, *, trained_tokens: int, staleness: Mapping[int, int], spent: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of the step that ended at `now`. `staleness`: number of trained tokens by their staleness. `spent`: seconds
        since the previous reading, by activity."""
        last = self._last
        assert last is not None, "call `begin` first"
        wall = max(now.time_s - last.time_s, 1e-9)
        busy = min(max(now.generation_busy_s - last.generation_busy_s, 0.0), wall)
        generated = max(now.generated_tokens - last.generated_tokens, 0)
        # tokens of evaluations may be subtracted late, so a reading may fall: nothing may be counted twice
        self._last = replace(now, generated_tokens=max(now.generated_tokens, last.generated_tokens))
        metrics = {
            "step_time": wall,
            "perf/trained_tokens_per_s": trained_tokens / wall,
            "perf/generated_tokens_per_s": generated / wall,
            **{f"pipeline/{name}": value for name, value in _of_wall(wall, busy_s=busy, spent=spent).items()},
        }
        num_tokens = sum(staleness.values())
        if num_tokens:
            self._oldest = max(self._oldest, *staleness)
            metrics["async/staleness_mean"] = sum(age * count for age, count in staleness.items()) / num_tokens
            metrics["async/staleness_max"] = float(max(staleness))
            for age in range(self._oldest + 1):  # those of earlier steps are included, as 0
                metrics[f"async/staleness/{age}"] = staleness.get(age, 0) / num_tokens
        return metrics


def pipeline_summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The same for a whole run, from the metrics of its steps: means over time, staleness over tokens. `reward_first` and
    `reward_last`, also by source: means over the first and the last three steps that have one."""
    wall = sum(row.get("step_time", 0.0) for row in rows)

    def over_time(name: str) -> float:
        return sum(row.get(name, 0.0) * row.get("step_time", 0.0) for row in rows) / max(wall, 1e-9)

    ratios = {name: over_time(f"pipeline/{name}") for name in _of_wall(1.0, busy_s=0.0, spent={})}
    ratios["overlap_efficiency"] = 1.0 - min(ratios["trainer_idle_ratio"], ratios["generator_idle_ratio"])
    trained = [(row["num_tokens"], row["async/staleness_mean"]) for row in rows if "async/staleness_mean" in row]
    summary = {
        "wall_s": wall,
        "trained_tokens_per_s": over_time("perf/trained_tokens_per_s"),
        "generated_tokens_per_s": over_time("perf/generated_tokens_per_s"),
        "staleness_mean": sum(count * age for count, age in trained) / max(sum(count for count, _ in trained), 1),
        "staleness_max": max((row.get("async/staleness_max", 0.0) for row in rows), default=0.0),
        **ratios,
    }
    for name in sorted({name for row in rows for name in row if name == "reward" or _OF_SOURCE.fullmatch(name)}):
        values = [row[name] for row in rows if name in row]
        summary |= {f"{name}_first": fmean(values[:_NUM_REWARDS]), f"{name}_last": fmean(values[-_NUM_REWARDS:])}
    return summary


def _of_wall(wall: float, *, busy_s: float, spent: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are fractions of wall time; see the module's docstring. Worked example: {"training": 2.0, "pushing": 1.0} of
    4 s -> training 0.5, pushing 0.25, checkpoint 0.0, other 0.25."""
    # the two are read from the clock one after the other, so the parts may exceed `wall` slightly
    whole = max(wall, sum(spent.get(what, 0.0) for what in ACTIVITIES))
    fractions = {what: spent.get(what, 0.0) / whole for what in ACTIVITIES}
    other = max(0.0, 1.0 - sum(fractions.values()))
    idle = fractions.pop("waiting")
    return {
        "trainer_idle_ratio": idle,
        "generator_idle_ratio": 1.0 - busy_s / wall,
        "overlap_efficiency": max(busy_s / wall, 1.0 - idle),
        **{f"{what}_fraction": part for what, part in fractions.items()},
        "other_fraction": other,
    }


def peak_flops(device: torch.device, compute_dtype: str) -> float | None:
    """Return the peak of one device in FLOP/s; None if it is not known, or the forward pass has more than 16 bits."""
    if device.type != "cuda" or compute_dtype == "float32":
        return None
    peaks = listed_peaks(torch.cuda.get_device_name(device))
    return None if peaks is None else peaks.flops


def training_flops(model: Any, computed_tokens: int, trained_tokens: int, attention_pairs: int) -> float:
    """Return the FLOPs of one forward and backward pass. Recomputed activations do not count.

    A weight takes 2 FLOPs a token forward, 2 for the gradient of its input, and 2 for its own, if it is trained; of experts, only
    the chosen ones. The head sees the trained tokens only. A head of attention with D values takes 4 D forward, and twice as many
    backward, for each pair of a query and a key that it sees."""
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = next((n for name in _NUM_EXPERTS if (n := getattr(config, name, None))), chosen)
    layers = decoder_layers(model)
    flops: float = 0.0
    for layer in layers:
        for name, weight in layer.named_parameters():
            if weight.dim() >= 2:
                part = float(chosen / experts) if ".experts." in f".{name}" else 1.0
                numel = weight.numel() * (2 if weight.dtype == torch.uint8 else 1)  # packed (training/quantize.py)
                flops += part * numel * (6 if weight.requires_grad else 4) * computed_tokens
    head = model.get_output_embeddings().weight
    flops += head.numel() * (6 if head.requires_grad else 4) * trained_tokens
    window = int(getattr(config, "sliding_window", None) or attention_pairs)  # of all layers, where kinds are not told
    in_window = min(attention_pairs, computed_tokens * window)
    for kind in getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers):
        if kind.endswith("attention") and kind != "linear_attention":
            head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            pairs = in_window if kind == "sliding_attention" else attention_pairs
            flops += 12.0 * int(config.num_attention_heads) * head_dim * pairs
    return flops
