"""Generation. `source` is what the trainer sees: a thread that generates and scores, and a queue to take from.

`conversation` runs one rollout, `worker` all of them, `thread` hosts the worker's event loop, `evaluation` asks the same server
for greedy answers, `metrics` sums up what was generated.
"""
