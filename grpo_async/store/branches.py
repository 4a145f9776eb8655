"""Which rows of the rollout store a resume has left behind: rollouts/branches.jsonl, one line per resume, never changed.

Worked example: the checkpoint of step 4 was taken when part 0 had 900 bytes; the run wrote on to 1500 and was killed. The resume
adds {"step": 4, "from_part": 0, "from_offset": 900, "until_part": 1}: rows at 900 and behind, in part 0, are superseded; part 1 is
new.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_async.errors import RunError

_NAME = "branches.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """From a byte of a part up to the end of the part before `until_part`. `step` is that of the checkpoint."""

    step: int
    from_part: int
    from_offset: int
    until_part: int

    def covers(self, part: int, offset: int) -> bool:
        """Whether the row at this place is left behind."""
        return (self.from_part, self.from_offset) <= (part, offset) and part < self.until_part


def add_branch(folder: Path, branch: Branch) -> None:
    """Append a line; one that a kill has torn is closed first."""
    path = folder / _NAME
    with path.open("ab") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write(b"\n")
        file.write(json.dumps(asdict(branch)).encode() + b"\n")


def read_branches(folder: Path) -> list[Branch]:
    """Every branch that was left, in order; a torn line is none: that resume never wrote a row.

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
