"""The trainer's process: rank 0 wires rollouts, training, weights and evaluation together; every rank has a context."""
