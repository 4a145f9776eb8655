"""The inspector as a web page: `serve.serve` answers on loopback, `guard` asks for the token, the page is in viewer/static/web.

    browser  <--JSON-->  api  --threads-->  sources: each run's store.RolloutTable and its metrics

Nothing here imports torch, and nothing is written to a run.
"""

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8642
