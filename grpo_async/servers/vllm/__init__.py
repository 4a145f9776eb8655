"""The real vLLM server as an inference server of a run.

In the launcher and the exec that becomes vLLM:
    command.py     argv and environment
    versions.py    which vLLM versions are supported
In all of vLLM's processes:
    plugin.py      what vLLM loads into each of them
    compat.py      every import and call that depends on vLLM's version
    rendezvous.py  where torch's rendezvous listens
In the API server:
    middleware.py  token guard, /rollout routes and control routes, in front of vLLM's own app
    generation.py  /rollout/generate and /rollout/score
    control.py     pause, resume, sleep and the end of a weight update, with the policy version it leads to
    updates.py     a weight update until every worker has staged it, and its application
    reports.py     how workers tell that they have
    state.py       policy version, salt and counters
    gate.py        holds requests while the server is paused
    in_flight.py   requests inside the engine; those without a token enter again under new weights
    stream.py      tokens of one request, stamped on arrival, cut into chunks
    drain.py       when every token of the old policy has arrived
    answers.py     bodies, JSON and errors
In the workers:
    receiver.py    the weight group and staging memory
"""
