"""What the code must not do, wherever it stands: run text as code, unpickle, open itself to a network, trust without checking.

Where one of these is right, ALLOWED says why; an entry that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.code_index import CodeIndex, Module, python_files

ROOT = Path(__file__).parents[1]
FILES = {
    file.relative_to(ROOT).as_posix(): file
    for file in python_files([ROOT / "grpo_async", ROOT / "scripts", ROOT / "benchmarks"])
    if "__pycache__" not in file.parts
}

_OWN_PIPE = "its own child process over a socket pair that only the two hold"
ALLOWED: dict[tuple[str, str], tuple[int, str]] = {
    ("grpo_async/rewards/pool.py", "pickle.loads"): (1, _OWN_PIPE),
    ("grpo_async/rewards/worker.py", "pickle.loads"): (2, _OWN_PIPE + "; and of what was pickled on the line itself"),
    ("grpo_async/rewards/audit_process.py", "pickle.loads"): (2, _OWN_PIPE),
    ("benchmarks/push_parts/broadcast.py", "Connection.recv"): (2, _OWN_PIPE),
    ("grpo_async/sandbox/inside/launcher.py", "marshal.loads"): (1, "its owner's plan, read before the code starts"),
    ("grpo_async/rewards/code_examiner.py", "exec"): (2, "runs in the sandbox: model-written code and the row's tests"),
    ("grpo_async/rewards/code_examiner.py", "compile"): (2, "as above"),
    ("grpo_async/rewards/code_examiner.py", "__import__"): (1, "modules that the tests name, in the sandbox"),
    ("grpo_async/rewards/code_peer.py", "__import__"): (2, "in the sandbox; what the code names is not imported"),
    ("grpo_async/rewards/code.py", "compile"): (1, "modules of ours, for both processes"),
    ("grpo_async/quickstart/tasks/code.py", "eval"): (1, "an expression that the task itself has put together"),
    ("grpo_async/training/ranks.py", "scatter_object_list"): (
        2,
        "between the ranks of one run, over connections made at start",
    ),
    ("grpo_async/launch/plan.py", "'0.0.0.0'"): (1, "what to connect to where the user has a server bind it"),
    ("grpo_async/launch/plan.py", "'::'"): (1, "as above"),
}
"""(file, what) -> how often, and why."""

_CALLS = {
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "runs text as code"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), "runs a shell"),
    "asyncio.create_subprocess_shell": "runs a shell",
    "tempfile.mktemp": "a name that somebody else can take first",
    "ssl._create_unverified_context": "trusts every certificate",
}
_UNPICKLES = {
    *(f"{library}.{name}" for library in ("pickle", "_pickle", "dill", "cloudpickle", "marshal") for name in ("load", "loads")),
    "pickle.Unpickler",
    "joblib.load",
    "shelve.open",
    "pandas.read_pickle",
    "multiprocessing.Manager",
    "multiprocessing.Queue",
    "multiprocessing.connection.Listener",
    "multiprocessing.connection.Client",
    "torch.package.PackageImporter",
}  # fmt: skip
_OBJECT_COLLECTIVES = (
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
_KEYWORDS = {
    ("shell", True): "runs a shell",
    ("trust_remote_code", True): "runs code that comes with a model, without being asked to",
    ("verify", False): "trusts every certificate",
    ("check_hostname", False): "trusts every certificate",
    ("weights_only", False): "unpickles",
    ("allow_pickle", True): "unpickles",
}
_EVERY_INTERFACE = ("0.0.0.0", "::", "[::]")
_BINDING = ("bind", "create_server", "start_server", "create_datagram_endpoint")


def dangers(index: CodeIndex, module: Module) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that needs a reason."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and node.value in _EVERY_INTERFACE and id(node) not in docstrings:
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and index.dotted(node, module) in ("ssl.CERT_NONE", "socket.INADDR_ANY"):
            yield node.lineno, index.dotted(node, module) or ""
        elif isinstance(node, ast.Assign):
            for target in node.targets:  # context.check_hostname = False
                if isinstance(target, ast.Attribute) and (target.attr, _value(node.value)) in _KEYWORDS:
                    yield node.lineno, f"{target.attr} = {_value(node.value)}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _defaults(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            if (node.target.id, _value(node.value)) in _KEYWORDS:  # a setting's default
                yield node.lineno, f"{node.target.id} = {_value(node.value)}"
        elif isinstance(node, ast.Call):
            yield from _of_a_call(index, module, node)


def _of_a_call(index: CodeIndex, module: Module, call: ast.Call) -> Iterator[tuple[int, str]]:
    name = index.dotted(call.func, module) or ""
    last = call.func.attr if isinstance(call.func, ast.Attribute) else name.rpartition(".")[2]
    if name in _CALLS or name in _UNPICKLES:
        yield call.lineno, name
    if last in _OBJECT_COLLECTIVES:
        yield call.lineno, last
    if name == "torch.load" and not any(k.arg == "weights_only" and _value(k.value) is True for k in call.keywords):
        yield call.lineno, name
    if name.startswith("yaml.") and last in ("load", "load_all", "unsafe_load", "full_load", "unsafe_load_all"):
        loader = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "Loader"]
        if not (loader and "Safe" in loader[0]):
            yield call.lineno, name
    for keyword in call.keywords:
        if (keyword.arg, _value(keyword.value)) in _KEYWORDS:
            yield call.lineno, f"{keyword.arg}={_value(keyword.value)}"
    if last in _BINDING and call.args and isinstance(call.args[0], ast.Tuple) and _value(call.args[0].elts[0]) == "":
        yield call.lineno, f"{last} on every interface"
    if last == "recv" and not call.args and isinstance(call.func, ast.Attribute):
        yield call.lineno, "Connection.recv"  # multiprocessing's unpickles; a socket's takes a size


def _defaults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    arguments = function.args
    given = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    positional = [*arguments.posonlyargs, *arguments.args]
    given += zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
    for argument, default in given:
        if default is not None and (argument.arg, _value(default)) in _KEYWORDS:
            yield default.lineno, f"{argument.arg} = {_value(default)}"


def _value(node: ast.expr) -> object:
    """A constant; a field's default: `Field(default=True)`."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Call):
        return next((_value(keyword.value) for keyword in node.keywords if keyword.arg == "default"), None)
    return None


