"""Benchmarks of grpo-async. `python -m benchmarks` lists them, `python -m benchmarks NAME --help` describes one.

Every benchmark is a module with `main(arguments) -> exit code`. It prints a table and, with `--json FILE`, writes it with machine,
versions, seed and every value. The two sides of a ratio take turns in one run (report.py). NOTES.md has what was found with them.
"""
