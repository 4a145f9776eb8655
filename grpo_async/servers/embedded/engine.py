"""Continuous batching over a Hugging Face causal language model. It knows nothing of HTTP; a single thread calls it.

A step = fill the slots that need it (new requests; every request after new weights), then one decode over all rows, which
samples. Every change (admission, abort, weights, version) happens between two steps: a token comes from the weights whose
version it carries.

Tokens and logprobs of a request do not depend on what else is in flight, to the last bit (on CPUs with float32): products of few
rows and attention over other lengths round differently, so a forward has at least _MIN_ROWS rows, and lengths are rounded up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from grpo_async.chat.renderer import eos_ids
from grpo_async.errors import ConfigError, message_of
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.sampling import find_stop
from grpo_async.records import FinishReason, TopArray
from grpo_async.servers.embedded.kv_slots import SlotCache
from grpo_async.servers.embedded.sampler import SamplingBatch, sample
from grpo_async.servers.requests import NOT_FINITE, EngineOutput, TokenStream

_PREFILL_TOKENS = 8192  # of one prefill forward, before lengths are rounded up; a longer sequence is filled alone
_MIN_ROWS = 16  # for fewer rows, BLAS libraries use kernels that add in another order
_LENGTH_STEP = 32  # attention is computed over a multiple of this many positions
_ADMIT_EVERY_STEPS = 4  # a prefill of any size costs about a decode, so a busy engine batches requests
_STOP_MARGIN = 64  # tokens decoded before the longest possible stop string
_SCORED_ROWS = 256  # rows of logits at a time: 150 MB in float32 with a vocabulary of 150 000
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.5, torch.float16: 0.2}  # nats; rounding errors are far smaller


class RunningSequence:
    """State of one request. `tokens` is prompt + sampled; `stream` is where the engine's caller sends its outputs."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        eos_ids: Sequence[int],
        stream: TokenStream,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.request = request
        self.stream = stream
        self.tokens = list(request.token_ids)
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + request.max_tokens
        self.stop_ids = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(eos_ids))
        self.decode = decode
        self.prompt_key = tuple(request.token_ids[:-1])
        self.slot = -1  # -1: waiting or over
        self.filled_by: int | None = None  # number of the weights that computed the prompt's keys and values

    @property
    def cache_key(self) -> tuple[int, ...]:
        """Sequences with equal keys that the same weights fill have equal keys and values for tokens[:-1]."""
        return self.prompt_key if len(self.tokens) == self.prompt_len else tuple(self.tokens[:-1])

    def append(self, token: int, logprob: float, top: TopArray | None = None) -> EngineOutput:
        self.tokens.append(token)
        output = EngineOutput(token_ids=(token,), logprobs=(logprob,))
        if top is not None and self.request.top_logprobs:
            output.top_logprobs = (top[: self.request.top_logprobs].tobytes(),)
        if token in self.stop_ids:
            output.finish_reason = FinishReason.STOP
        elif len(self.tokens) == self.limit:
            output.finish_reason = FinishReason.LENGTH
        if self.request.stop and (stop := self._stop_string()):
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop
        return output

    def _stop_string(self) -> str:
        """The stop string that the last token has completed; "" if none. A string has at most as many tokens as bytes; more are
        decoded, so that the text does not begin inside a multi-byte character."""
        assert self.decode is not None
        num_bytes = max(len(each.encode("utf-8", "surrogatepass")) for each in self.request.stop)
        text = self.decode(self.tokens[max(self.prompt_len, len(self.tokens) - num_bytes - _STOP_MARGIN) :])
        found = find_stop(text, self.request.stop)
        return "" if found is None else text[slice(*found)]


