"""`python -m grpo_async` is `grpo-async`."""

from __future__ import annotations

from grpo_async.cli import main

if __name__ == "__main__":
    main()
