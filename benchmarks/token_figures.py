"""What a training step loses to the rollout store and to the figures of its tokens (record.rollouts), side by side in one process.

    python -m benchmarks token_figures [--model .cache/quickstart/seed_0/model] [--rounds 15] [--device auto] [--json]

In every round each of three steps is made once, in an order that changes from round to round, on the same samples:

    nothing     pack, train
    store       the same, and hand the groups to a store that writes beside it
    figures     the same, and collect the figures of each token, bring them to the host, and store them too

Printed are the medians and quartiles of their seconds and of the ratios to `nothing` within a round; the same of the CPU time of
the thread that trains, which another process on the machine disturbs less (--threads 1 puts all of torch's work into it); and,
timed by themselves, the seconds of the calls that only `figures` makes. Exit code 1 when those are more than 2 % of a step, or the
median ratio of the seconds is above 1.02 by more than the spread of the rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_LOSS = 0.02
WAYS = ("nothing", "store", "figures")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/quickstart/seed_0/model", help="folder of a Hugging Face model")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument(
        "--completion-tokens", type=int, default=128, help="longest completion; they have a quarter of it at least"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 = as it sees fit")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    report = _measure(options)
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["is_small"] else 1


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from grpo_async.config.loss_sections import ClippedLoss
    from grpo_async.config.model_sections import ModelSection, OptimizerSection
    from grpo_async.config.record_sections import RolloutRecordSection
    from grpo_async.store.rollout_store import RolloutStore
    from grpo_async.training.load import load_policy
    from grpo_async.training.objective import Objective
    from grpo_async.training.optimizers import make_optimizer

    if options.threads:
        torch.set_num_threads(options.threads)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    device = torch.device(kind)
    longest = options.prompt_tokens + options.completion_tokens
    policy = load_policy(
        ModelSection(path=options.model, dtype=options.dtype), temperature=1.0, chunk_tokens=512, max_model_len=longest
    ).to(device)
    bench = _Bench(
        options,
        policy=policy,
        optimizer=make_optimizer(policy, OptimizerSection(lr=1e-6)),
        objective=Objective(ClippedLoss(), num_minibatches=options.minibatches),
        device=device,
    )
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            way: RolloutStore(Path(folder) / way, settings=RolloutRecordSection(token_figures=way == "figures"))
            for way in WAYS[1:]
        }
        for way in WAYS:  # memory, threads and files are there when it counts
            bench.step(way, stores.get(way))
        bench.own_s.clear()
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        cpu_seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            turned = WAYS[number % 3 :] + WAYS[: number % 3]
            for way in turned if number % 2 else reversed(turned):
                wall_s, cpu_s = bench.step(way, stores.get(way))
                seconds[way].append(wall_s)
                cpu_seconds[way].append(cpu_s)
        for store in stores.values():
            store.close()
    ratios, cpu_ratios = _ratios(seconds), _ratios(cpu_seconds)
    own = statistics.median(bench.own_s) / statistics.median(seconds["nothing"])
    low, middle, _ = _quartiles(ratios["figures"])
    return {
        "machine": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
        "model": options.model,
        "num_tokens": bench.num_tokens,
        "rounds": options.rounds,
        "seconds": {way: _quartiles(values) for way, values in seconds.items()},
        "ratio_to_nothing": {way: _quartiles(values) for way, values in ratios.items()},
        "cpu_seconds": {way: _quartiles(values) for way, values in cpu_seconds.items()},
        "cpu_ratio_to_nothing": {way: _quartiles(values) for way, values in cpu_ratios.items()},
        "own_calls_s": _quartiles(bench.own_s),
        "own_calls_share": own,
        "is_small": own <= MAX_LOSS and (middle <= 1.0 + MAX_LOSS or low <= 1.0),
    }


class _Bench:
    """One step in one of three ways, on samples that are the same in each."""

    def __init__(
        self, options: argparse.Namespace, *, policy: Any, optimizer: Any, objective: Any, device: Any
    ) -> None:
        self._options = options
        self._policy, self._optimizer, self._objective, self._device = policy, optimizer, objective, device
        self._groups = _groups(options, vocab_size=policy.model.config.get_text_config().vocab_size)
        self._step = 0
        self.num_tokens = sum(sample.num_trained_tokens for group in self._groups for sample in group.samples)
        self.own_s: list[float] = []

    def step(self, way: str, store: Any) -> tuple[float, float]:
        """Seconds of a step, from its groups to its settled groups: by the clock, and of this thread's CPU time."""
        import torch

        from grpo_async.batching.minibatch import split_groups
        from grpo_async.batching.pack import pack_rank
        from grpo_async.batching.plan import plan_batch
        from grpo_async.batching.weights import token_weights
        from grpo_async.records import GroupStatus
        from grpo_async.training.step import train_step
        from grpo_async.training.token_figures import FigurePlan, TokenCollector

        options, own, with_figures = self._options, _Timer(), way == "figures"
        self._step += 1
        self._synchronize()
        began, cpu_began = time.perf_counter(), time.thread_time()
        plans, packed = FigurePlan(1), []
        for minibatch in split_groups(self._groups, options.minibatches):
            samples = minibatch.samples
            plan = plan_batch(
                [len(sample.token_ids) for sample in samples],
                num_ranks=1,
                micro_batch_tokens=options.micro_batch_tokens,
                row_tokens=None,
                pack=True,
            )
            weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=options.completion_tokens)
            packed.append(pack_rank(samples, weights, plan, 0, trainer_version=0))
            with own:
                plans.add(samples, plan, is_wanted=[with_figures] * len(samples))
        tokens: TokenCollector | None = None
        if with_figures:
            with own:
                (order,) = plans.orders()
                assert order is not None
                tokens = _timed(TokenCollector, own)(order, self._device)
        result = train_step(
            self._policy,
            self._optimizer,
            packed,
            objective=self._objective,
            reference=None,
            lr=1e-6,
            max_grad_norm=1.0,
            device=self._device,
            tokens=tokens,
        )
        figures = {}
        if tokens is not None:
            with own:
                figures = plans.by_rollout([tokens.on_host()], result.updates)
        for group in self._groups if store is not None else ():
            mine = {sample.rollout_id: figures[sample.rollout_id] for sample in group.samples} if figures else None
            store.append(group.group, group.samples, GroupStatus.TRAINED, self._step, scored=group, figures=mine)
        self._synchronize()
        seconds, cpu_seconds = time.perf_counter() - began, time.thread_time() - cpu_began
        if with_figures:
            self.own_s.append(own.seconds)
        assert torch.isfinite(torch.tensor(result.loss))
        return seconds, cpu_seconds

    def _synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize()  # waits: for the kernels of a step


