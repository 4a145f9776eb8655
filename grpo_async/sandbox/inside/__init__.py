"""The code of the child process: it builds the wall around itself, and then becomes the code.

    launcher   fresh interpreter, own session, dies with the thread that started it      `launcher`
      `- code  limits, no privileges, Landlock, system call filter, exec                 `landlock`, `seccomp`

It uses only the standard library and `utils.kernel`, with as few imports as possible: they add to the startup time of every run.
The package above is not imported (see `execution.BOOT`), so nothing here may import it.
"""

SECCOMP, LANDLOCK = "seccomp", "landlock"
"""The mechanisms that a plan may name."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""The devices that the code may use."""
