"""The inside of a worker process: imports the reward function by its name once, then answers calls until its owner hangs up.

Requests and answers are bytes, pickled here and in `pool`, so that what cannot be pickled is an error of one call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import sys
from multiprocessing.connection import Connection

from grpo_async.rewards.call import Failure, RewardCallable, RewardOutcome, RewardRequest, call_of, failure_of
from grpo_async.rewards.process import READY
from grpo_async.user_code.calls import Raised
from grpo_async.user_code.references import resolve
from grpo_async.utils.lifetime import die_with_parent

_functions: dict[str, RewardCallable] = {}


def main(descriptor: int, reference: str) -> None:
    """Serve `reference` on the socket `descriptor`. The import happens before the first call, outside its time limit."""
    die_with_parent()
    connection = Connection(descriptor)
    with contextlib.suppress(Exception):  # the first call meets it again and reports it
        _load(reference)
    connection.send_bytes(READY)  # the owner kills this process
    while True:
        try:
            request = connection.recv_bytes()  # EOFError when the owner hangs up
        except EOFError:
            return
        connection.send_bytes(_answer(reference, request))  # the owner kills this process


def _answer(reference: str, request: bytes) -> bytes:
    """Run one pickled RewardRequest; returns a pickled RewardOutcome or Failure."""
    try:
        loaded: RewardRequest = pickle.loads(request)
        result = call_of(_load(reference), loaded).attempt()
    except BaseException as error:  # noqa: BLE001 - travels as a value, see grpo_async.user_code.calls
        result = Raised(error)
    return _pickled(failure_of(result.error) if isinstance(result, Raised) else result)


def _load(reference: str) -> RewardCallable:
    """Import once; the module's `prepare_worker()`, if it has one, does what should not count as part of a call."""
    if reference not in _functions:
        function = resolve(reference)
        prepare = getattr(sys.modules[reference.partition(":")[0]], "prepare_worker", None)
        if callable(prepare):
            prepare()
        _functions[reference] = function
    return _functions[reference]


def _pickled(result: RewardOutcome | Failure) -> bytes:
    if isinstance(result, Failure):
        return pickle.dumps(result if _survives(result) else dataclasses.replace(result, error=None))
    try:
        return pickle.dumps(result)
    except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises
        return _pickled(failure_of(TypeError(f"a value given to log_extra cannot leave the worker process: {error}")))


def _survives(failure: Failure) -> bool:
    """Exceptions with an `__init__` of their own often pickle but do not unpickle, so try both."""
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # noqa: BLE001 - whatever a user's __reduce__ raises
        return False
    return True
