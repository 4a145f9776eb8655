"""Samples that share prefixes at random."""

from __future__ import annotations

import random


def random_tree(chance: random.Random, num_samples: int) -> list[list[int]]:
    """Token ids of samples of 2 to about 30 tokens. Each goes on from some token of another one, or is the same or a part of it;
    three different ids make chance prefixes, too."""
    known = [[chance.randint(3, 5) for _ in range(chance.randint(1, 9))]]
    samples = []
    for _ in range(num_samples):
        base = chance.choice(known)[-25:]
        ids = base[: chance.randint(0, len(base))] + [chance.randint(3, 5) for _ in range(chance.randint(0, 5))]
        ids += [3] * (2 - len(ids))
        known.append(ids)
        samples.append(ids)
    return samples
