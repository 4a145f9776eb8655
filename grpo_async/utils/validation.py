"""Formats pydantic errors. Those of configurations have their own reports (config.loader)."""

from __future__ import annotations

from pydantic import ValidationError


def problems_of(error: ValidationError) -> str:
    """On one line: "top_p: Input should be less than or equal to 1; token_ids.0: Field required"."""
    found = error.errors(include_url=False, include_input=False)
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, "))))
        for each in found
    )
