"""Atomic writes, JSON that other processes write, files of lines, and the paths of shipped and
of downloaded files."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from grpo_async.errors import RunError
from grpo_async.utils.text import count, finite

_CHUNK_BYTES = 1 << 20  # to read at once

# ---- files and folders that stand whole under their name, and on the disk ----


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields `temporary_of(path)` to write to; at the end it is renamed to `path`: a reader sees the old file or the new one. After
    an error nothing is left of it."""
    temporary = temporary_of(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write `text` as `replacing` does: a reader sees the old file or the new one.

    Args:
        mode: of the file, from its first moment on (less the umask); None: as usual, 0666 less the umask.
    """
    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)  # one that a killed process left has another mode, perhaps
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


def temporary_of(path: Path) -> Path:
    """The name of a file while `replacing` writes it; a process that is killed meanwhile leaves it."""
    return path.with_name(path.name + ".tmp")


def sync(path: Path) -> None:
    """fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_stamp(path: Path) -> tuple[Path, int, int] | None:
    """Identity of a file's content: it changes whenever the file does. None: there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return path, status.st_size, status.st_mtime_ns


def put_in_place(made: Path, folder: Path, *, aside: Path) -> None:
    """Rename `made` to `folder`. What stands there is renamed to `aside` first, and removed when the new one is in place: whenever
    this ends, the old one or the new one is whole."""
    if folder.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    os.replace(made, folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


# ---- JSON ----
# JSON files that several processes use. A writer may have been killed while it wrote, so reading raises nothing, whatever a file
# holds.


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object that a file holds; empty where it is not there, or holds something else. What cannot be read is a sentence in
    `problems`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def read_objects(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file. A torn last line is left out; other lines that are not one are counted in `problems`."""
    num_bad = 0
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            for line in file:
                if (content := parse_object(line)) is not None:
                    yield content
                else:
                    num_bad += line.endswith(b"\n")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error}")
    if num_bad:
        problems.append(f"{path.name}: {count(num_bad, 'line')} left out: not JSON objects")


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None: it is not one, or torn, or damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def numbers(values: object) -> dict[str, float]:
    """The values of a mapping that are finite numbers; {} for anything else."""
    if not isinstance(values, Mapping):
        return {}
    return {str(name): number for name, value in values.items() if (number := finite(value)) is not None}


def json_safe(value: Any) -> Any:
    """`value` with null in place of NaN and the infinities, which JSON does not have, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): json_safe(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(each) for each in value]
    return value


# ---- lines ----
# Files of lines that are whole as soon as their line feed is there, so that readers may look while a process appends.
#
# What a full disk does is said in one way (`Outage`), and costs what the file is worth: metrics wait in memory for a minute and
# rollouts for ten seconds, because their queue is bounded; then the run ends. The timeline only helps: spans that memory does not
# hold are lost, and counted.

logger = logging.getLogger(__name__)


def whole_bytes(descriptor: int) -> int:
    """Size of the file without its last line, where that has no line feed: torn by a kill, or being written."""
    position = os.lseek(descriptor, 0, os.SEEK_END)
    while position > 0:
        begin = max(0, position - _CHUNK_BYTES)
        found = os.pread(descriptor, position - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        position = begin
    return 0


def append_whole(descriptor: int, lines: bytes) -> None:
    """Append lines to a file that is opened for appending; no reader ever sees half of one that could not be written.

    Raises:
        OSError: they could not be written. Nothing of them is left, unless the file cannot be cut back either.
    """
    size, rest = os.fstat(descriptor).st_size, memoryview(lines)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


class Outage:
    """The time in which nothing can be written to `path`: logged as it begins and as it ends.

    Args:
        meanwhile, afterward: what becomes of what is to be written, and what became of it.
    """

    def __init__(self, path: Path, *, meanwhile: str, afterward: str = "nothing is missing") -> None:
        self._path = path
        self._meanwhile = meanwhile
        self._afterward = afterward
        self._since: float | None = None

    def lasts(self, error: OSError) -> float:
        """A write has failed. Seconds since the first that did."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            logger.warning("cannot write %s: %s; %s", self._path, error.strerror, self._meanwhile)
        return now - self._since

    def end(self) -> None:
        """A write has succeeded."""
        if self._since is not None:
            self._since = None
            logger.warning("%s can be written again; %s", self._path, self._afterward)


class Writer(ABC):
    """A writer as a context: leaving it closes it. What cannot be written then is raised; where another error ends the run it is
    logged instead, because the user has to know the other one first."""

    @abstractmethod
    def close(self) -> None:
        """Write what waits. Raises RunError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RunError as own:
            if error is None:
                raise
            logger.error("%s", own)


# ---- where configs/ and docs/ are: a wheel has them inside the package, a checkout next to it ----

_PACKAGE = Path(__file__).parents[1]


def shipped(name: str) -> Path:
    """Path of `name` ("configs/quickstart.yaml"), relative where it is below the working directory; need not exist."""
    inside = _PACKAGE / name
    path = inside if inside.exists() else _PACKAGE.parent / name
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def downloaded_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """A file of a model on the Hugging Face hub (revision None: of `main`) in the cache of this machine; None: it is not there."""
    from huggingface_hub import try_to_load_from_cache  # slow import
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # it can be no name on the hub
        return None
    return Path(found) if isinstance(found, str) else None
