"""The key/value memory of the running sequences: one slot = one row of a preallocated, right-padded buffer.

Implements transformers' Cache interface, so the model's own attention reads and writes it. `prefill` writes whole rows and attends
within the forward only; `decode` writes one position of each of the first N rows and attends to a view of them, without copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from grpo_async.errors import ConfigError
from grpo_async.servers.embedded.families import check_embedded_family


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of all layers: [num_layers, 2, num_slots, max_len, num_kv_heads, head_dim]."""

    def __init__(self, model: Any, *, num_slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        config = model.config.get_text_config()
        check_embedded_family(config.to_dict(), max_len)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and max_len > longest:
            raise ConfigError(
                f"inference.max_model_len: {max_len} is more than the model's max_position_embeddings: {longest}"
            )
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, num_slots, max_len, num_kv_heads, head_dim)
        self._buffer = _zeros(shape, model.dtype, model.device)
        self._keys = [layer[0] for layer in self._buffer]
        self._values = [layer[1] for layer in self._buffer]
        # The same memory with slot and position merged: one index per written entry (index_copy_ is the fastest write).
        self._flat_keys = [keys.flatten(0, 1) for keys in self._keys]
        self._flat_values = [values.flatten(0, 1) for values in self._values]
        self._slots: torch.Tensor | None = None  # set in prefill mode
        self._entries: torch.Tensor | None = None
        self._num_rows = 0
        self._view_len = 0
        self._used_rows = self._used_len = 0  # rows and positions ever written

    def prefill(self, slots: Sequence[int], length: int) -> None:
        """The next forward fills positions [0, length) of the rows `slots`."""
        self._slots = torch.tensor(slots, device=self._buffer.device)
        self._mark_used(max(slots) + 1, length)

    def decode(self, entries: torch.Tensor, view_len: int) -> None:
        """The next forward writes one token per row, to the `entries` slot * max_len + position [N], and attends to [0,
        view_len)."""
        self._slots, self._entries = None, entries
        self._num_rows, self._view_len = len(entries), view_len
        self._mark_used(self._num_rows, view_len)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention. [num_rows, num_kv_heads, num_new, head_dim] -> the keys and values to attend to."""
        if self._slots is not None:
            num_new = key_states.shape[2]
            self._keys[layer_idx][self._slots, :num_new] = key_states.transpose(1, 2)
            self._values[layer_idx][self._slots, :num_new] = value_states.transpose(1, 2)
            return key_states, value_states
        self._flat_keys[layer_idx].index_copy_(0, self._entries, key_states.squeeze(2))
        self._flat_values[layer_idx].index_copy_(0, self._entries, value_states.squeeze(2))
        keys = self._keys[layer_idx][: self._num_rows, : self._view_len].transpose(1, 2)
        values = self._values[layer_idx][: self._num_rows, : self._view_len].transpose(1, 2)
        return keys, values

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source row onto its target row."""
        self._mark_used(max(targets) + 1, length)
        self._buffer[:, :, targets, :length] = self._buffer[:, :, sources, :length]

    def clear(self, keep: Sequence[int] = ()) -> None:
        """Zero all used entries: a masked entry still enters attention as 0 x value, so a NaN in it would spread forever.
        `keep`: for each of the first rows, how many positions stay."""
        for row, length in enumerate(keep):
            self._buffer[:, :, row, length : self._used_len] = 0
        self._buffer[:, :, len(keep) : self._used_rows, : self._used_len] = 0
        self._used_rows, self._used_len = len(keep), max(keep, default=0)

    def _mark_used(self, num_rows: int, length: int) -> None:
        self._used_rows, self._used_len = max(self._used_rows, num_rows), max(self._used_len, length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always passed in

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0  # called in prefill only: decode has its own mask


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy's comes from calloc, which hands out pages when they are first written.
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
