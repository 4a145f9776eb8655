"""The trainer. `loop` is rank 0's main loop and that of the ranks that follow; `ranks` carries the commands between them.

`policy` is the sharded model, `logprobs` its head in chunks, `losses` the objective, `step` one optimizer step, `parameters`
gathers for the push, `checkpoint` saves, restores and exports, `meter` measures who waited for whom.
"""
