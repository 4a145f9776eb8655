"""Which groups of the rollout store a resume has left behind: branches.jsonl, one line per resume, never changed.

Worked example: the checkpoint of step 4 was taken when the next group was to get seq 90; the run wrote on to 149 and was killed.
The resume adds {"step": 4, "from_seq": 90, "until_seq": 150}: 90 to 149 are superseded, what it writes itself begins at 150.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_async.errors import RunError

_NAME = "branches.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The groups from `from_seq` up to the one before `until_seq`. `step` is that of the checkpoint."""

    step: int
    from_seq: int
    until_seq: int

    def covers(self, seq: int) -> bool:
        """Whether the group is left behind."""
        return self.from_seq <= seq < self.until_seq


def add_branch(folder: Path, branch: Branch) -> None:
    """Append a line; one that a kill has torn is closed first."""
    path = folder / _NAME
    with path.open("ab") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write(b"\n")
        file.write(json.dumps(asdict(branch)).encode() + b"\n")


def read_branches(folder: Path) -> list[Branch]:
    """Every branch that was left, in order; a torn line is none: that resume never wrote a group.

    Raises:
        RunError: a whole line cannot be read.
    """
    path = folder / _NAME
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if not line.endswith(b"}"):
            continue  # torn, and closed by the next resume
        try:
            found.append(Branch(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RunError(f"{path}:{number}: the line is damaged: {error}; remove it to read the rest") from error
    return found
