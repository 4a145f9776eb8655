"""What the speed of grpo-async is measured with: `python -m benchmarks` lists them, `python -m benchmarks NAME --help` tells one.

Every benchmark is a module with `main(arguments) -> exit code`. It prints a table and, with `--json FILE`, writes the same with the
machine, versions, seed and every single value. Ratios are taken side by side in one run, in turns (report.py). What was
found with them, profile by profile, is in NOTES.md.
"""
