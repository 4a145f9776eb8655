"""`--set a.b=c`: one value, read as YAML, on top of every file. List entries go by index: `rewards.0.weight=2`."""

from __future__ import annotations

from grpo_async.config.shape import Shape
from grpo_async.config.suggestions import suggest_key
from grpo_async.config.tree import Node, Path, Place, Problems, index_of
from grpo_async.config.yaml_source import read_yaml_value

_LONGEST_SHOWN = 100


def apply_override(root: Node, override: str, shape: Shape, problems: Problems) -> Node:
    """The tree with the override applied; unchanged, with a problem, when the path or the value is wrong."""
    shown = override if len(override) <= _LONGEST_SHOWN else override[: _LONGEST_SHOWN - 3] + "..."
    place = Place(f"--set {shown.encode(errors='backslashreplace').decode()}")
    dotted, has_value, text = override.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    if not has_value or not all(path):
        problems.add(place, "an override is written section.key=value")
        return root
    if shape.find(path) is None and not _is_bad_index(root, path):
        problems.add(place, f"unknown key '{'.'.join(path)}'{suggest_key(shape, path)}")
        return root
    value = read_yaml_value(text, place, problems)
    return root if value is None else _put(root, path, (), value, place, problems)


def _is_bad_index(root: Node, path: Path) -> bool:
    return any((node := root.find(path[:i])) is not None and isinstance(node.value, list) for i in range(len(path)))


def _put(node: Node | None, path: Path, done: Path, value: Node, place: Place, problems: Problems) -> Node:
    """`node` with `value` at `path` below it. `done` is the path that led here, for messages."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if node is not None and isinstance(node.value, list):
        index, count = index_of(key), len(node.value)
        if index is None or index >= count:
            allowed = (
                "none can be set"
                if count == 0
                else "the index must be 0"
                if count == 1
                else f"the index must be 0 to {count - 1}"
            )
            noun = "entry" if count == 1 else "entries"
            problems.add(place, f"'{'.'.join(done)}' has {count} {noun}, so {allowed} (got '{key}')")
            return node
        items = list(node.value)
        items[index] = _put(items[index], rest, (*done, key), value, place, problems)
        return Node(value=items, place=node.place)
    if node is not None and isinstance(node.value, dict):
        entries = dict(node.value)
        entries[key] = _put(entries.get(key), rest, (*done, key), value, place, problems)
        return Node(value=entries, place=node.place)
    # nothing there (or null): the override makes the section
    return Node(value={key: _put(None, rest, (*done, key), value, place, problems)}, place=place)
