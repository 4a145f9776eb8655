"""The trainer: `policy` is the sharded model, `losses` the objective, `step` one optimizer step, `ranks` keeps the ranks in
lockstep, `parameters` gathers for the push, `checkpoint` saves and restores, `loop` is rank 0's main loop."""
