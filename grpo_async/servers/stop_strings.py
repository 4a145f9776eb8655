"""Finds stop strings in what an engine samples, token by token; the same code for both engines.

vLLM has its own search, which starts over with each request: a request that continues on another server, or after a resume,
would miss a string that begins before the cut. This one is given what was sampled before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.sampling import find_stop

_NO_LETTER = "\ufffd"
"""What a decoder writes for the bytes of half a letter."""


class StopStrings:
    """Of one server; the tokenizer is loaded when the first request has stop strings.

    Args:
        model: folder, or name on a hub.
        options: of transformers' AutoTokenizer, such as `revision`.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options
        self._loading = asyncio.Lock()
        self._tokenizer: Any = None
        self._special_ids: frozenset[int] = frozenset()
        self._texts: dict[int, str] = {}

    async def load(self) -> None:
        """Before the first `watch`.

        Raises:
            HTTPException: 400, there is no tokenizer.
        """
        async with self._loading:
            if self._tokenizer is not None:
                return
            try:
                tokenizer = await asyncio.to_thread(self._load)
            except Exception as error:  # whatever transformers makes of a folder without a tokenizer
                raise HTTPException(400, f"stop: the model's tokenizer cannot be loaded: {error}") from error
            added = tokenizer.added_tokens_decoder
            self._special_ids = frozenset(token for token, entry in added.items() if entry.special)
            self._tokenizer = tokenizer

    def _load(self) -> Any:
        from transformers import AutoTokenizer  # slow import

        return AutoTokenizer.from_pretrained(self._model, **self._options)

    def watch(self, request: GenerateRequest) -> StopWatcher | None:
        """What reads the tokens of this request; None where it has no stop strings."""
        if not request.stop:
            return None
        return StopWatcher(self, request.stop, request.token_ids[len(request.token_ids) - request.num_sampled :])

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def text_of(self, token: int) -> str:
        """Of one token alone; some decoders leave out a blank at its beginning."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text


class StopWatcher:
    """Reads the tokens of one request.

    It keeps the last tokens, as many as a stop string can have (each has a byte of it at least), and decodes them where the new
    one may end a string: where its own text has the last letter of one, a part of a letter, or a blank, which decoders may leave
    out.

    Args:
        text: decodes.
        stop: the strings.
        sampled: tokens of the same generation that are there already.
    """

    def __init__(self, text: StopStrings, stop: Sequence[str], sampled: Sequence[int] = ()) -> None:
        self._text = text
        self._stop = stop
        last_letters = {each[-1] for each in stop}
        self._is_always_read = " " in last_letters
        self._last_letters = (*last_letters, _NO_LETTER)
        # one more: the first token of a text may lose its blank
        self._num_kept = 1 + max(len(each.encode("utf-8", "surrogatepass")) for each in stop)
        self._tail = [token for token in sampled if not text.is_special(token)]

    def first(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Read further tokens; how many of them there are up to the one that completes a stop string, and the string. None: there
        is none yet.

        stop ["\\nQ:"]: tokens "4", "\\n", "Q" -> None; then ": 3", "+" -> (1, "\\nQ:").
        """
        for number, token in enumerate(tokens, start=1):
            if self._text.is_special(token):
                continue  # it is not text
            self._tail.append(token)
            if not self._may_end(self._text.text_of(token)):
                continue
            self._trim()
            tail = self._text.decode(self._tail)
            if (found := find_stop(tail, self._stop)) is not None:
                return number, tail[slice(*found)]
        return None

    def _trim(self) -> None:
        """Never between parts of letters: a decoder makes nothing of a row of them whose first is missing."""
        begin = max(0, len(self._tail) - self._num_kept)
        while begin and _NO_LETTER in self._text.text_of(self._tail[begin]):
            begin -= 1
        del self._tail[:begin]

    def _may_end(self, text: str) -> bool:
        return self._is_always_read or not text or any(letter in text for letter in self._last_letters)
