"""Structured outputs of the embedded engine, by xgrammar, as in vLLM. The package is needed for nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_xgrammar_installed() -> bool:
    return find_spec("xgrammar") is not None


class Grammars:
    """Compiles constraints for one tokenizer, and remembers them."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info)

    def matcher(self, structured_outputs: Mapping[Any, Any], stop_ids: Iterable[int]) -> Any:
        """A matcher of one request; ValueError or RuntimeError if the constraint is wrong."""
        [(kind, given)] = structured_outputs.items()
        match kind:
            case "json":
                compiled = self._compiler.compile_json_schema(given)
            case "regex":
                compiled = self._compiler.compile_regex(given)
            case "choice":
                elements = [{"type": "const_string", "value": each} for each in given]
                tag = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
                compiled = self._compiler.compile_structural_tag(tag)
            case "structural_tag":
                compiled = self._compiler.compile_structural_tag(given)
            case _:
                compiled = self._compiler.compile_grammar(given)
        return self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids) or None)


def mask_logits(logits: torch.Tensor, matchers: Sequence[Any]) -> torch.Tensor:
    """`logits` in float32, -inf where the matcher of a row, if it has one, allows no token. [n, vocab]"""
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return logits
    import xgrammar

    logits = logits.float()
    bitmask = xgrammar.allocate_token_bitmask(len(matchers), logits.shape[1])
    for row in rows:
        matchers[row].fill_next_token_bitmask(bitmask, row)
    xgrammar.apply_token_bitmask_inplace(logits, bitmask.to(logits.device), indices=rows)
    return logits
