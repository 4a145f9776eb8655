"""An endless or finite stream of prompts, which a resume continues, and which gives any earlier prompt again.

Position p of epoch e has the prompt_id `e * len(rows) + p`, so the id alone says which row it is: the order of an epoch is a
pure function of (seed, epoch). Worked example, 3 rows, shuffled: epoch 0 = rows 2, 0, 1 has ids 0, 1, 2; epoch 1 = rows
0, 2, 1 has ids 3, 4, 5; prompt 4 is row 2.

Of several sources, each is such a stream, and the next prompt is of the one that is furthest behind its share: at no time is a
source a whole prompt ahead. Weights 3 and 1: sources 0 0 1 0, and so on; prompt 3 is the third of source 0.

With `data.sampling` the row of a prompt is chosen when the prompt is issued (`pools`), and the checkpoint has it.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.config.sections import SamplingSection
from grpo_async.data.pools import Pool
from grpo_async.data.rows import Rows
from grpo_async.errors import ConfigError
from grpo_async.records import Origin, Prompt, TaggedMessage
from grpo_async.utils.seeds import seed_of


def make_prompt(row: Mapping[str, Any], prompt_id: int, system_prompt: str | None) -> Prompt:
    """One row as a Prompt.

    A text prompt becomes one user message and stays "not conversational": reward functions get plain text back, with a system
    prompt too. A list of messages is conversational. Every column but `prompt` goes to `columns`.
    """
    prompt = row["prompt"]
    is_text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return Prompt(
        prompt_id=prompt_id,
        messages=tuple(TaggedMessage.from_dict(message, Origin.PROMPT) for message in messages),
        columns={name: value for name, value in row.items() if name != "prompt"},
        is_conversational=not is_text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The checked rows of one source, at least one, as `load_rows` returns them, and what all of its prompts have in common.
    `label`: None if there is one source only."""

    rows: Rows
    system_prompt: str | None = None
    label: str | None = None
    weight: float = 1.0
    rewards: Sequence[str] | None = None
    temperature: float | None = None
    group_size: int | None = None

    def prompt(self, number: int, prompt_id: int) -> Prompt:
        """Row `number` as the prompt `prompt_id`."""
        prompt = make_prompt(self.rows[number], prompt_id, self.system_prompt)
        return replace(
            prompt,
            source=self.label,
            rewards=self.rewards,
            temperature=self.temperature,
            group_size=self.group_size,
        )


