"""Environment variables in text values: `${NAME}`, `${NAME:-default}` (when unset or empty), `$${` for a literal `${`.

A plain (unquoted) value that is nothing but one interpolation is then read as a YAML scalar: with LR=1e-6 in the
environment `lr: ${LR}` is a number, while `name: "${RUN}"` stays text whatever RUN holds. What a variable holds is not
interpolated again.

The lines that `launch slurm` writes into its script (`launch.slurm.setup`, `.options`) are left to the job: `${NAME}` stays as
it is, so that no secret of this environment gets into the script; only `$${` is read as `${` there too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from grpo_async.config.tree import Node, Path, Problems
from grpo_async.config.yaml_source import read_scalar, usable_text

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_OF_THE_JOB = (("launch", "slurm", "setup"), ("launch", "slurm", "options"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def escape(text: str) -> str:
    """`text` written so that interpolation gives it back."""
    return text.replace("${", "$${")


def interpolate(node: Node, environment: Mapping[str, str], problems: Problems, path: Path = ()) -> Node:
    """The node with every reference replaced. A node with a problem comes back broken."""
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
    if faults:
        for fault in faults:
            problems.add(node.place, f"{'.'.join(path)}: {fault}")
        return Node(value=None, place=node.place, broken=True)
    whole = _REFERENCE.fullmatch(text)
    is_one_reference = whole is not None and whole["body"] is not None and not node.quoted
    try:
        value = read_scalar(replaced) if is_one_reference else usable_text(replaced)
    except ValueError as error:
        problems.add(node.place, f"{'.'.join(path)}: {text}: {error}")
        return Node(value=None, place=node.place, broken=True)
    return Node(value=value, place=node.place, quoted=node.quoted)
