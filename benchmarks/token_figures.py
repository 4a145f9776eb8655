"""What a training step loses to the rollout store and to the figures of its tokens (record.rollouts), side by side in one process.

    python -m benchmarks token_figures [--model .cache/quickstart/seed_0/model] [--rounds 15] [--device auto] [--json FILE]

In every round each of three steps is made once, in an order that changes from round to round, on the same samples:

    nothing     pack, train
    store       the same, and hand the groups to a store that writes beside it
    figures     the same, and collect the figures of each token, bring them to the host, and store them too

Reported are their seconds and the ratios to `nothing` within a round; the same of the CPU time of the thread that trains, which
another process on the machine disturbs less (--threads 1 puts all of torch's work into it); and, timed by themselves, the calls
that only `figures` makes. Without --model a small random Qwen3 is made. Exit code 1 when those calls take more than 2% of a step,
or the 95% interval of the median ratio of the seconds lies above 1.02.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Report, add_options
from benchmarks.turns import in_turns, median_interval, ratios

MAX_LOSS = 0.02
WAYS = ("nothing", "store", "figures")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Hugging Face model; none: a small random one is made")
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
    add_options(parser)
    options = parser.parse_args(arguments)
    report = Report("token_figures", options)
    with _model(options) as model:
        _measure(report, options, model)
    return report.finish()


@contextmanager
def _model(options: argparse.Namespace) -> Iterator[str]:
    """The folder of the model."""
    if options.model is not None:
        yield options.model
        return
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=options.prompt_tokens + options.completion_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        yield folder


def _measure(report: Report, options: argparse.Namespace, model: str) -> None:
    import torch

    from grpo_async.config.loss_sections import ClippedLoss
    from grpo_async.config.model_sections import ModelSection, OptimizerSection
    from grpo_async.config.record_sections import RolloutRecordSection
    from grpo_async.store.rollout_store import RolloutStore
    from grpo_async.training.load import load_policy
    from grpo_async.training.loss import Objective
    from grpo_async.training.optimizer import make_optimizer

    if options.threads:
        torch.set_num_threads(options.threads)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    device = torch.device(kind)
    longest = options.prompt_tokens + options.completion_tokens
    policy = load_policy(
        ModelSection(path=model, dtype=options.dtype), temperature=1.0, chunk_tokens=512, max_model_len=longest
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
        for _, way in in_turns(WAYS, options.rounds):
            wall_s, cpu_s = bench.step(way, stores.get(way))
            seconds[way].append(wall_s)
            cpu_seconds[way].append(cpu_s)
        for store in stores.values():
            store.close()
    for title, measured in (("", seconds), ("CPU of the thread, ", cpu_seconds)):
        for way in WAYS:
            report.row(f"{title}{way}", measured[way], "s")
        for way in WAYS[1:]:
            report.row(f"{title}{way} / nothing", ratios(measured, way, "nothing"), "ratio")
    report.row("calls of `figures` alone", [1000.0 * value for value in bench.own_s], "ms")
    low, high = median_interval(ratios(seconds, "figures", "nothing"), seed=options.seed)
    report.note(f"{bench.num_tokens} trained tokens a step, on {kind}")
    report.note(f"figures / nothing: 95% interval of the median {low:.4f} to {high:.4f}")
    own = statistics.median(bench.own_s) / statistics.median(seconds["nothing"])
    report.target("calls of `figures` alone, share of a step", own, at_most=MAX_LOSS)
    median = statistics.median(ratios(seconds, "figures", "nothing"))
    report.target("figures / nothing, median", median, at_most=1.0 + MAX_LOSS)


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
        from grpo_async.batching.prompts import find_prompts
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
                pack=True,
                prompts=find_prompts(samples) if self._policy.obstacle_to_shared_prompts is None else None,
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
            torch.cuda.synchronize()


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

    draw = random.Random(options.seed)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
