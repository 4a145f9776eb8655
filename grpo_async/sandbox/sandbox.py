"""The sandbox's interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from grpo_async.errors import ConfigError
from grpo_async.sandbox.execution import Job, SandboxLimits, SandboxResult, execute, find_interpreter
from grpo_async.sandbox.wall import CONSEQUENCES, MECHANISMS, missing


class Sandbox:
    """Runs untrusted Python code. Holds no process or file between runs; thread-safe.

    Args:
        limits: limits of each run.
        require: the parts of the wall without which it refuses; what is left out may be missing on this machine.
        with_site_packages: whether the code can import the packages of this environment (numpy, ...).

    Raises:
        ConfigError: a required part is missing on this machine, or there is none of this name.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        require: Iterable[str] = MECHANISMS,
        with_site_packages: bool = False,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._interpreter = find_interpreter(with_site_packages=with_site_packages)
        _check(require)

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        pass_descriptors: Sequence[int] = (),
    ) -> SandboxResult:
        """Run code as the main program of a fresh interpreter. Cancelling it kills the code first.

        Example: await Sandbox().run("print(int(input()) + 1)", stdin="41") -> status OK, stdout "42\\n".

        Args:
            code: Python source.
            stdin: its whole standard input.
            files: content by path relative to the working directory, which is otherwise empty.
            pass_descriptors: further file descriptors that it inherits, under the same numbers.

        Raises:
            SandboxError: the sandbox failed; anything that the code does is a result.
        """
        contents = {
            _checked_path(name): content.encode("utf-8", "replace") if isinstance(content, str) else content
            for name, content in (files or {}).items()
        }
        job = Job(
            code=code,
            stdin=stdin,
            files=contents,
            limits=self.limits,
            interpreter=self._interpreter,
            mechanisms=frozenset(MECHANISMS) - missing().keys(),
            pass_descriptors=pass_descriptors,
        )
        return await execute(job)


def _check(require: Iterable[str]) -> None:
    wanted = list(require)
    if unknown := [name for name in wanted if name not in MECHANISMS]:
        raise ConfigError(f"sandbox: `require` names {unknown}, which do not exist; there are {list(MECHANISMS)}")
    lacking = {name: why for name, why in missing().items() if name in wanted}
    if lacking:
        lines = [f"  {name}: {why}. Without it {CONSEQUENCES[name]}" for name, why in lacking.items()]
        raise ConfigError(
            "the sandbox for model-written code needs Landlock and seccomp (Linux 5.13 or later on x86-64 or ARM64, in most "
            "containers too), and this machine lacks\n" + "\n".join(lines) + "\n"
            f"Run it on a machine that has them, or at your own risk with `require: {[n for n in wanted if n not in lacking]}`."
        )


def _checked_path(name: str) -> str:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"the file name {name!r} is not a path below the working directory; write it as `dir/file.txt`"
        )
    return name


def startup_notes(require: Iterable[str] = MECHANISMS) -> list[str]:
    """Lines for the start of a run: which part of the wall is missing on this machine, and the consequences.

    Raises:
        ConfigError: a required part is missing on this machine, or there is none of this name.
    """
    _check(require)
    return [f"the sandbox has no {name} here ({why}): {CONSEQUENCES[name]}" for name, why in missing().items()]
