"""What is put together to one tree: `extends`, `--set a.b=c`, `${NAME}` of the environment.

    extends: base.yaml            # or a list; later ones win; paths are relative to the file that says it

Mappings are merged key by key, everything else is replaced. The place of a value is that of the file it came from. A section that
is told apart by `type` starts afresh when the type changes: keys of another type would only be unknown ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path as FilePath

from grpo_async.config.shape import Shape, suggest_key
from grpo_async.config.tree import (
    Node,
    Path,
    Place,
    Problems,
    index_of,
    read_scalar,
    read_yaml_file,
    read_yaml_value,
    shorten,
    usable_text,
)

_MOST_FILES = 30
_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_OF_THE_JOB = (("launch", "slurm", "setup"), ("launch", "slurm", "options"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_with_bases(path: FilePath, shape: Shape, environment: Mapping[str, str], problems: Problems) -> Node | None:
    """The merged tree of a file and everything it extends; None when a file could not be read (then reported)."""
    num_read = 0

    def read(path: FilePath, inside: list[FilePath]) -> Node | None:
        """`inside`: the files that led here, outermost first; meeting one of them again is a circle."""
        nonlocal num_read
        num_read += 1
        own = read_yaml_file(path, problems)
        if own is None:
            return None
        assert isinstance(own.value, dict)
        merged = Node(value={}, place=own.place)
        chain = [*inside, path]
        for entry in bases_of(own):
            base = FilePath(os.path.normpath(path.parent / os.path.expanduser(str(entry.value))))
            if fault := fault_of(entry, base, chain):
                problems.add(entry.place, f"extends: {fault}", unreadable=True)
            elif (below := read(base, chain)) is not None:
                merged = merge(merged, below, shape)
        rest = {key: node for key, node in own.value.items() if key != "extends"}
        return merge(merged, Node(value=rest, place=own.place), shape)

    def bases_of(own: Node) -> list[Node]:
        written = own.child("extends")
        if written is None:
            return []
        written = interpolate(written, environment, problems, ("extends",))
        entries = written.value if isinstance(written.value, list) else [written]
        problems.unreadable |= any(entry.broken for entry in entries)
        return [entry for entry in entries if not entry.broken]

    def fault_of(entry: Node, base: FilePath, chain: list[FilePath]) -> str:
        """Why `base` cannot be extended by the last of `chain`; empty: it can."""
        if not isinstance(entry.value, str):
            return "give the name of a file, or a list of names"
        try:
            if base.resolve() in [file.resolve() for file in chain]:
                return f"it goes in a circle: {' -> '.join(str(file) for file in [*chain, base])}"
            if not base.is_file():
                return f"there is no file {base} (paths are relative to {chain[-1]})"
        except OSError as error:  # a name that is too long, a folder that may not be entered
            return f"{base} cannot be read: {error.strerror}"
        if num_read >= _MOST_FILES:
            return f"more than {_MOST_FILES} files are read, one of them perhaps on many ways; extend fewer"
        return ""

    root = read(path, [])
    return None if problems.unreadable else root


def merge(below: Node, above: Node, shape: Shape | None) -> Node:
    """`above` on top of `below`: {a: {b: 1, c: 2}} under {a: {c: 3}} -> {a: {b: 1, c: 3}}."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    if shape is not None and shape.tag_key is not None and shape.tag_key in above.value:
        default = Node(value=shape.default_tag, place=below.place)
        if below.value.get(shape.tag_key, default).value != above.value[shape.tag_key].value:
            return above
    entries = dict(below.value)
    for key, node in above.value.items():
        entries[key] = merge(entries[key], node, shape.below(key) if shape else None) if key in entries else node
    return Node(value=entries, place=above.place)


def apply_override(root: Node, override: str, shape: Shape, problems: Problems) -> Node:
    """The tree with one `--set`: a value read as YAML, on top of every file. List entries go by index: `rewards.0.weight=2`. The
    tree stays as it is, with a problem, when the path or the value is wrong."""
    place = Place(f"--set {shorten(override, 100).encode(errors='backslashreplace').decode()}")
    dotted, has_value, text = override.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    if not has_value or not all(path):
        problems.add(place, "an override is written section.key=value")
        return root
    above = (root.find(path[:i]) for i in range(len(path)))
    is_in_a_list = any(node is not None and isinstance(node.value, list) for node in above)
    if shape.find(path) is None and not is_in_a_list:
        problems.add(place, f"unknown key '{'.'.join(path)}'{suggest_key(shape, path)}")
        return root
    value = read_yaml_value(text, place, problems)
    return root if value is None else _put(root, path, (), value, place, problems)