class PromptStream:
    """Prompts in epoch after epoch, or as `sampling` chooses rows by what their groups scored (`observe`). With `state`, what
    `state()` returned, it continues there; ConfigError if the rows are others. (launch.prepare refuses another seed or shuffling.)
    """

    def __init__(
        self,
        sources: Sequence[SourceRows],
        *,
        seed: int,
        shuffle: bool,
        num_prompts: int | None = None,
        sampling: SamplingSection | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._sources = sources
        self._num_rows = sum(len(source.rows) for source in sources)
        self._seed = seed
        self._shuffle = shuffle
        self._num_prompts = num_prompts
        self._fingerprint = _fingerprint(sources)
        self._next_prompt_id = 0
        self._orders: dict[tuple[int, int], Sequence[int]] = {}  # (source, epoch) -> row numbers
        # of several sources, by prompt id: the source, and how many earlier prompts are of it
        self._source_of, self._rank_of = array("H"), array("Q")
        self._drawn = [0] * len(sources)  # of each source, in these
        self._pools: list[Pool] = []  # of each source, unless the order is known from the start
        self._chosen = array("q")  # with pools, by prompt id: the row; -1: no longer known
        if sampling is not None and not sampling.is_fixed:
            self._pools = [Pool(len(source.rows), sampling, seed=seed, shuffle=shuffle) for source in sources]
        if state is not None:
            self._restore(state)

    @property
    def is_at_end(self) -> bool:
        """Whether there is no next prompt."""
        return self._num_prompts is not None and self._next_prompt_id >= self._num_prompts

    def epoch(self, num_open: int) -> float:
        """How often the data has been used by now, when `num_open` of the prompts that were given are not closed yet. 12 prompts
        given of 5 rows, 2 open: 2.0."""
        return (self._next_prompt_id - num_open) / self._num_rows

    def next(self) -> Prompt:
        """The next prompt of the stream; not at its end."""
        if self._pools:
            number, _ = self._place(self._next_prompt_id)
            self._chosen.append(self._pools[number].draw(self._next_prompt_id))
        prompt = self.prompt(self._next_prompt_id)
        self._next_prompt_id += 1
        return prompt

    def prompt(self, prompt_id: int) -> Prompt:
        """Any prompt of the stream, past or future, without moving it; how unfinished prompts are issued again. With `sampling`,
        one that was issued and, if before a resume, was given to `state`.

        Raises:
            ValueError: there is no such prompt.
        """
        if prompt_id < 0:
            raise ValueError(f"prompt_id must not be negative, got {prompt_id}")
        number, rank = self._place(prompt_id)
        source = self._sources[number]
        if self._pools:
            if prompt_id >= len(self._chosen) or self._chosen[prompt_id] < 0:
                raise ValueError(f"the row of prompt {prompt_id} is not known")
            return source.prompt(self._chosen[prompt_id], prompt_id)
        epoch, position = divmod(rank, len(source.rows))
        return source.prompt(self._order(number, epoch)[position], prompt_id)

    def _place(self, prompt_id: int) -> tuple[int, int]:
        """The source of a prompt, and how many earlier prompts are of that source."""
        if len(self._sources) == 1:
            return 0, prompt_id
        weights = [source.weight for source in self._sources]
        while len(self._source_of) <= prompt_id:
            share = (len(self._source_of) + 1) / sum(weights)
            behind = [weight * share - drawn for weight, drawn in zip(weights, self._drawn, strict=True)]
            number = max(range(len(weights)), key=behind.__getitem__)
            self._source_of.append(number)
            self._rank_of.append(self._drawn[number])
            self._drawn[number] += 1
        return self._source_of[prompt_id], self._rank_of[prompt_id]

    def observe(self, prompt_id: int, rewards: Sequence[float | None]) -> None:
        """The group of a prompt was scored."""
        scored = [reward for reward in rewards if reward is not None]
        if self._pools and scored:
            self._pools[self._place(prompt_id)[0]].observe(self._chosen[prompt_id], scored)

    def metrics(self) -> dict[str, float]:
        """With `sampling`: fractions of the rows. Thread-safe."""
        total = sum((Counter(pool.counts()) for pool in self._pools), Counter[str]())
        return {f"data/{name}": total[name] / self._num_rows for name in ("seen", "solved", "retired") if self._pools}

    def state(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """What a checkpoint needs, ready for JSON. `unfinished`: the prompts that a resume will ask for again."""
        pools = {
            "pools": [pool.state() for pool in self._pools],
            "chosen": {str(prompt_id): self._chosen[prompt_id] for prompt_id in unfinished if self._pools},
        }
        return {
            **(pools if self._pools else {}),
            "next_prompt_id": self._next_prompt_id,
            "num_rows": self._num_rows,
            "fingerprint": self._fingerprint,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        here = self.state()
        if (state["num_rows"], state["fingerprint"]) != (here["num_rows"], here["fingerprint"]):
            raise ConfigError(
                f"data.train: the data changed since the checkpoint ({state['num_rows']} rows, fingerprint "
                f"{state['fingerprint']} then; {here['num_rows']} rows, fingerprint {here['fingerprint']} now), so the run cannot "
                "continue where it stopped; restore the file and the `data` section (filters and `held_out` too), or start a new "
                "run. A generator that goes through a set makes other rows in another process: sort there"
            )
        self._next_prompt_id = state["next_prompt_id"]
        if self._pools:
            self._chosen = array("q", [-1]) * self._next_prompt_id
            for prompt_id, row in state["chosen"].items():
                self._chosen[int(prompt_id)] = row
            for pool, saved in zip(self._pools, state["pools"], strict=True):
                pool.restore(saved)

    def _order(self, source: int, epoch: int) -> Sequence[int]:
        num_rows = len(self._sources[source].rows)
        if not self._shuffle:
            return range(num_rows)
        if (source, epoch) not in self._orders:
            kept = [place for place in self._orders if place[0] == source]
            if len(kept) >= 2:  # this epoch and the one before: prompts in flight straddle the boundary
                del self._orders[min(kept)]
            # each source has an order of its own: two with the same questions must not give them side by side
            seed = self._seed if len(self._sources) == 1 else seed_of(self._seed, source)
            self._orders[source, epoch] = shuffled_order(num_rows, seed=seed, epoch=epoch)
        return self._orders[source, epoch]


def shuffled_order(num_rows: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of range(num_rows), the same on every machine and Python version.

    Sorted by random() rather than shuffled: only the sequence of random() is promised to stay the same between versions. The digest
    stays as it is, too, instead of `seed_of`: another one would continue a checkpoint in another order.
    """
    digest = hashlib.sha256(f"epoch order, seed {seed}, epoch {epoch}".encode()).digest()
    rng = random.Random(int.from_bytes(digest[:8], "big"))
    keys = [rng.random() for _ in range(num_rows)]
    return sorted(range(num_rows), key=keys.__getitem__)


def _fingerprint(sources: Sequence[SourceRows]) -> str:
    """16 hex digits over the content of all rows, in order, and the system prompts."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(json.dumps(source.system_prompt).encode())
        for row in source.rows:
            # default=repr: dates, decimals and bytes, the values other than JSON's that `rows.check_values` lets through
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()[:16]
