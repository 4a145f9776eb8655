"""What a run gives back, for code that means no harm."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path

import pytest

from grpo_async.sandbox import Sandbox, SandboxLimits, SandboxStatus
from grpo_async.sandbox.execution import find_interpreter
from tests.sandbox.support import descendants, run
from tests.support.waiting import eventually


def test_an_uncaught_exception_is_an_error_with_its_traceback() -> None:
    result = run("print(1)\n1 / 0")
    assert (result.status, result.stdout, result.exit_code) == (SandboxStatus.ERROR, "1\n", 1)
    assert "line 2" in result.stderr
    assert result.last_error_line == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("import sys; sys.exit(3)", SandboxStatus.ERROR, 3),
        ("import os; os._exit(0)", SandboxStatus.OK, 0),
        ("import os; os.abort()", SandboxStatus.KILLED, -6),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", SandboxStatus.KILLED, -15),
        ("raise MemoryError", SandboxStatus.MEMORY, 1),
        ("def", SandboxStatus.ERROR, 1),
    ],
)
def test_the_status_says_how_it_ended(code: str, status: SandboxStatus, exit_code: int) -> None:
    result = run(code)
    assert (result.status, result.exit_code) == (status, exit_code)


def test_the_working_directory_is_empty_and_writable_and_another_in_each_run() -> None:
    code = "import os, tempfile; print(os.listdir()); open('a', 'w').close(); tempfile.mkstemp(); print(os.listdir())"
    code += "; print(set('abcdefgh'), hash('a'))"  # sets have the same order in every run
    first, second = (run(code).stdout for _ in range(2))
    assert first == second
    assert first.startswith("[]\n['a']\n")


def test_files_are_there_and_can_be_imported() -> None:
    files: dict[str, str | bytes] = {"helper.py": "value = 7", "data/raw.bin": b"\xff\0"}
    code = "import helper; print(helper.value, open('data/raw.bin', 'rb').read(), __name__)"
    assert run(code, files=files).stdout == "7 b'\\xff\\x00' __main__\n"


@pytest.mark.parametrize("name", ["../main.py", "/etc/passwd", "a/../../b", "", "a//b", "./a", "a\0b"])
def test_a_file_outside_the_working_directory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a path below the working directory"):
        asyncio.run(Sandbox().run("pass", files={name: "x"}))


def test_nothing_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ASYNC_TOKEN", "secret-token")
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    code = """
import os, glob
print(sorted(os.environ))
for path in glob.glob('/proc/*/environ'):
    try:
        print('secret' in open(path).read())
    except OSError:
        pass
"""
    result = run(code)
    names, *others = result.stdout.splitlines()
    assert "GRPO_ASYNC_TOKEN" not in names
    assert "WANDB_API_KEY" not in names
    assert "True" not in others


def test_no_descriptor_of_this_process_is_inherited(tmp_path: Path) -> None:
    with open(tmp_path / "open", "w", encoding="utf-8") as file:
        os.set_inheritable(file.fileno(), True)
        result = run("""
import os
found = []
for number in range(256):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(found)
""")
    assert result.stdout == "[0, 1, 2]\n"


def test_site_packages_are_there_only_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "installed.py").write_text("value = 7", encoding="utf-8")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    find_interpreter.cache_clear()
    try:
        without, with_them = Sandbox(), Sandbox(with_site_packages=True)
    finally:
        find_interpreter.cache_clear()
    code = "import installed; print(installed.value)"
    assert asyncio.run(without.run(code)).last_error_line == "ModuleNotFoundError: No module named 'installed'"
    assert asyncio.run(with_them.run(code)).stdout == "7\n"


def test_an_owner_that_ignores_the_death_of_children_still_gets_results() -> None:
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert asyncio.run(Sandbox().run("1 / 0")).exit_code == 1
    finally:
        signal.signal(signal.SIGCHLD, handler)


def test_a_stdin_that_nobody_reads_holds_nothing_up() -> None:
    assert run("print(1)", stdin="x" * 1_000_000).stdout == "1\n"
    assert run("import sys; print(len(sys.stdin.read()))", stdin="x" * 1_000_000).stdout == "1000000\n"
    assert run("import os, time; os.close(0); print(1)", stdin="x" * 1_000_000).stdout == "1\n"


def test_cancelling_kills_the_tree_and_leaves_no_thread_but_of_the_loops_pool() -> None:
    before, processes = {thread.ident for thread in threading.enumerate()}, descendants()

    async def use() -> None:
        sandbox = Sandbox(SandboxLimits(wall_s=60))
        run = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
        while not descendants(processes):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # into the code, mostly; right at any moment before
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert descendants(processes) == []

    asyncio.run(use())
    assert eventually(lambda: {thread.ident for thread in threading.enumerate()} <= before)


def test_no_descriptor_and_no_directory_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()  # what older tests left open
    before = os.listdir("/dev/fd")
    for code in ("open('a', 'w').write('x')", "1 / 0", "print('x' * 1_000_000)"):
        run(code)
    assert len(os.listdir("/dev/fd")) == len(before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        ("print('started', flush=True)", "started\n"),
        ("for n in range(3): os.close(n)", ""),  # that its streams end does not end the watch
        (
            "for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
            "",
        ),
    ],
    ids=["prints", "closes its streams", "ignores every signal"],
)
def test_a_run_that_takes_too_long_is_killed_and_keeps_what_it_printed(before: str, printed: str) -> None:
    wall_s = 3.0 if printed else 1.0  # it has to print before, also on a busy machine
    result = run(f"import os, signal, time\n{before}\ntime.sleep(60)", wall_s=wall_s)
    assert (result.status, result.stdout, result.exit_code) == (SandboxStatus.TIMEOUT, printed, None)
