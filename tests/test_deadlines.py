"""Every wait has a deadline, or says who ends it; and where one is missed, the message names a setting that exists."""

from __future__ import annotations

import ast
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from grpo_async.config.experiment import ExperimentConfig
from tests.support.code_index import CodeIndex, python_files
from tests.support.waits import find_waits

ROOT = Path(__file__).parents[1]


def _module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    _module_name(file): file for file in python_files([ROOT / "grpo_async", ROOT / "scripts", ROOT / "benchmarks"])
}


@pytest.fixture(scope="module")
def index() -> CodeIndex:
    return CodeIndex({name: file.read_text(encoding="utf-8") for name, file in FILES.items()})


def test_every_wait_has_a_deadline_or_says_who_ends_it(index: CodeIndex) -> None:
    found = [
        f"{FILES[finding.module].relative_to(ROOT)}:{finding.line}: {finding.what}"
        for module in index.modules.values()
        for finding in find_waits(index, module)
    ]
    assert not found, "give it a timeout, or end its line with `# waits: <who ends it>`:\n" + "\n".join(found)


def test_the_inspection_sees_the_whole_code(index: CodeIndex) -> None:
    assert len(index.modules) > 250
    assert {"grpo_async.launch.lead", "grpo_async.servers.vllm.compat", "benchmarks.conversation"} <= set(FILES)
    num_waits = sum("# waits: " in file.read_text(encoding="utf-8") for file in FILES.values())
    assert num_waits > 20  # files; an inspection that finds nothing would not have asked for them


_SHELL_WAIT = re.compile(r"(?<![\w.$-])(curl|wget|sleep|wait|nc|flock|read)\s+(?!-t )")
_SHELL_DEADLINE = re.compile(r"--max-time|--timeout|# waits: (\S+\s+){2}\S+")


def test_shell_scripts_wait_with_a_deadline_too() -> None:
    scripts = [file for file in (ROOT / "scripts").iterdir() if file.is_file() and file not in FILES.values()]
    assert len(scripts) >= 4
    found = [
        f"{script.name}:{number}: {line.strip()}"
        for script in scripts
        for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), 1)
        if _SHELL_WAIT.search(line.split(" #")[0].strip("# ") if not line.lstrip().startswith("#") else "")
        and not _SHELL_DEADLINE.search(line)
    ]
    assert not found, "\n".join(found)


# -- what the inspection finds


_SNIPPET = """
import asyncio, contextvars, subprocess, threading, time, httpx, fcntl, os, select, signal, socket, queue
import torch.distributed as dist
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from starlette.types import Receive, Send

class Own:
    def __init__(self, other: "Own", engine: "vllm.Engine", limit_s: float | None) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._condition = threading.Condition()
        self._changed = threading.Condition(self._lock)
        self._slots = asyncio.Semaphore(3)
        self._other = other
        self._engine = engine
        self._limit_s = limit_s
        self._inbox: SimpleQueue[int] = SimpleQueue()
    async def abort(self) -> None: ...
    async def put(self, item) -> None: ...
    async def stream(self): yield 1
    def wait(self) -> None: ...

async def own(): ...
context: contextvars.ContextVar[int] = contextvars.ContextVar("context")
"""


def _found(body: str, *, signature: str = "self") -> list[str]:
    """What is found in a method `f` of `Own` with this body."""
    is_async = re.search(r"\bawait\b|async (with|for)", body) is not None
    method = f"\nclass Here(Own):\n    {'async ' if is_async else ''}def f({signature}):\n"
    source = _SNIPPET + method + textwrap.indent(textwrap.dedent(body).strip(), "        ") + "\n"
    index = CodeIndex({"grpo_async.snippet": source})
    return [finding.what for finding in find_waits(index, index.modules["grpo_async.snippet"])]


