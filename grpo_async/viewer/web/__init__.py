"""The inspector as a web page: `serve.serve` answers on loopback, `guard` asks for the token, the page is in viewer/static/web.

    browser  <--JSON-->  api  --threads-->  views  ->  sources: each run's store.RolloutTable and its metrics
    report.html: the page with the answers of views inside, which `report` writes

Nothing here imports torch, and nothing is written to a run.
"""

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8642
