"""The trainer's process: rank 0's wiring of rollouts, training, weights and evaluation; what every rank has; stalls and failures."""
