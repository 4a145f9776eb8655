"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from xdist.remote import Producer
    from xdist.scheduler import LoadGroupScheduling

# the assertions that test files share, too, say the values when they fail
pytest.register_assert_rewrite("tests.e2e.support", "tests.servers", "tests.support")

gc.disable()  # until all is imported: a sixth of the time that it takes
# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP ignored, and children inherit that; here they get
# both as in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads only wait for each other, spinning

LONG = ("tests/vllm/", "tests/e2e/", "tests/training/")
"""Folders whose tests begin first, so that no long one is left alone at the end."""
SHARED = {"vllm_server", "golden_run", "browser"}
"""Fixtures that are too dear to make once for each process."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long folders first. Tests of the one vLLM server, or of the one golden run, share a process of pytest-xdist."""
    items.sort(key=lambda item: next((i for i, folder in enumerate(LONG) if item.nodeid.startswith(folder)), len(LONG)))
    for item in items:
        for shared in SHARED & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(shared))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU, saying why, where there is none; fail where GRPO_REQUIRE asks for it."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        require = pytest.fail if "gpu" in os.environ.get("GRPO_REQUIRE", "") else pytest.skip
        require("torch sees no GPU")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what was imported stays: no later collection walks through it
    gc.enable()
    if getattr(session.config.option, "loadgroup", False):
        split = [
            item.nodeid for item in session.items if any(item.iter_markers("xdist_group")) and "@" not in item.nodeid
        ]
        assert not split, f"pytest-xdist does not group with this version of pytest, for instance {split[0]}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling:
    """A group in one process, everything else by files, whose fixtures are made once then."""
    from xdist.scheduler import LoadGroupScheduling

    class _ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    return _ByFile(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3 with its tokenizer; read only."""
    from tests.support.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium, from a module's first test with it to the last: tests of the same module cannot use asyncio.run."""
    from tests.support.browser import launched

    with launched() as opened:
        yield opened


@pytest.fixture(scope="session")
def needs_vllm() -> None:
    """Skip, saying why, where the real vLLM is missing; fail where GRPO_REQUIRE asks for it."""
    from grpo_async.servers.vllm.command import vllm_usable

    usable, reason = vllm_usable()
    if usable:
        return
    if "vllm" in os.environ.get("GRPO_REQUIRE", ""):
        pytest.fail(f"GRPO_REQUIRE asks for vllm: {reason}")
    pytest.skip(reason)
