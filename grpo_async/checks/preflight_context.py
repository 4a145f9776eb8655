"""What the preflight looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.inference.surface import ScoreAnswer, ServerInfo
from grpo_async.records import Prompt
from grpo_async.rundir import RunDir
from grpo_async.weights.verify import TrainerScores


class ScoringControl(Protocol):
    """What is asked of a server; inference.control.ServerControl has it."""

    def score(self, token_ids: Sequence[int]) -> ScoreAnswer: ...


class CheckedServer(Protocol):
    """One server; inference.fleet.Server has this."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def info(self) -> ServerInfo | None: ...

    @property
    def control(self) -> ScoringControl: ...


@dataclass(frozen=True, kw_only=True)  # no slots: cached_property needs a place
class PreflightContext:
    """All that the checks look at."""

    config: ExperimentConfig
    rundir: RunDir
    renderer: ChatRenderer
    servers: Sequence[CheckedServer]
    """Those that serve."""
    prompts: Sequence[Prompt]
    """A few of data.train."""
    probes: Sequence[Sequence[int]]
    """See weights.verify.probe_sequences."""
    score_on_trainer: Callable[[Sequence[Sequence[int]], str], TrainerScores]
    """Log-probabilities of whole sequences under the trainer's weights, at the rounding of a dtype; a collective, called once, on
    the calling thread."""
    parameter_problems: Sequence[str]
    """What weights.buckets.check_names found between trainer and servers."""
    parameter_shapes: Mapping[str, Sequence[int]]
    """Of the parameters that the trainer sends."""
    num_embeddings: int
    """Rows of the trainer's embedding."""
    policy_version: int
    """What the servers serve."""
    transport: str
    first_push: Mapping[str, float]
    """PushReport.metrics() of the first push."""
    device: str
    """Where the trainer runs: "cpu" or "cuda"."""
    token: str | None
    trainer_scores: TrainerScores | None = None
    """Of the probes; None: the trainer could not score them."""
    tool_sets: Sequence[Sequence[Mapping[str, Any]]] = field(default=())
    """Sets of tools (JSON schemas) that rollouts may be offered."""

    @property
    def authority(self) -> Path | None:
        """PEM file of trusted certificates."""
        tls = self.config.inference.tls
        return tls.trusted if tls else None

    @cached_property
    def rendered_prompts(self) -> list[list[int]]:
        """Token ids of the prompts as rollouts begin with them; empty where a rollout function makes its own.

        Raises:
            ChatError: the chat template refuses a prompt.
        """
        if self.config.rollout_function is not None:
            return []
        tools = self.tool_sets[0] if len(self.tool_sets) == 1 else ()
        return [
            self.renderer.prompt_ids(prompt.messages, is_conversational=prompt.is_conversational, tools=tools)
            for prompt in self.prompts
            if prompt.messages  # those of an environment may begin empty
        ]