def test_the_code_does_nothing_of_the_kind_without_a_reason() -> None:
    index = CodeIndex({name: file.read_text(encoding="utf-8") for name, file in FILES.items()})
    assert len(FILES) > 250
    found: Counter[tuple[str, str]] = Counter()
    lines: dict[tuple[str, str], list[int]] = {}
    for name, module in index.modules.items():
        for line, what in dangers(index, module):
            found[name, what] += 1
            lines.setdefault((name, what), []).append(line)
    unexpected = [f"{name}:{lines[name, what]}: {what}" for name, what in found if (name, what) not in ALLOWED]
    assert not unexpected, "\n".join(unexpected)
    assert dict(found) == {key: count for key, (count, _) in ALLOWED.items()}, "ALLOWED says how often"


def _found(source: str) -> list[str]:
    index = CodeIndex({"m": source})
    return [what for _, what in dangers(index, index.modules["m"])]


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "import pickle\npickle.loads(data)",
        "from pickle import loads as read\nread(data)",
        "import pickle as p\np.Unpickler(file)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object\nall_gather_object(a, b)",
        "from multiprocessing.connection import Client\nClient(address)",
        "connection.recv()",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.FullLoader)",
        "import yaml\nyaml.unsafe_load(text)",
        "import httpx\nhttpx.Client(verify=False)",
        "context.check_hostname = False",
        "import ssl\ncontext.verify_mode = ssl.CERT_NONE",
        "listener.bind(('', 0))",
        "HOST = '0.0.0.0'",
        "start(host='::')",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "def load(path, *, trust_remote_code: bool = True): ...",
        "class Section:\n    trust_remote_code: bool = Field(default=True)",
        "import tempfile\ntempfile.mktemp()",
    ],
)
def test_each_kind_is_found(source: str) -> None:
    assert _found(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile('x')",
        "import pickle\npickle.dumps(data)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import yaml\nyaml.load(text, Loader=yaml.CSafeLoader)",
        "import yaml\nyaml.safe_load(text)",
        "connection.recv(1024)",
        "connection.recv_bytes()",
        "listener.bind((address, 0))",
        "def f():\n    '0.0.0.0'",
        "load(path, trust_remote_code=section.trust_remote_code)",
        "import httpx\nhttpx.Client(verify=context)",
    ],
)
def test_what_is_harmless_is_not_found(source: str) -> None:
    assert _found(source) == []


def test_shell_scripts_fetch_over_https_with_certificates_checked() -> None:
    scripts = [
        file
        for file in (ROOT / "scripts").iterdir()
        if file.is_file() and file.relative_to(ROOT).as_posix() not in FILES
    ]
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        for word in ("--insecure", "--no-check-certificate", "--trusted-host", "http://", "| sh", "| bash", "eval "):
            assert word not in text, f"{script.name}: {word}"
