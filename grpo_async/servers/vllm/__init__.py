"""The real vLLM server as an inference server of a run.

In the launcher and the exec that becomes vLLM:
    command.py       argv, environment, supported versions
In all of vLLM's processes:
    plugin.py        what vLLM loads into each of them
    patches.py       everything that is changed in vLLM and torch while they run
    compat.py        what we import from and call in vLLM; the methods of the workers
In the API server:
    middleware.py    the token guard and the HTTP application (servers/app.py), in front of vLLM's own app
    engine.py        vLLM's engine client behind that application
"""
