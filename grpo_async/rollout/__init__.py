"""Generation. `source` is what the trainer sees: a thread that generates and scores, and a queue to take from.

    worker -> OpenGroup (group.py) -> a producer: conversation        ours: turns, tools, environments
                                                  agent_producer      the user's agent, over the endpoint
                                                  function_producer   the user's function, with a `function_trainer`

`worker` makes all groups, `thread` hosts its event loop, on which evaluations run, too (package `evaluation`), `metrics` sums up
what was generated, `utils.seeds.seed_of` gives every request its own seed.
"""
