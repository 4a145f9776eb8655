"""Which interpreter runs the code, and which paths outside the sandbox it may read."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from dataclasses import dataclass

_SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
FLAGS = ("-s", "-S", "-P", "-B", "-X", "utf8")
"""No user site, no site-packages, no script directory on the path, no bytecode files, UTF-8 everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Python as the code gets it. `read_paths` holds directories and files, parents before what they contain."""

    executable: str
    read_paths: tuple[str, ...]
    module_paths: tuple[str, ...]  # on the path after the working directory
    library_path: str = ""  # where its shared library is, if it has one: the environment that said so is not passed on


@functools.cache
def find_interpreter(*, with_site_packages: bool = False) -> Interpreter:
    """The interpreter below this process's virtual environment.

    Args:
        with_site_packages: whether the packages of this process can be imported. Those that are installed as a link to
            their sources (`pip install -e`) cannot.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    packages: list[str] = []
    if with_site_packages:
        packages = [os.path.realpath(path) for path in site.getsitepackages() if os.path.isdir(path)]
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"))
    library_path = _library_path()
    needed = {executable, *map(os.path.realpath, prefixes), *packages}
    if library_path:
        needed.add(library_path)
    paths = [path for path in _SYSTEM_PATHS if os.path.lexists(path)]
    for path in sorted(needed):
        if path != "/" and not any(path == shown or path.startswith(f"{shown}/") for shown in paths):
            paths.append(path)
    return Interpreter(
        executable=executable,
        read_paths=tuple(paths),
        module_paths=tuple(packages),
        library_path=library_path,
    )


def _library_path() -> str:
    directory = sysconfig.get_config_var("LIBDIR") or ""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    is_shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED")) and sys.platform == "linux"
    return os.path.realpath(directory) if is_shared and os.path.exists(os.path.join(directory, name)) else ""


def launcher_environment_of(interpreter: Interpreter) -> dict[str, str]:
    """All of the launcher's environment: what the interpreter needs to start."""
    return {"LD_LIBRARY_PATH": interpreter.library_path} if interpreter.library_path else {}


def environment_of(interpreter: Interpreter) -> dict[str, str]:
    """All of the code's environment; `{base}` stands for the sandbox's directory.

    The hash seed is fixed: the same code gives the same result, the order of sets included.
    """
    return {
        **launcher_environment_of(interpreter),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "{base}/work",
        "TMPDIR": "{base}/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(["{base}/work", *interpreter.module_paths]),
        "PYTHONHASHSEED": "0",
        # Libraries that start a thread for every CPU would meet the limit of processes.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
