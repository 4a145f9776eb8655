"""Generation: `conversation` runs one rollout, `worker` all of them, `thread` hosts the worker's event loop, `evaluation`
asks the same server for greedy answers, `metrics` sums up what was generated."""
