"""What pydantic found, in words."""

from __future__ import annotations

from typing import Self

import pytest
from pydantic import BaseModel, ConfigDict, model_validator

from grpo_async.config.base import read_arguments


class _Range(BaseModel):
    model_config = ConfigDict(extra="forbid")
    low: int
    high: int

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is more than high")
        return self


def test_arguments_that_are_wrong_are_told_by_name_and_a_rule_about_several_without() -> None:
    with pytest.raises(ValueError, match=r"^low: Input should be a valid integer.*; high: Field required$"):
        read_arguments(_Range, {"low": "x"})
    with pytest.raises(ValueError, match=r"^hihg: there is no such setting; the settings are \['high', 'low'\]$"):
        read_arguments(_Range, {"low": 1, "high": 2, "hihg": 2})
    with pytest.raises(ValueError, match=r"^low is more than high$"):
        read_arguments(_Range, {"low": 2, "high": 1})
