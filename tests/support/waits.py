"""Finds the waits of a code base that have no deadline, by looking at its syntax.

A wait is a call that returns when somebody else has done something: a thread, a process, a server, a rank, a task. It has a
deadline when it is given a timeout that is not None, or when it is awaited inside `async with asyncio.timeout(...)` (a call
that blocks the thread is not ended by that). Where another bound exists, the line says which: `# waits: cancelled with the
run`. What the search cannot tell counts as a wait, so a missed one is unlikely and a needless comment possible:

- `await` of anything but a coroutine function of ours, which is inspected where it stands;
- a `while` loop around waits that do time out, unless it compares a clock or says who ends it;
- `with lock:` around a wait: others wait for the lock as long.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.support.code_index import Class, CodeIndex, Function, Module, optional_names
from tests.support.wait_rules import (
    AS_CALLABLE,
    ASGI,
    BY_METHOD,
    BY_NAME,
    COMPREHENSIONS,
    DONE_ALREADY,
    NO_WAIT,
    NUM_WORDS,
    REASON,
    STARTS_A_COROUTINE,
    TIMEOUT_NAMES,
    cannot_wait,
    is_none,
    returns_at_once,
    watches_a_clock,
)
from tests.support.wait_scope import Scope


@dataclass(frozen=True, slots=True)
class Finding:
    module: str
    line: int
    what: str


@dataclass(slots=True)
class _Loop:
    node: ast.While
    num_timed: int = 0
    has_reason: bool = False
    """Some wait inside says who ends it."""


@dataclass(slots=True)
class _Lock:
    """A `with lock:` that the walk is inside of."""

    text: str
    line: int


def find_waits(index: CodeIndex, module: Module) -> list[Finding]:
    """The waits of one module that have neither a deadline nor a reason."""
    walk = _Walk(index, module)
    for statement in module.tree.body:
        walk.visit(statement)
    return sorted(set(walk.findings), key=lambda finding: finding.line)


class _Walk(ast.NodeVisitor):
    def __init__(self, index: CodeIndex, module: Module) -> None:
        self.findings: list[Finding] = []
        self._index, self._module = index, module
        self._text = ast.unparse(module.tree)
        self._scope = Scope(index, module)
        self._owner: Class | None = None
        self._in_deadline = False
        self._loops: list[_Loop] = []
        self._locks: list[_Lock] = []

    # -- scopes

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._owner = self._owner, self._index.classes.get(f"{self._module.name}.{node.name}")
        self.generic_visit(node)
        self._owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node)

    def _function(self, node: Function | ast.Lambda) -> None:
        """A function runs when it is called: outside the deadline, the loop and the lock that it is written in."""
        before = (self._scope.names, self._scope.optional, self._in_deadline, self._loops, self._locks)
        owner = self._owner.name if self._owner is not None else None
        self._scope.names = self._index.scope(node, owner, self._scope.names, self._module)
        if not isinstance(node, ast.Lambda):
            self._scope.optional = self._scope.optional | optional_names(node)
        self._in_deadline, self._loops, self._locks = False, [], []
        for statement in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(statement)
        self._scope.names, self._scope.optional, self._in_deadline, self._loops, self._locks = before

    # -- what waits

    def visit_Await(self, node: ast.Await) -> None:
        self._awaited(node.value, node)

    def visit_Call(self, node: ast.Call) -> None:
        self._called(node, awaited=False)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._iterated(node.iter)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node)

    def _comprehension(self, node: COMPREHENSIONS) -> None:
        before, names = self._scope.names, dict(self._scope.names)
        for part in node.generators:
            names.update(self._index._elements(part.target, part.iter, names, self._module))
        self._scope.names = names
        for part in node.generators:
            if part.is_async:
                self._iterated(part.iter)
            else:
                self.visit(part.iter)
            for test in part.ifs:
                self.visit(test)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(value)
        self._scope.names = before

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Attribute) and node.iter.attr in ("stdout", "stderr", "stdin"):
            self._wait(node.iter, "lines of a pipe")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        loop = _Loop(node)
        self._loops.append(loop)
        self.generic_visit(node)
        self._loops.pop()
        polls = loop.num_timed > 0 and not loop.has_reason and not self._in_deadline
        header = range(node.lineno, (node.test.end_lineno or node.lineno) + 1)
        if polls and not watches_a_clock(node) and not any(self._has_reason(line) for line in header):
            self._find(node, "a loop around waits with a timeout: nothing bounds the loop itself")

    def visit_With(self, node: ast.With) -> None:
        locks = []
        for item in node.items:
            self.visit(item)
            lock = self._scope.lock_of(item.context_expr)
            if lock is not None and "Semaphore" in lock:
                self._wait(item.context_expr, "`with` a semaphore")
            elif lock is not None:
                locks.append(_Lock(ast.unparse(item.context_expr), node.lineno))
            elif isinstance(item.context_expr, ast.Call):
                name = self._scope.dotted(item.context_expr.func) or ""
                if name.endswith(("Executor", "subprocess.Popen")):
                    self._wait(item.context_expr, f"the end of `with {name}(...)`")
        self._locks += locks
        for statement in node.body:
            self.visit(statement)
        del self._locks[len(self._locks) - len(locks) :]

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        before = self._in_deadline
        for item in node.items:
            entered = item.context_expr
            name = self._scope.dotted(entered.func) if isinstance(entered, ast.Call) else None
            if isinstance(entered, ast.Call) and name in ("asyncio.timeout", "asyncio.timeout_at"):
                self.generic_visit(entered)
                if entered.args and not self._scope.may_be_none(entered.args[0]):
                    self._in_deadline = True
                else:
                    self._wait(entered, "a timeout that may be None", awaited=True)
            elif name in ("asyncio.TaskGroup", "contextlib.AsyncExitStack"):
                pass
            elif isinstance(entered, ast.Call) and (
                name == "httpx.AsyncClient"
                or self._scope.is_own(entered.func)
                or self._scope.is_own_class(entered.func)
            ):
                self.visit(entered)
            else:
                kind = self._scope.type_of(entered)
                if kind is None or self._index.method(kind.name, "__aenter__") is None:
                    self._wait(entered, "`async with` something that is not ours", awaited=True)
                self.visit(entered)
        for statement in node.body:
            self.visit(statement)
        self._in_deadline = before

    def _iterated(self, node: ast.expr) -> None:
        if not (isinstance(node, ast.Call) and self._scope.is_own(node.func)):
            self._wait(node, "`async for` over something that is not ours", awaited=True)
        self.visit(node)

    def _awaited(self, value: ast.expr, node: ast.expr) -> None:
        if isinstance(value, ast.Call):
            self._called(value, awaited=True)
        elif isinstance(value, ast.IfExp):
            self._awaited(value.body, node)
            self._awaited(value.orelse, node)
            self.visit(value.test)
        else:
            self._wait(node, "`await` of a future or a task", awaited=True)
            self.visit(value)

    def _called(self, call: ast.Call, *, awaited: bool) -> None:
        name = self._scope.dotted(call.func) or ""
        last = call.func.attr if isinstance(call.func, ast.Attribute) else name.rpartition(".")[2]
        covered = self._judge(call, name, last, awaited=awaited)
        if any(
            keyword.arg and TIMEOUT_NAMES.match(keyword.arg) and is_none(keyword.value) for keyword in call.keywords
        ):
            self._wait(call, "a timeout of None", awaited=awaited)
        self._callables(call, last)
        if not isinstance(call.func, ast.Name):
            self.visit(call.func)
        for given in [*call.args, *[keyword.value for keyword in call.keywords]]:
            if given not in covered:
                self.visit(given)

    def _judge(self, call: ast.Call, name: str, last: str, *, awaited: bool) -> list[ast.expr]:
        """Decide about one call; gives the arguments that need no look of their own."""
        if last == "sleep":
            self._sleep(call)
        elif name == "asyncio.gather" or (awaited and name == "asyncio.shield"):
            for given in call.args:
                self._gathered(given, awaited=awaited)
            return list(call.args)
        elif name == "asyncio.run" or last in STARTS_A_COROUTINE:
            if call.args and isinstance(call.args[0], ast.Call):
                before, self._in_deadline = self._in_deadline, False  # nobody awaits it here
                self._called(call.args[0], awaited=True)
                self._in_deadline = before
                return [call.args[0]]
        elif name == "asyncio.wait_for" and self._has_timeout(call, 1):
            self._wait(call, name, timed=True, awaited=awaited)
            inner = call.args[0]
            if isinstance(inner, ast.Call) and (self._scope.dotted(inner.func) or "").endswith("sleep"):
                self._sleep(inner)
            return [inner]
        elif name == "asyncio.to_thread" or last == "run_in_executor":
            self._in_a_thread(call, awaited=awaited)
        elif (
            last == "enter_async_context"
            and isinstance(call.args[0], ast.Call)
            and self._scope.is_own(call.args[0].func)
        ):
            pass
        elif name == "httpx.Timeout":
            if any(is_none(given) for given in [*call.args, *[keyword.value for keyword in call.keywords]]):
                self._wait(call, "an httpx timeout of None")
        elif self._waits(call, name, last, awaited=awaited):
            self._wait(call, f"`{name or last}`", timed=self._is_timed(call, name, last), awaited=awaited)
        return []

    def _waits(self, call: ast.Call, name: str, last: str, *, awaited: bool) -> bool:
        """Whether this call waits for somebody else and is not inspected where it is defined."""
        own = self._scope.own_function(call.func)
        if own is not None:
            return awaited and not isinstance(own, ast.AsyncFunctionDef)
        if name in NO_WAIT:
            return False
        if name in BY_NAME:
            return not returns_at_once(call, name)
        called = self._scope.type_of(call.func)
        if called is not None and called.name.rpartition(".")[2] in ASGI:
            return False
        if isinstance(call.func, ast.Attribute):
            owner = self._scope.type_of(call.func.value)
            if owner is not None and (owner.name, last) in DONE_ALREADY:
                return False
            if awaited:
                return owner is not None or not self._scope.is_ours_by_name(last)
            return last in (*BY_METHOD, "poll", "shutdown") and not cannot_wait(call, name, last)
        return awaited

    def _is_timed(self, call: ast.Call, name: str, last: str) -> bool:
        place = BY_NAME[name] if name in BY_NAME else BY_METHOD.get(last)
        return self._has_timeout(call, place)

    def _gathered(self, given: ast.expr, *, awaited: bool) -> None:
        """An argument of gather or shield: a call of ours, or many."""
        if isinstance(given, ast.Starred) and isinstance(given.value, ast.GeneratorExp | ast.ListComp):
            before, names = self._scope.names, dict(self._scope.names)
            for part in given.value.generators:
                names.update(self._index._elements(part.target, part.iter, names, self._module))
                self.visit(part.iter)
            self._scope.names = names
            self._gathered(given.value.elt, awaited=awaited)
            self._scope.names = before
        elif isinstance(given, ast.Call):
            self._called(given, awaited=True)
        else:
            self._wait(given, "tasks or futures that are gathered", awaited=awaited)

    def _in_a_thread(self, call: ast.Call, *, awaited: bool) -> None:
        """to_thread(function, ...): a function of ours is inspected itself."""
        place = 0 if isinstance(call.func, ast.Attribute) and call.func.attr == "to_thread" else 1
        function = call.args[place] if len(call.args) > place else None
        own = isinstance(function, ast.Lambda) or (
            isinstance(function, ast.expr) and (self._scope.is_own(function) or self._scope.is_own_class(function))
        )
        if not own:
            self._wait(call, "a foreign function in a thread", timed=self._has_timeout(call, None), awaited=awaited)

    def _sleep(self, call: ast.Call) -> None:
        if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0:
            return
        if "back-off" not in self._reason(call):
            self._find(call, "a sleep; await what you wait for, or say `# waits: back-off ...`")

    def _callables(self, call: ast.Call, last: str) -> None:
        """`Thread(target=event.wait)`, `iter(queue.get, None)`: a wait that somebody else will call."""
        for given in [*call.args, *[keyword.value for keyword in call.keywords]]:
            if not isinstance(given, ast.Attribute) or isinstance(given.value, ast.Constant):
                continue
            takes_a_function = last in ("iter", "to_thread", "run_in_executor", "partial", "submit", "Thread", "Timer")
            if given.attr in AS_CALLABLE or (takes_a_function and given.attr in BY_METHOD):
                owner = self._scope.type_of(given.value)
                if owner is None or not self._index.is_own_class(owner.name):
                    self._wait(given, f"`{given.attr}` as a function", timed=self._has_timeout(call, None))

    def _has_timeout(self, call: ast.Call, place: int | None) -> bool:
        given = [keyword.value for keyword in call.keywords if keyword.arg and TIMEOUT_NAMES.match(keyword.arg)]
        if (
            place is not None
            and len(call.args) > place
            and not any(isinstance(each, ast.Starred) for each in call.args)
        ):
            given.append(call.args[place])
        return bool(given) and not any(self._scope.may_be_none(each) for each in given)

    # -- verdicts

    def _wait(self, node: ast.expr, what: str, *, timed: bool = False, awaited: bool = False) -> None:
        for lock in self._locks:
            if not self._releases(node, lock.text) and not self._reason(node):
                self._find(node, f"{what} while holding `{lock.text}`")
        ends = timed or (awaited and self._in_deadline)
        for loop in self._loops:
            loop.num_timed += ends
            loop.has_reason |= bool(self._reason(node))
        if ends or self._reason(node):
            return
        self._find(node, f"{what} without a timeout")

    def _releases(self, node: ast.expr, lock: str) -> bool:
        """`condition.wait()` lets go of the condition, and of the lock that it was made of."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        if node.func.attr not in ("wait", "wait_for"):
            return False
        condition = ast.unparse(node.func.value)
        return condition == lock or f"{condition} = threading.Condition({lock})" in self._text

    def _find(self, node: ast.stmt | ast.expr, what: str) -> None:
        self.findings.append(Finding(self._module.name, node.lineno, what))

    def _reason(self, node: ast.AST) -> str:
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        return next((reason for line in range(first, last + 1) if (reason := self._has_reason(line))), "")

    def _has_reason(self, line: int) -> str:
        found = REASON.search(self._module.comments.get(line, ""))
        return found["reason"] if found is not None and len(found["reason"].split()) >= NUM_WORDS else ""
