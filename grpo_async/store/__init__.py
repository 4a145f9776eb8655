"""What was generated, on disk: one row per rollout, written during the run and readable at any moment."""

from grpo_async.store.rollout_store import RolloutStore
from grpo_async.store.rows import GroupRow, RolloutRow, TurnRow

__all__ = ["GroupRow", "RolloutRow", "RolloutStore", "TurnRow"]
