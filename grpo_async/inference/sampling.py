"""How a rollout samples: its settings and limits, and where its text ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.inference.api import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are sampled and where a rollout is cut."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    structured_outputs: Mapping[str, Any] | None = None
    max_completion_tokens: int
    max_model_len: int
    max_turn_tokens: int | None = None
    max_turns: int = 1_000_000
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    top_logprobs: int = 0
    corrects_sampling: bool = False
    """The loss corrects for tokens that are sampled from a part of the policy's distribution; see BaseLoss."""

    def request(self, **fields: Any) -> GenerateRequest:
        """A request with these settings; `fields` are the others of GenerateRequest, and may override the settings."""
        shared = {name: getattr(self, name) for name in GenerateRequest.model_fields if hasattr(self, name)}
        return GenerateRequest(**{**shared, **fields})

    def turn_budget(self, num_context: int, *, num_used: int) -> int:
        """max_tokens of a turn = min(turn limit, rest of the completion budget, rest of the model length).

        Turn limit none, budget 48, 40 used, model length 128, 100 in the context: min(8, 28) = 8.
        """
        budget = max(0, min(self.max_completion_tokens - num_used, self.max_model_len - num_context))
        return budget if self.max_turn_tokens is None else min(budget, self.max_turn_tokens)

    def shown(self, text: str) -> str:
        """The part of a sampled text that rewards and messages get: it ends before the stop string.

        stop ["\\nQ:"]: "4\\nQ: 3" -> "4".
        """
        found = find_stop(text, self.stop)
        return text if found is None else text[: found[0]]


def listed_stop(stop: Any) -> Any:
    """`stop` as OpenAI's API takes it (null, a text or a list of texts) as a list."""
    return [] if stop is None else [stop] if isinstance(stop, str) else stop


def find_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Begin and end in `text` of the stop string that ends first; if several end together, of the one listed first (vLLM's
    rule). None if there is none.

    "ab\\nQ:" and ["\\nQ:", "b\\n"] -> (1, 3).
    """
    places = ((text.find(each), len(each)) for each in stop)
    found = [(begin, begin + length) for begin, length in places if begin >= 0]
    return min(found, key=lambda place: place[1], default=None)
