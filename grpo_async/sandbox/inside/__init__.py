"""The code of the child process: it builds the wall around itself, and then becomes the code. As few imports as
possible, and none of the package above: they add to the startup time of every run."""

SECCOMP, LANDLOCK = "seccomp", "landlock"
"""The mechanisms that a plan may name."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""The devices that the code may use."""