def _put(node: Node | None, path: Path, done: Path, value: Node, place: Place, problems: Problems) -> Node:
    """`node` with `value` at `path` below it. `done` is the path that led here, for messages."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if node is None or not isinstance(
        node.value, list | dict
    ):  # nothing there (or null): the override makes the section
        return Node(value={key: _put(None, rest, (*done, key), value, place, problems)}, place=place)
    if isinstance(node.value, dict):
        below = _put(node.value.get(key), rest, (*done, key), value, place, problems)
        return Node(value={**node.value, key: below}, place=node.place)
    index, count = index_of(key), len(node.value)
    if index is None or index >= count:
        allowed = {0: "none can be set", 1: "the index must be 0"}.get(count, f"the index must be 0 to {count - 1}")
        noun = "entry" if count == 1 else "entries"
        problems.add(place, f"'{'.'.join(done)}' has {count} {noun}, so {allowed} (got '{key}')")
        return node
    items = list(node.value)
    items[index] = _put(items[index], rest, (*done, key), value, place, problems)
    return Node(value=items, place=node.place)


def escape(text: str) -> str:
    """`text` written so that interpolation gives it back."""
    return text.replace("${", "$${")


def interpolate(node: Node, environment: Mapping[str, str], problems: Problems, path: Path = ()) -> Node:
    """The node with every `${NAME}` in its texts replaced, and `${NAME:-default}` (when unset or empty); `$${` is a literal `${`.

    A plain (unquoted) value that is nothing but one reference is then read as a YAML scalar: with LR=1e-6 in the environment
    `lr: ${LR}` is a number, while `name: "${RUN}"` stays text whatever RUN holds. What a variable holds is not interpolated again.
    A node with a problem comes back broken.

    The lines that `launch slurm` writes into its script (`launch.slurm.setup`, `.options`) are left to the job: `${NAME}` stays as
    it is, so that no secret of this environment gets into the script; only `$${` is read as `${` there too.
    """
    if isinstance(node.value, dict):
        entries = {key: interpolate(below, environment, problems, (*path, key)) for key, below in node.value.items()}
        return Node(value=entries, place=node.place)
    if isinstance(node.value, list):
        items = [interpolate(below, environment, problems, (*path, str(i))) for i, below in enumerate(node.value)]
        return Node(value=items, place=node.place)
    if not isinstance(node.value, str) or "${" not in node.value:
        return node
    text = node.value
    if path[:3] in _OF_THE_JOB:
        return Node(value=text.replace("$${", "${"), place=node.place, quoted=node.quoted)
    faults: list[str] = []

    def replacement(match: re.Match[str]) -> str:
        if match["body"] is None:
            return "${"
        name, has_default, default = match["body"].partition(":-")
        if not match["end"]:
            faults.append(f"'{match[0]}' has no closing brace; write $${{ for a literal ${{")
        elif not _NAME.fullmatch(name):
            faults.append(f"'{match[0]}' does not name an environment variable; write $${{ for a literal ${{")
        elif has_default:
            return environment.get(name) or default
        elif name not in environment:
            faults.append(f"the environment variable '{name}' is not set; set it or write ${{{name}:-default}}")
        return environment.get(name, "")

    replaced = _REFERENCE.sub(replacement, text)
    whole = _REFERENCE.fullmatch(text)
    is_one_reference = whole is not None and whole["body"] is not None and not node.quoted
    if not faults:
        try:
            value = read_scalar(replaced) if is_one_reference else usable_text(replaced)
            return Node(value=value, place=node.place, quoted=node.quoted)
        except ValueError as error:
            faults.append(f"{text}: {error}")
    for fault in faults:
        problems.add(node.place, f"{'.'.join(path)}: {fault}")
    return Node(value=None, place=node.place, broken=True)
