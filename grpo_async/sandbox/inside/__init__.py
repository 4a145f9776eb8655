"""The code of the child process: it restricts itself step by step, and then runs the code.

    launcher   fresh interpreter, own session, dies with the thread that started it      `launcher`
      |- namespaces available: user, mount, pid, network, ipc, ... of its own            `namespaces`
      |    init      pid 1 of the sandbox: private root, watches the memory, dies last
      |      code    limits, no privileges, system call filter, exec                     `seccomp`
      `- otherwise
           code      limits, Landlock, system call filter, exec                          `landlock`

It uses only the standard library and `utils.kernel`, with as few imports as possible: they add to the startup time of every run.
The package above is not imported (see `execution.BOOT`), so nothing here may import it.
"""

NAMESPACES, SECCOMP, LANDLOCK, USER = "namespaces", "seccomp", "landlock", "user"
"""The mechanisms that a plan may name. USER: the code runs under a user id without an account, if the owner is root."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""The devices that the code may use."""
