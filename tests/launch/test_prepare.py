"""The run directory before a run."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks._models import SHAPES
from grpo_async.checks.memory import ModelSize
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.errors import ConfigError
from grpo_async.launch.prepare import Start, check_start, clear_run_dir, lock
from grpo_async.launch.start import launch
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.training.checkpoint_manifest import write_manifest
from tests.launch.support import make_config
from tests.support.configs import merged
from tests.support.tiny_model import build_tiny_model


def _old_run(config: ExperimentConfig, *, steps: tuple[int, ...] = ()) -> RunDir:
    run_dir = RunDir(config.run_path)
    run_dir.create()
    run_dir.config.write_text(dump_config(config))
    if steps:
        run_dir.metrics.write_text('{"step": 1}\n')
    for step in steps:
        _make_checkpoint(run_dir, step)
    return run_dir


def _make_checkpoint(run_dir: RunDir, step: int) -> None:
    folder = run_dir.checkpoint(step)
    folder.mkdir()
    (folder / "state.json").write_text('{"format": 3}')
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)))
    write_manifest(folder, step=step, checksums={})


def _refused(config: ExperimentConfig, *words: str, resume: str | None = None, clean: bool = False) -> None:
    with pytest.raises(ConfigError, match=".*".join(map(re.escape, words))):
        check_start(config, resume=resume, clean=clean)


def test_two_launchers_cannot_hold_one_directory(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs" / "test")
    with lock(run_dir), pytest.raises(ConfigError, match="another launcher"), lock(run_dir):
        pass
    with lock(run_dir):
        pass


def test_a_new_or_empty_directory_is_taken_and_an_existing_run_refused_with_the_three_ways_out(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    _refused(config, "there is no run in", resume="latest")
    assert check_start(config, resume=None, clean=False).resume_step is None
    config.run_path.mkdir(parents=True)
    assert check_start(config, resume=None, clean=False).resume_step is None
    _old_run(config, steps=(1,))
    _refused(config, "with a checkpoint of step 1", "--resume", "--clean", "run.name")


def test_resume_takes_the_newest_whole_checkpoint_or_the_named_one(tmp_path: Path) -> None:
    config = make_config(tmp_path, training={"max_steps": 10})
    run_dir = _old_run(config, steps=(2, 10, 9))
    (run_dir.checkpoints / "step_11.partial").mkdir()
    newest, named = (check_start(config, resume=resume, clean=False) for resume in ("latest", "9"))
    assert (newest.resume_step, newest.resume_is_named) == (10, False)
    assert (named.resume_step, named.resume_is_named) == (9, True)
    _refused(config, "--resume 3", "2, 9, 10", resume="3")
    _refused(config, "exclude each other", resume="latest", clean=True)
    by_path = check_start(config, resume=str(run_dir.checkpoint(2)), clean=False)
    assert (by_path.resume_step, by_path.resume_is_named) == (2, True)
    run_dir.evaluation_log.write_text(
        '{"step": 9, "metrics": {"reward": 0.5}}\n{"step": 2, "metrics": {"reward": 0.25}}\n'
    )
    assert check_start(config, resume="best", clean=False).resume_step == 9


def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_one_before_is_taken(tmp_path: Path) -> None:
    """Other damage: tests/training/test_checkpoint.py."""
    config = make_config(tmp_path)
    run_dir = _old_run(config, steps=(1, 2, 3))
    os.truncate(run_dir.checkpoint(3) / "__0_0.distcp", 255)
    shutil.copytree(run_dir.checkpoint(1), run_dir.checkpoint(7))
    start = check_start(config, resume="latest", clean=False)
    assert (start.resume_step, start.broken_steps) == (2, (7, 3))
    assert "is that of step 1" in start.notes[0]
    assert "has 255 bytes instead of 256" in start.notes[1]
    assert run_dir.checkpoint_steps() == [1, 2, 3, 7]  # nothing is changed by looking
    clear_run_dir(run_dir, start)
    assert run_dir.checkpoint_steps() == [1, 2]
    assert (run_dir.checkpoints / "broken_step_3").is_dir()
    assert check_start(config, resume="latest", clean=False).notes == ()
    (run_dir.checkpoint(2) / "state.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match=r"--resume 2(.|\n)*is damaged(.|\n)*--resume latest"):
        check_start(config, resume="2", clean=False)
    assert check_start(config, resume="1", clean=False).resume_step == 1


def test_a_checkpoint_of_another_format_is_refused_and_not_taken_for_damaged(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_dir = _old_run(config, steps=(1,))
    run_dir.checkpoint(2).mkdir()
    (run_dir.checkpoint(2) / "manifest.json").write_text('{"format": 2, "step": 2}')
    run_dir.config.write_text("a_key: of that version\n")
    for resume in ("latest", "2", "best"):
        _refused(config, f"--resume {resume}: ", "has format 2, of another version", resume=resume)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({"run": {"seed": 3}}, "run.seed: 0 -> 3"),
        ({"model": {"lora": {"rank": 4}}}, "model.lora.rank: (not set) -> 4"),
        (
            {"model": {"chat_template_kwargs": {"think": True}}},
            "model.chat_template_kwargs.think: another value (not shown, since it may be secret)",
        ),
        ({"loss": {"sync_ref_model": True, "beta": 0.1}}, "loss.sync_ref_model: false -> true"),
    ],
)
def test_resume_refuses_what_a_checkpoint_cannot_go_on_with_before_anything_starts(
    tmp_path: Path, after: dict[str, Any], told: str
) -> None:
    """Also where it is config.yaml of the run itself that was edited."""
    config, changed = make_config(tmp_path), make_config(tmp_path, **after)
    run_dir = _old_run(config, steps=(1,))
    run_dir.new_attempt()
    run_dir.config.write_text(dump_config(changed))
    with pytest.raises(ConfigError) as caught:
        check_start(changed, resume="latest", clean=False)
    assert f"\n  {told}\n" in str(caught.value)
    assert "put them back" in str(caught.value)
    assert check_start(config, resume="latest", clean=False).resume_step == 1


def test_values_of_the_environment_reach_neither_a_note_nor_a_file_that_others_read(tmp_path: Path) -> None:
    """They stand resolved in the configuration."""

    def with_key(key: str) -> ExperimentConfig:
        reward = {"function": "grpo_async.rewards.text:exact_match", "arguments": {"api_key": key}}
        return make_config(tmp_path, rewards=[reward])

    config = with_key("sk-old")
    config.run_path.mkdir(parents=True, mode=0o755)  # the user's own
    run_dir = _old_run(config, steps=(1,))
    attempt = run_dir.new_attempt()
    assert run_dir.root.stat().st_mode & 0o777 == 0o700
    run_dir.root.chmod(0o750)  # opened to a group, knowingly
    run_dir.create(dump_config(config))
    assert run_dir.root.stat().st_mode & 0o777 == 0o750
    for file in (run_dir.config, attempt_config(attempt)):
        assert "sk-old" in file.read_text()
        assert file.stat().st_mode & 0o777 == 0o600
    (note,) = check_start(with_key("sk-new"), resume="latest", clean=False).notes
    assert "rewards.0.arguments.api_key" in note
    assert "sk-" not in note


def test_resume_of_a_finished_run_is_refused_unless_there_are_more_steps(tmp_path: Path) -> None:
    def config(**training: Any) -> ExperimentConfig:
        return make_config(tmp_path, training={"max_steps": 2, **training})

    run_dir = _old_run(config(), steps=(2,))
    assert check_start(config(), resume="latest", clean=False).resume_step == 2  # only the export may be missing
    run_dir.summary.write_text(json.dumps({"status": "finished", "steps": 1}))  # of an attempt with fewer
    assert check_start(config(), resume="latest", clean=False).resume_step == 2
    run_dir.summary.write_text(json.dumps({"status": "finished", "steps": 2}))
    _refused(config(), "has finished its 2 steps; raise training.max_steps", resume="latest")
    assert check_start(config(max_steps=5), resume="latest", clean=False).resume_step == 2
    _refused(config(max_steps=1), "step 2", "max_steps = 1", resume="latest")


def test_clean_removes_only_what_looks_like_a_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_dir = _old_run(config, steps=(1,))
    assert check_start(config, resume=None, clean=True).removes
    (run_dir.root / "link").symlink_to(tmp_path / "model")
    clear_run_dir(run_dir, Start(removes=True))
    assert list(run_dir.root.iterdir()) == []
    assert (tmp_path / "model" / "config.json").is_file()  # the link went, not what it points at
    (run_dir.root / "thesis.tex").write_text("")
    _refused(config, "no config.yaml", clean=True)
    (run_dir.root / "thesis.tex").unlink()
    (run_dir.root / "config.yaml.tmp").write_text("run: {na")  # of a run that was killed in its first moment
    assert check_start(config, resume=None, clean=True).removes


def test_clean_never_removes_what_the_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, run={"name": tmp_path.name, "dir": str(tmp_path.parent)})
    (tmp_path / "config.yaml").write_text("")
    _refused(config, "would remove model.path", clean=True)
    reads = {
        "loss.reference": {"loss": {"reference": "runs/test/model", "beta": 0.1}},
        "rewards.0.model": {"rewards": [{"model": "runs/test/model"}]},
        "data.train.name": {"data": {"train": {"type": "hub", "name": "runs/test/model"}}},
    }
    monkeypatch.chdir(tmp_path)
    for key, sections in reads.items():
        config = make_config(tmp_path, **sections)
        _old_run(config).model.mkdir(exist_ok=True)
        _refused(config, f"would remove {key}: runs/test/model lies there", clean=True)
    config = make_config(tmp_path, run={"name": "here", "dir": "."})  # where a run is written is not what it reads
    _old_run(config)
    assert check_start(config, resume=None, clean=True).removes


def test_the_directory_of_a_start_that_failed_is_begun_in_again_and_its_logs_stay(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_dir = _old_run(config)
    log = run_dir.new_attempt() / "trainer.log"
    log.write_text("no such module")
    run_dir.metrics.write_text("")
    start = check_start(config, resume="latest", clean=False)
    assert (start.resume_step, start.keeps_logs, len(start.notes)) == (None, True, 1)
    clear_run_dir(run_dir, start)
    assert [path.name for path in run_dir.root.iterdir()] == ["logs"]
    assert log.exists()
    run_dir.create(dump_config(config))
    run_dir.metrics.write_text('{"step": 1}\n')  # it has trained: what it wrote is the user's to remove
    _refused(config, "without a checkpoint", "--clean", resume="latest")


def test_a_token_is_private_and_one_that_a_killed_launcher_left_is_no_obstacle(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_dir = _old_run(config, steps=(1,))
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    run_dir.token.symlink_to(target)  # not followed, either
    assert check_start(config, resume="latest", clean=False).resume_step == 1
    before = os.umask(0)
    try:
        with run_dir.new_token() as token:  # private from its first moment
            assert run_dir.token.read_text() == token
            assert run_dir.token.stat().st_mode & 0o777 == 0o600
            assert not run_dir.token.is_symlink()
    finally:
        os.umask(before)
    assert target.read_text() == "untouched"
    assert not run_dir.token.exists()


def test_a_dry_run_plans_for_gpus_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk of this machine is not asked for room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    model = build_tiny_model(tmp_path / "tiny")
    config = make_config(
        tmp_path,
        model={"path": str(model)},
        inference={"engine": "vllm", "max_model_len": 128, "replicas": 6},
        rollout={"max_completion_tokens": 64},
        launch={"num_trainer_ranks": 2, "device": "auto"},
    )
    assert launch(config, dry_run=True, gpus=8) == 0
    plan = capsys.readouterr().out
    for text in (
        "trainer: 2 processes",
        "GPU 0,1\n",
        "inference server 5: ",
        "GPU 7\n",
        "served in bfloat16",
        "MiB: weights",
    ):
        assert text in plan, text
    with pytest.raises(ConfigError, match=r"2 for the trainer's ranks .* and 6 for 6 servers"):
        launch(config, dry_run=True, gpus=4)
    shared = config.model_copy(update={"launch": config.launch.model_copy(update={"colocate": True})})
    assert launch(shared, dry_run=True, gpus=8) == 0
    assert re.search(r"^step +not estimated .*launch\.colocate", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("ranks", "servers", "sections", "waiting"),
    [
        (7, 1, {}, "the trainer waits"),
        (1, 7, {}, "the servers wait"),
        (1, 7, {"rollout": {"max_staleness": 0}}, "one waits for the other"),
    ],
)
def test_a_dry_run_for_gpus_estimates_a_step_who_waits_and_the_fastest_split(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ranks: int,
    servers: int,
    sections: dict[str, Any],
    waiting: str,
) -> None:
    """A 4B model on eight GPUs, 16 groups of 8 completions of up to 7168 tokens, in which 2 for the trainer are right."""
    monkeypatch.setattr(ModelSize, "read", lambda path: SHAPES["4b"].size)
    base: dict[str, Any] = {
        "model": {"path": str(build_tiny_model(tmp_path / "tiny")), "activation_checkpointing": "full"},
        "inference": {"engine": "vllm", "max_model_len": 8192, "replicas": servers},
        "rollout": {"max_completion_tokens": 7168, "groups_per_step": 16, "group_size": 8, "max_staleness": 2},
        "launch": {"num_trainer_ranks": ranks, "device": "auto"},
        "training": {"micro_batch_tokens": 8192},
    }
    assert launch(make_config(tmp_path, **merged(base, sections)), dry_run=True, gpus=8) == 0
    plan = capsys.readouterr().out
    (step,) = re.findall(r"^step +about ([\d,]+) s: .* ([\d,]+) s, .* ([\d,]+) s for 128 rollouts; (.*)$", plan, re.M)
    step_s, train_s, generate_s = map(float, step[:3])
    assert waiting in step[3]
    assert (train_s > generate_s) == (ranks == 1)
    assert step_s == pytest.approx(train_s + generate_s if sections else max(train_s, generate_s), abs=1.0)
    (split,) = re.findall(r"^split .* (\d) for the trainer and (\d) servers .* about ([\d,]+) s a step$", plan, re.M)
    assert split[:2] == ("2", "6") if not sections else split[0] in "23456"
    assert float(split[2]) < step_s
