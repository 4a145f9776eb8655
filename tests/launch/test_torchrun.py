"""The launcher over a real torchrun with two ranks."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.launch.support import LauncherProcess
from tests.support.waiting import eventually, is_alive

pytestmark = pytest.mark.slow


def test_a_killed_launcher_leaves_nobody_and_no_temporary_folder_and_nothing_listens_in_public(tmp_path: Path) -> None:
    """The helper has left the session, as a daemon that a reward has started."""
    with LauncherProcess(tmp_path, trainer="start-helper", server="ignore-term", torchrun=True) as launcher:
        launcher.wait_for_line("training")
        launcher.wait_for_processes("server", "rank0", "rank1", "helper")
        tree = psutil.Process(launcher.process.pid).children(recursive=True)
        assert len(tree) == 7  # two keepers, the server, torchrun, two ranks, the helper
        listening = [c.laddr for p in tree for c in p.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        assert listening == []
        launcher.process.kill()
        assert eventually(lambda: not any(is_alive(process.pid) for process in tree), 10.0)
        assert eventually(lambda: not list(Path(launcher.temporary).iterdir()), 10.0)
