"""Makes the virtual environment of a checkout for scripts/bootstrap.sh, with the standard library only.

machine.py       what this computer is (system, GPU, local wheels, reachable index)
pip_settings.py  what the user told pip about indexes, in uv's words
plan.py          what to install on such a computer: a pure function
stamp.py         what is installed already
__main__.py      does it
"""
