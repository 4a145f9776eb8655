"""The inspector as a web page: `serve.serve` answers on loopback, `guard` lets nobody else in, the page is in viewer/static/web.

    browser  <--JSON-->  api (rollouts, groups, tokens) | run_files (metrics, timeline, status)
                            |  threads                        |
                         sources: one store.RolloutTable per run

Nothing here imports torch, and nothing is written to a run.
"""
