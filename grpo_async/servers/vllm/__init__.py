"""vLLM as an inference server of a run.

In the launcher, and in the process that becomes vLLM by exec:
    command.py       argv, environment, supported versions
In all of vLLM's processes:
    plugin.py        the entry point that vLLM loads into each of them
    patches.py       runtime patches of vLLM, torch and uvicorn
    compat.py        our imports from and calls into vLLM; the methods of the workers
In the API server:
    middleware.py    the token guard and the HTTP application (servers/app.py), in front of vLLM's own app
    engine.py        vLLM's engine client behind that application
"""
