"""Makes the virtual environment of a checkout for scripts/bootstrap.sh, with the standard library only.

plan.py       what to install on which computer: a pure function
machine.py    what this computer is (system, GPU, local wheels, reachable index), and what the user told pip
__main__.py   does it, and notes in .venv what it did

Not `uv sync` with a lock: a lock names indexes, and torch's CPU build comes from a local wheel on one machine, from PyTorch's index
on the next, from a mirror on the third. requirements/constraints.txt pins versions only, so any of them will do.
"""
