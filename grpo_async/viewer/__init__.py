"""Looks at the rollouts of a run: which groups, one group, one rollout with its tokens. Reads the store only."""