class _Timer:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def _timed(collector: type[Any], timer: _Timer) -> type[Any]:
    """The collector, its calls within the step timed; on a GPU that is what they take to be launched."""

    class Timed(collector):  # type: ignore[misc]
        def add(self, output: Any) -> None:
            with timer:
                super().add(output)

        def begin_copy(self) -> None:
            with timer:
                super().begin_copy()

    return Timed


def _groups(options: argparse.Namespace, *, vocab_size: int) -> list[Any]:
    from grpo_async.records import (
        FinishReason,
        Origin,
        Prompt,
        RolloutCompletion,
        RolloutGroup,
        RolloutSample,
        RolloutStatus,
        ScoredGroup,
        TaggedMessage,
        TurnRecord,
    )

    draw = random.Random(0)
    groups = []
    for group_id in range(options.groups):
        prompt_ids = [draw.randrange(vocab_size) for _ in range(options.prompt_tokens)]
        prompt = Prompt(prompt_id=group_id, messages=[TaggedMessage(role="user", content="?", origin=Origin.PROMPT)])
        completions, samples = [], []
        for index in range(options.group_size):
            length = draw.randint(options.completion_tokens // 4, options.completion_tokens)
            ids = [draw.randrange(vocab_size) for _ in range(length)]
            logprobs = [-draw.random() * 5.0 for _ in ids]
            turn = TurnRecord(
                output_ids=ids, output_logprobs=logprobs, policy_versions=[0] * length, finish_reason=FinishReason.STOP
            )
            rollout_id = f"g{group_id}-r{index}"
            completions.append(
                RolloutCompletion(
                    rollout_id=rollout_id, prompt_ids=prompt_ids, turns=[turn], status=RolloutStatus.FINISHED
                )
            )
            before = len(prompt_ids)
            samples.append(
                RolloutSample(
                    group_id=group_id,
                    rollout_id=rollout_id,
                    token_ids=[*prompt_ids, *ids],
                    loss_mask=[0] * before + [1] * length,
                    sampler_logprobs=[0.0] * before + logprobs,
                    policy_versions=[-1] * before + [0] * length,
                    advantage=draw.choice((-1.0, 1.0)),
                    rewards={"f": 1.0},
                    reward=1.0,
                    truncated=False,
                )
            )
        group = RolloutGroup(group_id=group_id, prompt=prompt, completions=completions)
        count = len(samples)
        groups.append(
            ScoredGroup(group=group, samples=samples, rewards=[1.0] * count, reward_parts=[{"f": 1.0}] * count)
        )
    return groups


def _ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """To the step without store of the same round."""
    plain = seconds["nothing"]
    return {way: [mine / other for mine, other in zip(seconds[way], plain, strict=True)] for way in WAYS[1:]}


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """25 %, median, 75 %."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['num_tokens']} trained tokens a step, {report['rounds']} rounds, {report['device']} ({report['machine']})"
    )
    for prefix, title in (("", "seconds"), ("cpu_", "CPU seconds of the thread")):
        print(f"{title:26} {'25 %':>9} {'median':>9} {'75 %':>9}     {'ratio: 25 %':>12} {'median':>9} {'75 %':>9}")
        for way, (low, middle, high) in report[f"{prefix}seconds"].items():
            ratio = report[f"{prefix}ratio_to_nothing"].get(way)
            ratios = "" if ratio is None else f"     {ratio[0]:12.4f} {ratio[1]:9.4f} {ratio[2]:9.4f}"
            print(f"  {way:24} {low:9.4f} {middle:9.4f} {high:9.4f}{ratios}")
    low, middle, high = report["own_calls_s"]
    print(
        f"calls of `figures` alone: {middle * 1000:.2f} ms ({low * 1000:.2f} to {high * 1000:.2f}), "
        f"{report['own_calls_share']:.2%} of a step"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
