"""The real vLLM server as an inference server of a run.

In the launcher and the exec that becomes vLLM:
    command.py     argv, environment, supported versions
In all of vLLM's processes:
    plugin.py      what vLLM loads into each of them
    patches.py     everything that is changed in vLLM, torch and uvicorn while they run
    compat.py      what we import from and call in vLLM; the methods of the workers
In the API server:
    middleware.py  token guard, /rollout routes and control routes, in front of vLLM's own app
    generation.py  /rollout/generate and /rollout/score, and the first requests of a server
    control.py     pause, resume, sleep; a weight update from joining the group to the policy version it leads to
    reports.py     how workers tell that their part of an update has ended
    state.py       the gate of a pause, requests inside the engine, policy version, salt and counters
    stream.py      tokens of one request, stamped on arrival, sent as chunks
    load.py        how busy the engine is
    answers.py     bodies, JSON and errors
"""
