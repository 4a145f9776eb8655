"""`inspect-rollouts` on a terminal: screens of textual over store.table.RolloutTable.

app -> browse (groups, rollouts, steps) -> group (side by side) -> rollout (turn by turn, every token)

Everything that a model, a tool or the data wrote goes through utils.safe_text and never through markup.
"""
