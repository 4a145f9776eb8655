"""What `benchmarks.against_trl` runs: the setting both sides share (setting.py), TRL's own environment (environment.py), the
run on TRL's side (train.py with push.py and attention.py, which replace what TRL has for GPUs only), our run (ours.py), the CPU
meter (meter.py).

train.py, push.py, attention.py and reward.py run in TRL's environment, where grpo_async is importable but not installed.
"""