WAITS = [
    # threads and their results
    "self._event.wait()",
    "self._event.wait(None)",
    "self._event.wait(timeout=None)",
    "unknown.wait()",
    "thread.join()",
    "thread.join(timeout=None)",
    "future.result()",
    "future.exception()",
    "asyncio.run_coroutine_threadsafe(own(), loop).result()",
    "inbox.get()",
    "inbox.get(True)",
    "inbox.get(block=True)",
    "inbox.put(1)",
    "lock.acquire()",
    "lock.acquire(True)",
    "lock.acquire(timeout=-1)",
    "self._condition.wait_for(lambda: True)",
    "barrier.wait()",
    "pool.shutdown()",
    "with ThreadPoolExecutor(1) as pool:\n    pass",
    "with threading.Semaphore(2):\n    pass",
    "with self._lock:\n    self._event.wait(5)",
    "with self._condition:\n    self._event.wait(5)",
    "with some_lock:\n    future.result(5)",
    "threading.Thread(target=self._event.wait)",
    "for item in iter(inbox.get, None):\n    pass",
    # processes, signals, files, sockets
    "process.communicate()",
    "process.communicate(b'', None)",
    "process.wait()",
    "subprocess.run(['ls'])",
    "subprocess.check_output(['ls'], timeout=None)",
    "subprocess.call(['ls'])",
    "with subprocess.Popen(['ls']) as process:\n    pass",
    "for line in process.stdout:\n    pass",
    "process.stdout.readline()",
    "process.stdout.read()",
    "os.waitpid(pid, 0)",
    "os.system('ls')",
    "os.read(pipe, 1)",
    "signal.sigwait({1})",
    "fcntl.flock(file, fcntl.LOCK_EX)",
    "select.select([a], [], [])",
    "selector.select()",
    "selector.select(None)",
    "connection.poll(None)",
    "listener.accept()",
    "connection.recv(10)",
    "connection.recv_bytes()",
    "connection.connect(address)",
    "socket.create_connection(address)",
    "server.serve_forever()",
    # HTTP and process groups
    "httpx.Client()",
    "httpx.AsyncClient(timeout=None)",
    "httpx.get('http://x')",
    "httpx.Timeout(None)",
    "httpx.Timeout(5.0, pool=None)",
    "dist.init_process_group('gloo')",
    "dist.new_group([0])",
    "dist.TCPStore('x', 1)",
    "dist.all_reduce(x, async_op=True).wait()",
    # the event loop
    "await future",
    "await self.tasks[0]",
    "await event.wait()",
    "await inbox.get()",
    "await writer.drain()",
    "await asyncio.wait(tasks)",
    "await asyncio.wait(tasks, timeout=None)",
    "await asyncio.wait_for(future, None)",
    "await asyncio.gather(first, second)",
    "await asyncio.gather(*tasks)",
    "await asyncio.gather(own(), client.post('/x'))",
    "await asyncio.gather(*(task for task in tasks))",
    "await asyncio.shield(task)",
    "await asyncio.to_thread(process.wait)",
    "await asyncio.to_thread(library.work)",
    "await loop.run_in_executor(None, library.work)",
    "await asyncio.wrap_future(future)",
    "await callback()",
    "await client.post('/x')",
    "await self._engine.abort()",  # of a class that is not ours, though we have a coroutine function of that name
    "await (first if x else own())",
    "async with self._slots:\n    pass",
    "async with client.stream('GET', '/x') as response:\n    pass",
    "async for line in response.aiter_lines():\n    pass",
    "x = [line async for line in response.aiter_lines()]\nawait own()",
    "async with asyncio.timeout(None):\n    await future",
    "async with self._slots, asyncio.timeout(1):\n    pass",  # the slots come before the deadline
    "async with asyncio.timeout(self._limit_s):\n    await own()",  # it may be None
    "asyncio.create_task(event.wait())",
    "asyncio.run(client.get('/x'))",
    "await asyncio.wait_for(asyncio.sleep(1), 2)",
    "async with asyncio.timeout(1):\n    thread.join()",  # a blocked thread sees no time-out of the loop
    "async with asyncio.timeout(1):\n    def later():\n        future.result()",
    "async with asyncio.timeout(1):\n    pass\nawait future",
    # polling
    "time.sleep(1)",
    "await asyncio.sleep(1)",
    "await asyncio.sleep(1)  # waits: just for some time",
    "while not done():\n    self._event.wait(1)",
    "while True:\n    if process.poll() is not None:\n        break\n    self._event.wait(0.1)",
    "while not done():\n    async with asyncio.timeout(1):\n        await event.wait()",
    # reasons that are none
    "thread.join()  # waits: forever",
    "thread.join()  # ends soon, surely",
]


