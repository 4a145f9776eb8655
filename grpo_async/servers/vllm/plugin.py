"""Entry point `vllm.general_plugins`: vLLM calls `register` in its API server, engine core and workers, some more than once.

It acts only in processes that `serve-vllm` started (GRPO_ASYNC_VLLM=1), so other vLLM servers of the same installation
are left as they are.
"""

from __future__ import annotations

import multiprocessing
import os

ENABLED_VARIABLE = "GRPO_ASYNC_VLLM"


def register() -> None:
    """Make this process part of a grpo_async server."""
    if os.environ.get(ENABLED_VARIABLE) != "1":
        return
    _die_with_vllm_parent()
    from grpo_async.servers.vllm import patches

    if multiprocessing.parent_process() is None:
        patches.limit_silent_connections()
    patches.ask_for_amx()
    patches.rotate_every_head()
    patches.bind_rendezvous_to_its_own_address()


def _die_with_vllm_parent() -> None:
    """End engine core and workers with the process that started them; vLLM alone leaves them running after a SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:  # the API server; serve-vllm tied it to its own parent before the exec
        return
    from grpo_async.utils.processes import die_with_parent

    assert parent.pid is not None
    die_with_parent(parent.pid)
