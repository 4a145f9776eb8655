"""Generation. The trainer sees `source`: a thread that generates and scores, and a queue from which it takes groups.

    worker -> OpenGroup (group.py) -> a producer: conversation        ours: turns, tools, environments
                                                  agent_producer      the user's agent, over the endpoint
                                                  function_producer   the user's function, with a `function_trainer`

`worker` makes all groups; evaluations (package `evaluation`) run on the same event loop. `metrics` summarizes what was generated,
and `utils.seeds.seed_of` gives every request its own seed.
"""
