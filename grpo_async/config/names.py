"""Names that are not ours, from names.json: what other trainers and earlier versions call a setting (only what people type in a
first config), and which of vLLM's arguments are not the user's to set."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_NAMES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_EARLIER = "earlier versions"


@dataclass(frozen=True, slots=True)
class OtherName:
    """`name` of `trainer` is `here`; where that is None, `why` says what to do instead, as "is not needed: ..."."""

    name: str
    trainer: str
    here: str | None = None
    why: str = ""


OTHER_NAMES = (
    *(OtherName(name, who, here) for who, names in _NAMES["other_trainers"].items() for name, here in names.items()),
    *(OtherName(name, who, why=why) for who, names in _NAMES["without"].items() for name, why in names.items()),
)
REMOVED: dict[str, str] = _NAMES["without"][_EARLIER]
"""Path, or list and type of its entries -> what to do instead. Each is told for one version."""
VLLM_ARGUMENTS: dict[str, str] = _NAMES["vllm_arguments"]
"""vLLM's arguments that this package sets, and where to look instead. tests/vllm/test_command.py compares them with the command."""
