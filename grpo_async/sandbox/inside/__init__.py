"""What runs in the child process: it restricts itself step by step, and then runs the code.

    launcher   fresh interpreter, own session, dies with the thread that started it      `launcher`
      |- namespaces at hand: user, mount, pid, network, ipc, ... of its own              `namespaces`
      |    init      pid 1 of the sandbox: private root, watches the memory, dies last
      |      code    limits, no privileges, system call filter, exec                     `seccomp`
      `- else
           code      limits, Landlock, system call filter, exec                          `landlock`

The standard library and `utils.kernel`, and as few imports as can be: this is the startup time of every run. The package above
is not imported (see `execution.BOOT`), so nothing here may import it.
"""

NAMESPACES, SECCOMP, LANDLOCK, USER = "namespaces", "seccomp", "landlock", "user"
"""The mechanisms that a plan may name. USER: the code runs as a user that no account has, where the owner is root."""
