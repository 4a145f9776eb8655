"""The inspector as a web page: `serve.serve` answers on loopback, `guard` lets nobody else in, the page is in viewer/static/web.

    browser  <--JSON-->  api  --threads-->  sources: for each run one store.RolloutTable, its metrics and its timeline (`files`)

Nothing here imports torch, and nothing is written to a run.
"""
