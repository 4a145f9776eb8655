"""Seeds made of names and numbers."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^31), the same on every machine, that has nothing to do with that of any other parts.

    Counting up instead would give turn 1 of a rollout the seed of turn 0 of its neighbor, and both the same draws.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