class SlotEngine:
    """Generates for up to `num_slots` sequences at once; further ones wait in order of arrival."""

    def __init__(self, model: Any, *, num_slots: int, max_model_len: int) -> None:
        self._model = model
        self.device: torch.device = model.device
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.eos_ids = eos_ids(model.generation_config.eos_token_id)  # that of config.json where it has no such file
        self.policy_version = 0
        self._cache = SlotCache(model, num_slots=max(num_slots, _MIN_ROWS), max_len=max_model_len)
        self._weights_number = 0  # number of the served weights; versions may repeat, this does not
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []  # index = slot
        self._outbox: list[tuple[RunningSequence, EngineOutput]] = []
        self._steps_since_admission = 0
        # The running rows as tensors; rebuilt when rows come or go, else advanced by the decode itself.
        self._rows_changed = True
        # [max(n, _MIN_ROWS)] last token of each row, and its position
        self._tokens = torch.empty(0, dtype=torch.int64, device=self.device)
        self._positions = torch.empty(0, dtype=torch.int64, device=self.device)
        self._next_positions = np.empty(0, dtype=np.uint64)  # [n] position of the token to draw
        self._sampling: SamplingBatch | None = None
        self._slot_starts = torch.arange(max(num_slots, _MIN_ROWS), device=self.device) * max_model_len
        self._all_positions = torch.arange(max_model_len, device=self.device)  # [max_model_len]
        self._visible = torch.zeros((), dtype=model.dtype, device=self.device)
        self._hidden = torch.full((), -torch.inf, dtype=model.dtype, device=self.device)

    @property
    def num_active(self) -> int:
        """Requests with a slot or waiting for one."""
        return len(self._waiting) + len(self._running)

    def stats(self) -> dict[str, int | float]:
        """The fields of ServerInfo that change."""
        used = sum(len(sequence.tokens) for sequence in self._running)
        return {
            "running_requests": len(self._running),
            "waiting_requests": len(self._waiting),
            "kv_usage": used / (self.num_slots * self.max_model_len),
        }

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i + 1] | those before it) at temperature 1 under the served weights. [len(token_ids) - 1]"""
        return score_tokens(self._model, token_ids)

    def add(self, sequence: RunningSequence) -> None:
        self._waiting.append(sequence)

    def abort(self, sequence: RunningSequence) -> None:
        """End a sequence with reason "abort" and free its slot. Does nothing if it has already ended."""
        if sequence.slot < 0 and sequence not in self._waiting:
            return
        self._outbox.append((sequence, EngineOutput(finish_reason=FinishReason.ABORT)))
        if sequence.slot >= 0:
            self._retire([sequence.slot])
        else:
            self._waiting.remove(sequence)

    def abort_all(self) -> None:
        for sequence in [*self._running, *self._waiting]:
            self.abort(sequence)

    def fail_all(self, error: str) -> None:
        """End every sequence with an error. Touches no tensor."""
        for sequence in [*self._running, *self._waiting]:
            self._outbox.append((sequence, EngineOutput(error=error)))
            sequence.slot = -1
        self._running.clear()
        self._waiting.clear()

    def take_outputs(self) -> list[tuple[RunningSequence, EngineOutput]]:
        """Outputs since the last call, in order. Take them before `finish_update`: they are of the weights until then."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def parameters(self) -> dict[str, torch.Tensor]:
        """Served parameters by name; tied ones once, so lm_head is absent if it is tied to the embedding."""
        return dict(self._model.named_parameters())

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        """Overwrite parameters in place, as they come; returns those that did not come. `finish_update` must follow before the
        next step."""
        parameters = self.parameters()
        left_out = dict.fromkeys(parameters)
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            left_out.pop(name, None)
        return left_out

    @torch.inference_mode()
    def finish_update(self, *, policy_version: int, keep_cache: bool = False) -> None:
        """The weights are new: every later token carries `policy_version`. Running sequences are refilled with the new
        weights before their next token, unless `keep_cache`. Others start on the new weights either way."""
        self.policy_version = policy_version
        self._weights_number += 1
        if keep_cache:
            # the last token's keys and values are written by the decode that follows it
            self._cache.clear(keep=[len(sequence.tokens) - 1 for sequence in self._running])
            return
        self._cache.clear()
        for sequence in self._running:
            sequence.filled_by = None

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, fill slots, and sample one token for every running sequence."""
        self._admit()
        missing = [sequence for sequence in self._running if sequence.filled_by is None]
        if missing:
            self._fill(missing)
        if self._running:
            self._decode()

    def _admit(self) -> None:
        self._steps_since_admission += 1
        num_new = min(len(self._waiting), self.num_slots - len(self._running))
        if num_new == 0:
            return
        few = num_new < max(1, len(self._running) // 4)
        if few and self._steps_since_admission < _ADMIT_EVERY_STEPS:
            return
        self._steps_since_admission = 0
        for _ in range(num_new):
            sequence = self._waiting.popleft()
            sequence.slot = len(self._running)
            self._running.append(sequence)
        self._rows_changed = True

    def _fill(self, missing: Sequence[RunningSequence]) -> None:
        """Compute keys and values of tokens[:-1], once for sequences that share them (the completions of one group)."""
        # not from rows that continued with keys and values of older weights
        computed = {row.prompt_key: row.slot for row in self._running if row.filled_by == self._weights_number}
        to_compute: dict[tuple[int, ...], RunningSequence] = {}
        copies: list[tuple[RunningSequence, tuple[int, ...]]] = []
        for sequence in missing:
            sequence.filled_by = self._weights_number
            key = sequence.cache_key
            if not key:
                continue  # the decode alone handles a prompt of one token
            if key in computed or key in to_compute:
                copies.append((sequence, key))
            else:
                to_compute[key] = sequence
        for chunk in _cut_by_length(to_compute.values()):
            self._prefill(chunk)
        if copies:
            computed |= {key: sequence.slot for key, sequence in to_compute.items()}
            sources = [computed[key] for _, key in copies]
            self._cache.copy_rows(sources, [s.slot for s, _ in copies], max(len(key) for _, key in copies))

    def _prefill(self, sequences: Sequence[RunningSequence]) -> None:
        contexts = [sequence.tokens[:-1] for sequence in sequences]
        longest = self._round_up(max(map(len, contexts)))
        # Padding is on the right, where causal attention cannot see it, so no mask is needed.
        padded = [context + [0] * (longest - len(context)) for context in contexts]  # at least _MIN_ROWS tokens in all
        input_ids = torch.tensor(padded, device=self.device)  # [rows, longest]
        self._cache.prefill([sequence.slot for sequence in sequences], longest)
        self._model(
            input_ids=input_ids,
            position_ids=self._all_positions[:longest].unsqueeze(0).expand(len(sequences), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,  # the logits are not used
        )

    def _decode(self) -> None:
        rows = self._running
        if self._rows_changed:
            self._rebuild_rows()
        longest = self._round_up(max([len(sequence.tokens) for sequence in rows]))
        attended = self._all_positions[:longest] <= self._positions.unsqueeze(1)  # [n, longest]
        mask = torch.where(attended, self._visible, self._hidden)[:, None, None]  # [n, 1, 1, longest]
        self._cache.decode(self._slot_starts[: len(self._positions)] + self._positions, longest)
        logits = self._model(
            input_ids=self._tokens.unsqueeze(1),
            attention_mask=mask,
            position_ids=self._positions.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        assert self._sampling is not None
        tokens, logprobs, top = sample(logits[: len(rows)], self._sampling, self._next_positions)
        self._sampling.note(tokens)
        self._tokens[: len(rows)] = tokens
        self._positions[: len(rows)] += 1
        self._next_positions += np.uint64(1)
        self._append_tokens(tokens.tolist(), logprobs.tolist(), top)

    def _append_tokens(self, tokens: list[int], logprobs: list[float], top: TopArray | None) -> None:
        ended = []
        rows = [None] * len(tokens) if top is None else top
        for sequence, token, logprob, row in zip(self._running, tokens, logprobs, rows, strict=True):
            output = sequence.append(token, logprob, row) if math.isfinite(logprob) else EngineOutput(error=NOT_FINITE)
            self._outbox.append((sequence, output))
            if output.is_last:
                ended.append(sequence.slot)
        if ended:
            self._retire(ended)

    def _retire(self, slots: Sequence[int]) -> None:
        """Free `slots` (ascending) and close the gaps with the last rows."""
        gone = set(slots)
        num_left = len(self._running) - len(slots)
        gaps = [slot for slot in slots if slot < num_left]
        movers = [slot for slot in range(num_left, len(self._running)) if slot not in gone]
        for slot in slots:
            self._running[slot].slot = -1
        for gap, mover in zip(gaps, movers, strict=True):
            self._running[gap] = self._running[mover]
            self._running[gap].slot = gap
        if movers:
            self._cache.copy_rows(movers, gaps, max(len(self._running[gap].tokens) for gap in gaps))
        del self._running[num_left:]
        self._rows_changed = True

    def _round_up(self, length: int) -> int:
        return min(-(-length // _LENGTH_STEP) * _LENGTH_STEP, self.max_model_len)

    def _rebuild_rows(self) -> None:
        rows = self._running
        lengths = [len(sequence.tokens) for sequence in rows]
        # the rows that fill up to _MIN_ROWS write to position 0 of unused slots
        filling = [0] * (_MIN_ROWS - len(rows))
        self._tokens = torch.tensor([*(sequence.tokens[-1] for sequence in rows), *filling], device=self.device)
        self._positions = torch.tensor([*(length - 1 for length in lengths), *filling], device=self.device)
        self._next_positions = np.array(lengths, dtype=np.uint64)
        self._sampling = SamplingBatch.of(
            [sequence.request for sequence in rows],
            tokens=[sequence.tokens for sequence in rows],
            vocab_size=self.vocab_size,
            device=self.device,
        )
        self._rows_changed = False


def _cut_by_length(sequences: Iterable[RunningSequence]) -> Iterator[list[RunningSequence]]:
    """Runs of sequences of similar length, each of at most _PREFILL_TOKENS tokens with padding; a longer sequence is a run by
    itself. With a limit of 100: 50, 10, 48, 9 -> [50, 48], [10, 9]."""
    chunk: list[RunningSequence] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens), reverse=True):
        if chunk and (len(chunk) + 1) * len(chunk[0].tokens) > _PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(sequence)
    if chunk:
        yield chunk


def compute_logits_in_float32(model: Any) -> None:
    """Implement `model.head_dtype: float32` as vLLM does: weights and states keep their dtype, the product is in float32."""
    head = model.get_output_embeddings()

    def forward(states: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return F.linear(states.float(), head.weight.float(), bias)

    head.forward = forward


@torch.inference_mode()
def score_tokens(model: Any, token_ids: Sequence[int]) -> list[float]:
    """log softmax(logits) at temperature 1: entry i is the score of token_ids[i + 1] given those before it. [length - 1]. In
    pieces, so that few rows of logits exist at a time."""
    tokens = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    cache = DynamicCache()  # a separate cache: the slots belong to the running sequences
    scores: list[float] = []
    for start in range(0, len(tokens) - 1, _SCORED_ROWS):
        end = min(start + _SCORED_ROWS, len(tokens) - 1)
        logits = model(
            input_ids=tokens[start:end].unsqueeze(0),
            position_ids=positions[start:end].unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
        ).logits[0]  # [end - start, vocab]
        logits = logits.float()
        chosen = logits.gather(1, tokens[start + 1 : end + 1, None])[:, 0]
        scores.extend((chosen - logits.logsumexp(-1)).tolist())
    return scores


@torch.inference_mode()
def check_against_model(engine: SlotEngine, model: Any) -> None:
    """Generate greedily and compare logprobs with those of a plain forward; ConfigError if they differ. An architecture that
    uses our cache, mask and positions in an unusual way could return plausible nonsense."""
    for length in (2, 5):  # ragged, so that padding matters
        if length + 2 > engine.max_model_len:
            continue
        request = GenerateRequest(
            request_id="self-check",
            token_ids=[(7 * i + length) % engine.vocab_size for i in range(length)],
            max_tokens=2,
            temperature=0.0,
            ignore_eos=True,
        )
        engine.add(RunningSequence(request, eos_ids=(), stream=TokenStream()))
    try:
        while engine.num_active:
            engine.step()
    except Exception as error:  # the architecture's code may raise anything for an unknown cache
        what = f"{model.config.model_type} does not run on the embedded engine ({message_of(error)})"
        raise ConfigError(f"model.path: {what}; use `inference.engine: vllm`") from error
    sampled: dict[RunningSequence, list[float]] = {}
    for sequence, output in engine.take_outputs():
        sampled.setdefault(sequence, []).extend(output.logprobs if output.error is None else [math.nan])
    errors: list[float] = []
    for sequence, last in sampled.items():
        ids = torch.tensor([sequence.tokens], device=model.device)
        logprobs = model(ids[:, :-1]).logits[0].float().log_softmax(-1)  # of the model alone: no positions, no cache
        plain = logprobs.gather(1, ids[0, 1:, None])[-len(last) :, 0]
        errors.append(float((plain.cpu() - torch.tensor(last)).abs().max()))  # NaN if one is
    if not all(error <= _TOLERANCE[model.dtype] for error in errors):  # NaN fails this too
        raise ConfigError(
            f"model.path: logprobs of the embedded engine and of a plain forward of {model.config.model_type} differ by "
            f"{errors} nats, so this architecture is not served correctly; use `inference.engine: vllm`"
        )
