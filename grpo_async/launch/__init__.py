"""The launcher: one command, one terminal, every process of a run. `train.launch` is its entry."""