@pytest.mark.parametrize("body", WAITS)
def test_a_wait_without_a_deadline_is_found(body: str) -> None:
    assert _found(body) != []


NO_WAITS = [
    "self._event.wait(5)",
    "self._event.wait(timeout=self._other.limit_s)",
    "thread.join(timeout=2)",
    "thread.join(2)",
    "', '.join(names)",
    "separator.join(names)",
    "os.path.join('a', 'b')",
    "future.result(timeout=0.0)",
    "inbox.get(timeout=1)",
    "inbox.get(True, 5)",
    "inbox.get(False)",
    "inbox.get(block=False)",
    "mapping.get('key')",
    "mapping.get('key', None)",
    "context.get()",
    "self._inbox.put(1)",  # without a limit there is always room
    "lock.acquire(timeout=5)",
    "lock.acquire(blocking=False)",
    "self._condition.wait_for(lambda: True, 5)",
    "with self._lock:\n    x = 1",
    "with self._condition:\n    self._condition.wait(timeout=1)",
    "with self._lock:\n    self._changed.wait(timeout=1)",
    "pool.shutdown(wait=False)",
    "process.communicate(timeout=5)",
    "process.poll()",
    "subprocess.run(['ls'], timeout=5)",
    "os.waitpid(pid, os.WNOHANG)",
    "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "select.select([a], [], [], 5)",
    "selector.select(5)",
    "logger.exception('it failed')",
    "with path.open() as file:\n    file.readline()",
    "httpx.Client(timeout=5)",
    "httpx.Timeout(5.0, connect=3.0)",
    "dist.init_process_group('gloo', timeout=limit)",
    "dist.barrier()",  # has the time-out of its group
    "await own()",
    "await self.abort()",
    "await self._other.put(1)",
    "await asyncio.wait(tasks, timeout=5)",
    "await asyncio.wait_for(event.wait(), 5)",
    "await asyncio.gather(own(), own())",
    "await asyncio.gather(*(other.abort() for other in others))",
    "await asyncio.shield(own())",
    "await asyncio.to_thread(self.wait)",
    "await asyncio.sleep(0)",
    "task = asyncio.create_task(own())\nawait own()\ntask.result()",
    "done, _ = await asyncio.wait({asyncio.create_task(own())}, timeout=5)\nx = [each.result() for each in done]",
    "async with asyncio.timeout(5):\n    await future",
    "async with asyncio.timeout_at(5), self._slots:\n    pass",
    "async with asyncio.TaskGroup() as tasks:\n    tasks.create_task(own())",
    "async with asyncio.timeout(5):\n    while not done():\n        await event.wait()",
    "async for item in self._other.stream():\n    pass",
    "while time.monotonic() < deadline:\n    self._event.wait(1)",
    "while True:\n    if time.monotonic() > end:\n        raise TimeoutError\n    self._event.wait(0.1)",
    # reasons
    "thread.join()  # waits: stop() ends it",
    "await asyncio.sleep(delay)  # waits: back-off between tries",
    "await self._engine.abort()  # waits: the engine only notes it",
    "while not done():  # waits: ends with the process\n    self._event.wait(1)",
    "subprocess.run(\n    ['ls'],  # waits: Ctrl-C ends it\n)",
]


@pytest.mark.parametrize("body", NO_WAITS)
def test_what_has_a_deadline_or_a_reason_is_not_found(body: str) -> None:
    assert _found(body) == []


