"""What the sections of the configuration have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16"]


class StrictModel(BaseModel):
    """Frozen, refuses unknown keys, and takes the docstring under a field as its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # built once, inside the whole configuration, and not once more for every section
    )
