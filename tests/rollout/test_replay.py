"""The same tool conversations through the real vLLM and the embedded engine: what the sampler says of a token is what the
trainer says of it, over several turns with tool results between them.

Tolerance, fp32: 1e-4 for vLLM, 2e-5 for the embedded engine, in the natural log of a token's probability.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config.sections import AdvantageSection, ModelSection
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.router import FixedServers
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import FinishReason, RolloutCompletion, RolloutGroup, RolloutSample
from grpo_async.rewards import RewardFunction
from grpo_async.rollout.conversation import ConversationProducer
from grpo_async.rollout.group import ErrorLog
from grpo_async.scoring.scorer import Scorer
from grpo_async.tools import Tool
from grpo_async.training.load import load_policy
from tests.rollout.fakes import open_group
from tests.rollout.replay_parser import look_up
from tests.support.records import make_prompt
from tests.support.tiny_model import build_tool_model

PARSER = "tests.rollout.replay_parser:always_calls"
MAX_TURNS = 4
QUESTIONS = ("hello world", "what is one and one?", "user <tool_call> hello", "and now?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tool_model(tmp_path_factory.mktemp("replay_model"))


@contextmanager
def _embedded(model: Path, folder: Path) -> Iterator[tuple[str, str | None]]:
    from tests.servers.embedded_support import live, load

    with live(load(model), max_model_len=1024) as served:
        yield str(served.client.base_url), None


@contextmanager
def _vllm(model: Path, folder: Path) -> Iterator[tuple[str, str | None]]:
    from tests.vllm.server import experiment, running_server

    with running_server(experiment(str(model)), folder) as server:
        yield server.url, server.token


async def _converse(renderer: ChatRenderer, url: str, token: str | None, temperature: float) -> list[RolloutGroup]:
    errors = ErrorLog()
    # a random model ends its turn with any of many tokens, else it would hardly ever
    ends = [*renderer.end_of_turn_ids, *range(5, len(renderer.tokenizer), 7)]
    settings = SamplingSettings(
        temperature=temperature,
        max_completion_tokens=600,
        max_model_len=1024,
        max_turn_tokens=60,
        max_turns=MAX_TURNS,
        stop_token_ids=ends,
    )
    servers = FixedServers([url])
    async with InferenceClient(servers, token=token, request_timeout_s=60.0, wait_timeout_s=60.0) as client:
        producer = ConversationProducer(
            client,
            renderer,
            settings,
            slots=asyncio.Semaphore(16),
            rollout_timeout_s=120.0,
            max_result_chars=200,
            errors=errors,
            tools=[Tool.from_function(look_up)],
        )

        async def group(number: int, question: str) -> RolloutGroup:
            made = open_group(make_prompt(number, question), name=f"g{number}", seed=10 * number)
            async with producer.produce(made):
                return made.record

        groups = await asyncio.gather(*(group(number, question) for number, question in enumerate(QUESTIONS)))
    assert errors.counts == {}
    return groups


def _samples(groups: Sequence[RolloutGroup]) -> list[RolloutSample]:
    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(index) for index in range(len(completions))]

    scorer = Scorer([RewardFunction(reward)], advantage=AdvantageSection(), train_zero_variance=True)

    async def score() -> list[RolloutSample]:
        scored = [await scorer.score(group) for group in groups]
        return [sample for group in scored for sample in group.samples]

    return asyncio.run(score())


def _worst_difference(model: Path, samples: Sequence[RolloutSample], temperature: float) -> float:
    """Largest |trainer logprob - sampler logprob| over all trained tokens, packed as in a step."""
    section = ModelSection(path=str(model))
    policy = load_policy(section, temperature=temperature, chunk_tokens=64, max_model_len=1024)
    lengths = [len(sample.token_ids) for sample in samples]
    plan = plan_batch(lengths, world_size=1, micro_batch_tokens=4096, pack=True)
    worst = 0.0
    for batch in split_by_rank(samples, [1.0] * len(samples), plan, trainer_version=0)[0].pack():
        with torch.no_grad():
            logprobs = policy(batch).logprobs
        worst = max(worst, float((logprobs - batch.sampler_logprobs).abs().max()))
    return worst


def _check_shape(completions: Sequence[RolloutCompletion], renderer: ChatRenderer) -> None:
    """Several turns, tool results masked, ids as sampled plus suffixes; control text of a tool is no control token."""
    assert any(len(completion.turns) == MAX_TURNS for completion in completions)
    assert any(len(turn.tool_calls) == 2 for completion in completions for turn in completion.turns)
    for turn in (turn for completion in completions for turn in completion.turns[:-1]):
        assert turn.finish_reason is FinishReason.STOP
        assert turn.tool_calls
        num_texts = renderer.tokenizer.decode(turn.tool_response_ids).count("<|im_end|>")
        num_tokens = turn.tool_response_ids.tolist().count(renderer.tokenizer.eos_token_id)
        assert num_texts == num_tokens + sum(not call.failed for call in turn.tool_calls)


def _agree(model: Path, renderer: ChatRenderer, url: str, token: str | None, *, tolerance: float) -> None:
    """Sampled conversations agree with the trainer."""
    groups = asyncio.run(_converse(renderer, url, token, 1.0))
    completions = [completion for group in groups for completion in group.completions]
    _check_shape(completions, renderer)
    samples = _samples(groups)
    assert sum(sample.num_trained_tokens for sample in samples) == sum(c.num_sampled_tokens for c in completions)
    assert _worst_difference(model, samples, 1.0) < tolerance


def _greedy(renderer: ChatRenderer, url: str, token: str | None) -> list[list[int]]:
    """The ids of greedy conversations."""
    groups = asyncio.run(_converse(renderer, url, token, 0.0))
    return [completion.completion_ids.tolist() for group in groups for completion in group.completions]


@pytest.mark.slow
def test_the_trainer_agrees_with_the_embedded_engine_on_every_sampled_token_of_tool_conversations(
    model: Path, tmp_path: Path
) -> None:
    """R2.2, R4.5: the loss mask is 1 exactly on sampled tokens, and for those both sides have the same logprob."""
    renderer = ChatRenderer.load(ModelSection(path=str(model)), parser=PARSER)
    with _embedded(model, tmp_path) as (url, token):
        _agree(model, renderer, url, token, tolerance=2e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_trainer_agrees_with_vllm_and_both_engines_have_the_same_greedy_conversations(
    needs_vllm: None, model: Path, tmp_path: Path
) -> None:
    """R2.2, R4.5: without a draw, ids, calls, results and suffixes are the same token by token."""
    renderer = ChatRenderer.load(ModelSection(path=str(model)), parser=PARSER)
    with _vllm(model, tmp_path) as (url, token):
        _agree(model, renderer, url, token, tolerance=1e-4)
        by_vllm = _greedy(renderer, url, token)
    with _embedded(model, tmp_path) as (url, token):
        assert _greedy(renderer, url, token) == by_vllm