def test_types_of_parameters_tell_waits_from_what_is_none() -> None:
    assert _found("await send({})", signature="self, send: Send") == []
    assert _found("await receive()", signature="self, receive: Receive") != []
    assert _found("await other.put(1)", signature="self, other: Own") == []
    assert _found("await other.put(1)", signature="self, other: asyncio.Queue[int]") != []
    assert _found("task.result()", signature="self, task: asyncio.Task[int]") == []
    assert _found("task.result()", signature="self, task: Future[int]") != []
    assert _found("self._event.wait(timeout_s)", signature="self, timeout_s: float") == []
    assert _found("self._event.wait(timeout_s)", signature="self, timeout_s: float | None = None") != []


# -- what a missed deadline says


class NotASetting(Exception):
    pass


def _below(annotation: Any, name: str) -> list[Any]:
    """The types that the key `name` may have in a value of this type; "*" stands for any key or index."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(name)
        return [] if field is None else [field.annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return [below for argument in arguments for below in _below(argument, name)]
    if origin is dict:
        return [arguments[1]]
    if origin is list:
        return [arguments[0]] if name == "*" or name.isdigit() else []
    return []


def _exists(path: str) -> bool:
    """Whether `training.queue_timeout_s`, `environments.*.timeout_s` is a setting."""
    found: list[Any] = [ExperimentConfig]
    for name in path.split("."):
        found = [below for annotation in found for below in _below(annotation, name)]
    return bool(found)


def test_settings_are_looked_up_in_sections_lists_and_maps() -> None:
    for path in ("training.queue_timeout_s", "tools.0.timeout_s", "environments.*.timeout_s", "data.train.seed"):
        assert _exists(path), path
    for path in ("training.nothing", "queue_timeout_s", "tools.timeout_s", "training.queue_timeout_s.more"):
        assert not _exists(path), path


def _spellings(node: ast.expr, tree: ast.Module) -> list[str]:
    """The texts that an argument may be, a placeholder as "*"; [] where another argument or attribute carries it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values]
        return ["".join(parts)]
    if isinstance(node, ast.IfExp):
        return [*_spellings(node.body, tree), *_spellings(node.orelse, tree)]
    if isinstance(node, ast.Name) and node.id.isupper():
        values = [
            each.value
            for each in tree.body
            if isinstance(each, ast.Assign) and any(getattr(target, "id", "") == node.id for target in each.targets)
        ]
        return [text for value in values for text in _spellings(value, tree)]
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if "setting" not in name and "path" not in name:
        raise NotASetting(ast.unparse(node))
    return []


def _named_settings(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """Every `setting=` that a call is given, and every missing one of a DeadlineError."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg in ("setting", "deadline_setting")]
            yield from ((node.lineno, value) for value in given)
            if ast.unparse(node.func).endswith("DeadlineError") and not given:
                raise NotASetting(f"line {node.lineno}: a DeadlineError without `setting`")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defaults = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from (
                (node.lineno, default)
                for argument, default in defaults
                if argument.arg == "setting" and not (default is None or ast.unparse(default) == "None")
            )


def test_every_deadline_names_a_setting_that_exists(index: CodeIndex) -> None:
    wrong, names = [], set()
    for name, module in index.modules.items():
        for line, value in _named_settings(module.tree):
            for path in _spellings(value, module.tree):
                names.add(path)
                # A placeholder at the start is itself a path: `{self.kind.setting}.timeout_s`.
                if not path.startswith("*") and not _exists(path):
                    wrong.append(f"{FILES[name].relative_to(ROOT)}:{line}: there is no setting `{path}`")
    assert not wrong, "\n".join(wrong)
    assert {"training.queue_timeout_s", "rollout_function.timeout_s"} <= names


@pytest.mark.parametrize(
    "source", ["raise DeadlineError('x', waited_s=1.0)", "raise DeadlineError('x', waited_s=1.0, setting=whatever)"]
)
def test_a_deadline_without_a_setting_is_found(source: str) -> None:
    tree = ast.parse(source)
    with pytest.raises(NotASetting):
        _ = [_spellings(value, tree) for _, value in _named_settings(tree)]
