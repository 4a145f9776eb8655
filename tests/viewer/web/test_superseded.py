"""Groups that a resume left behind: their ids come again, and the page tells the two apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from grpo_async.rundir import RunDir
from grpo_async.store import RolloutStore
from tests.viewer.web.pages import opened
from tests.viewer.web.serving import Inspector, append_steps, serving, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inspector]:
    """Step 2 twice: groups 3 to 5 as seq 3 to 5 ("old 2 0", ...), superseded, and as seq 6 to 8 ("new 2 0", ...)."""
    root = write_run(tmp_path_factory.mktemp("runs") / "run", num_steps=2, word="old")
    with RolloutStore(RunDir(root).rollouts) as store:
        store.supersede_from(3, step=1)
        append_steps(store, [2], word="new", first=3)
    with serving(root) as running:
        yield running


def test_seq_finds_one_of_two_with_the_same_id(resumed: Inspector) -> None:
    rows = resumed.json("api/rollouts", superseded=1, q="group.id=3", sort="seq,index")["rows"]
    assert [(row["seq"], row["superseded"]) for row in rows] == [(3, True)] * 4 + [(6, False)] * 4
    for seq, said in ((3, "old 2 1"), (6, "new 2 1")):
        found = resumed.json("api/rollout", id="g3-r1", seq=seq)
        assert found["rollout"]["messages"][0]["content"] == said
        assert {each["seq"] for each in found["summaries"]} == {seq}
        group = resumed.json("api/group", id=3, seq=seq)
        assert group["rollouts"][1]["messages"][0]["content"] == said
        assert (group["summary"]["seq"], group["summary"]["superseded"]) == (seq, seq == 3)
    assert resumed.json("api/rollout", id="g3-r1")["group"]["seq"] == 6
    assert resumed.json("api/group", id=3)["group"]["seq"] == 6


def test_a_seq_or_an_id_in_it_that_is_not_there_is_404(resumed: Inspector) -> None:
    for path, parameters in (
        ("api/group", {"id": 3, "seq": 99}),
        ("api/rollout", {"id": "g3-r1", "seq": 99}),
        ("api/rollout", {"id": "g4-r1", "seq": 3}),
    ):
        answer = resumed.get(path, **parameters)
        assert (answer.status_code, "seq" in answer.json()["error"]) == (404, True)


def test_a_superseded_rollout_opens_from_the_table_and_by_its_link(browser: Browser, resumed: Inspector) -> None:
    with opened(browser, resumed, "#/rollouts?run=run&superseded=1&sort=seq%2Cindex&q=group.id%3D3") as watched:
        page = watched.page
        page.wait_for_selector("text=8 rollouts in 2 groups")
        page.click(".grid-row.superseded a:has-text('g3-r1')")
        page.wait_for_selector("h1:has-text('g3-r1')")
        page.reload()
        page.wait_for_selector(".heading .badge:has-text('superseded')")
        page.keyboard.press("m")
        page.wait_for_selector(".turns :text('old 2 1')")
        page.keyboard.press("]")
        page.wait_for_selector("h1:has-text('g3-r2')")
        page.wait_for_selector(".heading .badge:has-text('superseded')")
        page.keyboard.press("Escape")
        page.wait_for_selector("h1:has-text('Group 3')")
        page.wait_for_selector(".card-text:has-text('old 2 2')")
        page.check("[aria-label='compare g3-r0']")
        page.check("[aria-label='compare g3-r3']")
        page.click("button:has-text('Compare two')")
        page.wait_for_selector(".diff")
        assert [each.inner_text() for each in page.locator(".diff").all()] == ["old 2 0", "old 2 3"]


def test_both_of_one_prompt_are_compared(browser: Browser, resumed: Inspector) -> None:
    group = resumed.json("api/group", id=3)["summary"]
    with opened(browser, resumed, f"#/prompt?run=run&superseded=1&hash={group['prompt_hash']}") as watched:
        page = watched.page
        page.wait_for_selector("h1:has-text('Same prompt')")
        page.check("[aria-label='left: step 2, group 3'] >> nth=0")
        page.check("[aria-label='right: step 2, group 3'] >> nth=1")
        page.click("button:has-text('Compare left and right')")
        page.wait_for_selector(".diff")
        assert page.locator(".diff del").all_inner_texts() == ["old"]
        assert page.locator(".diff ins").all_inner_texts() == ["new"]
