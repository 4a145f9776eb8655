"""The metrics of a step, as displays get them."""

METRICS = {
    "reward": 0.53, "reward_std": 0.25, "step_time": 2.0, "perf/generated_tokens_per_s": 1234.4,
    "perf/trained_tokens_per_s": 987.0, "pipeline/trainer_idle_ratio": 0.125, "pipeline/generator_idle_ratio": 0.3,
    "pipeline/training_fraction": 0.725, "pipeline/pushing_fraction": 0.1, "pipeline/checkpoint_fraction": 0.05,
    "async/staleness_mean": 0.75, "async/staleness_max": 1.0, "sync/push_s": 0.04, "sync/bytes": 1e6, "ledger/groups/queued": 3.0,
    "loss": -0.01234, "entropy": 0.31, "kl": 0.002, "completions/mean_length": 42.4, "completions/clipped_ratio": 0.03,
    "ledger/groups/trained": 12.0, "ledger/groups/in_flight": 16.0, "ledger/tokens/trained": 1200.0,
}  # fmt: skip
