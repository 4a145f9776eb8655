"""Commands that make a token leave it in the environment of their process: here it is taken back after every test."""

from __future__ import annotations

import pytest

from grpo_async.inference.token import TOKEN_VARIABLE


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "")  # so that its old state comes back, whatever the test sets
    monkeypatch.delenv(TOKEN_VARIABLE)
