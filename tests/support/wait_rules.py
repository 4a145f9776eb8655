"""Which calls wait, which only share a name with one, and what counts as a deadline: the tables behind `tests.support.waits`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.code_index import own_nodes

REASON = re.compile(r"# waits: (?P<reason>.+)$")
NUM_WORDS = 3
TIMEOUT_NAMES = re.compile(r"^(timeout|timeout_s|\w+_timeout_s|deadline_s|within_s)$")
CLOCK_NAMES = re.compile(r"deadline|left|remaining|elapsed|waited|monotonic|timed_out|attempt|gives_up_at|until")

BY_METHOD: dict[str, int | None] = {
    "wait": 0,
    "wait_for": 1,
    "result": 0,
    "exception": 0,
    "join": 0,
    "acquire": 1,
    "communicate": 1,
    "get": 1,
    "put": 2,
    "select": 0,
    "accept": None,
    "recv": None,
    "recv_into": None,
    "recvfrom": None,
    "recvmsg": None,
    "recv_bytes": None,
    "send_bytes": None,
    "read": None,
    "readline": None,
    "readlines": None,
    "sendall": None,
    "connect": None,
    "connect_ex": None,
    "synchronize": None,
    "serve_forever": None,
    "run_forever": None,
    "monitored_barrier": None,
    "as_completed": 1,
}
"""Name of a method -> the place of its timeout among the arguments."""

BY_NAME: dict[str, int | None] = {
    "asyncio.wait": None,
    "asyncio.wait_for": 1,
    "asyncio.as_completed": None,
    "concurrent.futures.wait": 1,
    "concurrent.futures.as_completed": 1,
    "multiprocessing.connection.wait": 1,
    "subprocess.run": None,
    "subprocess.call": None,
    "subprocess.check_call": None,
    "subprocess.check_output": None,
    "subprocess.getoutput": None,
    "subprocess.getstatusoutput": None,
    "os.system": None,
    "os.popen": None,
    "os.wait": None,
    "os.wait3": None,
    "os.waitpid": None,
    "os.waitid": None,
    "os.read": None,
    "signal.pause": None,
    "signal.sigwait": None,
    "signal.sigwaitinfo": None,
    "select.select": 3,
    "socket.create_connection": 1,
    "psutil.wait_procs": 1,
    "urllib.request.urlopen": 2,
    "fcntl.flock": None,
    "fcntl.lockf": None,
    "input": None,
    "uvicorn.run": None,
    "torch.accelerator.synchronize": None,
    "torch.cuda.synchronize": None,
    "torch.distributed.init_process_group": None,
    "torch.distributed.new_group": None,
    "torch.distributed.new_subgroups": None,
    "torch.distributed.monitored_barrier": 1,
    "torch.distributed.TCPStore": 4,
    "torch.distributed.ProcessGroupGloo": None,
    "torch.distributed.ProcessGroupNCCL": None,
    "torch.distributed.device_mesh.init_device_mesh": None,
    **{f"httpx.{name}": None for name in ("Client", "AsyncClient", "get", "post", "put", "request", "stream")},
    **{f"requests.{name}": None for name in ("get", "post", "put", "request")},
}
"""Dotted name -> the place of its timeout among the arguments. A collective has the timeout of its group."""

NO_WAIT = {
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
    "asyncio.start_unix_server",
    "asyncio.start_server",
}
"""Awaited, but done by this process and the kernel alone."""

DONE_ALREADY = {
    ("asyncio.Task", "result"),
    ("asyncio.Task", "exception"),
    ("asyncio.Future", "result"),
    ("asyncio.Future", "exception"),
    ("contextvars.ContextVar", "get"),
    ("queue.SimpleQueue", "put"),
    ("file", "read"),
    ("file", "readline"),
    ("file", "readlines"),
    ("configparser.ConfigParser", "read"),
    ("httpx.AsyncClient", "aclose"),
}
"""Type and method that share a name with a wait and are none: they raise, or there is always something (room, a file's text)."""

ASGI = ("Send", "ASGIApp", "App")
"""What an HTTP server gives an application: ends with the client's connection. (Not `Receive`: say what is waited for.)"""

STARTS_A_COROUTINE = ("create_task", "ensure_future", "run_coroutine_threadsafe", "run_until_complete")
AS_CALLABLE = (
    "wait",
    "acquire",
    "join",
    "communicate",
    "accept",
    "recv",
    "recv_bytes",
    "serve_forever",
    "run_forever",
)
LOCKS = ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore")
LOCK_NAMES = re.compile(r"lock|condition|mutex|semaphore|slots")
EVERYBODYS_NAMES = {"stream", "request", "post", "send", "receive", "read", "close", "aclose", "start", "stop", "run"}
"""Methods that libraries have too: on an object of unknown type they are not taken for ours."""

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def cannot_wait(call: ast.Call, name: str, last: str) -> bool:
    """Calls that share a name with a wait and are none: "".join(parts), mapping.get(key), acquire(blocking=False)."""
    first = call.args[0] if call.args else None
    says_no = any(
        keyword.arg in ("block", "blocking", "wait") and getattr(keyword.value, "value", None) is False
        for keyword in call.keywords
    )
    is_flag = isinstance(first, ast.Constant) and isinstance(first.value, bool)
    if says_no or (last in ("get", "acquire") and is_flag and getattr(first, "value", None) is False):
        return True
    if last == "join":  # of text: one argument, which is no number
        is_text = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant)
        return is_text or name in ("os.path.join", "shlex.join", "posixpath.join")
    if last == "read" and isinstance(
        call.func, ast.Attribute
    ):  # what is not called after a stream has a `read` of its own
        return (
            re.search("std(in|out|err)|pipe|sock|connection|response|stream|input", ast.unparse(call.func.value))
            is None
        )
    if last == "get":
        return first is not None and not is_flag
    if last == "poll":  # Popen.poll and Connection.poll return at once unless told otherwise
        return first is None or not is_none(first)
    if last == "exception":  # logger.exception(text, ...)
        return first is not None and isinstance(first, ast.Constant | ast.JoinedStr) and not is_none(first)
    if last == "shutdown":
        return not isinstance(call.func, ast.Attribute) or not names_an_executor(call.func.value)
    return False


def returns_at_once(call: ast.Call, name: str) -> bool:
    """A system call that is told not to wait."""
    flags = {"os.waitpid": ("WNOHANG",), "fcntl.flock": ("LOCK_NB", "LOCK_UN"), "fcntl.lockf": ("LOCK_NB", "LOCK_UN")}
    return any(flag in ast.unparse(each) for flag in flags.get(name, ()) for each in call.args)


def names_an_executor(node: ast.expr) -> bool:
    return re.search(r"executor|pool|threads", ast.unparse(node).lower()) is not None


def watches_a_clock(loop: ast.While) -> bool:
    """Whether the loop compares with a clock: in its condition, or in an `if` that leaves it."""
    if mentions_a_clock(loop.test):
        return True
    for node in own_nodes(loop):
        if isinstance(node, ast.If) and mentions_a_clock(node.test):
            if any(isinstance(inside, ast.Raise | ast.Return | ast.Break) for inside in below(node)):
                return True
        elif (
            isinstance(node, ast.Raise)
            and node.exc is not None
            and re.search("Deadline|Timeout", ast.unparse(node.exc))
        ):
            return True
    return False


def below(node: ast.If) -> Iterator[ast.AST]:
    for statement in [*node.body, *node.orelse]:
        yield statement
        yield from own_nodes(statement)


def mentions_a_clock(node: ast.expr) -> bool:
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if CLOCK_NAMES.search(name):
            return True
    return False
