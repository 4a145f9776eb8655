"""What the user told pip about where packages come from, in uv's words: uv reads neither pip.conf nor PIP_* variables.

    pip                uv                 note
    index-url          UV_DEFAULT_INDEX
    extra-index-url    UV_INDEX           with UV_INDEX_STRATEGY=unsafe-best-match: pip takes the best of all indexes
    find-links         UV_FIND_LINKS      comma-separated for uv
    cert               SSL_CERT_FILE
    no-index           UV_NO_INDEX

A PIP_* variable wins over pip.conf, a nearer pip.conf over a farther one, and a UV_* variable over all.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

NAMES = ("index-url", "extra-index-url", "find-links", "cert", "no-index")


def read(environment: Mapping[str, str]) -> dict[str, str]:
    """pip's settings that matter here; a list is one string of words."""
    settings: dict[str, str] = {}
    for file in _files(environment):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, PermissionError) as error:
            print(f"bootstrap: {file} cannot be read as pip's settings and is left out: {error}", flush=True)
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                found = {key.replace("_", "-"): value for key, value in parser.items(section)}
                settings |= {name: found[name] for name in NAMES if found.get(name)}
    for name in NAMES:
        value = environment.get("PIP_" + name.upper().replace("-", "_"))
        if value:
            settings[name] = value
    return {name: " ".join(value.split()) for name, value in settings.items()}


def to_uv(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of uv."""
    variables: dict[str, str] = {}
    if "index-url" in settings and "UV_INDEX_URL" not in environment:
        variables["UV_DEFAULT_INDEX"] = settings["index-url"]
    if "extra-index-url" in settings and "UV_EXTRA_INDEX_URL" not in environment:
        variables["UV_INDEX"] = settings["extra-index-url"]
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if "find-links" in settings:
        variables["UV_FIND_LINKS"] = ",".join(settings["find-links"].split())
    if "cert" in settings:
        variables["SSL_CERT_FILE"] = settings["cert"]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        variables["UV_NO_INDEX"] = "1"
    return {name: value for name, value in variables.items() if name not in environment}


def without_passwords(text: str) -> str:
    """An index address may carry a user and password; the terminal and the log need not."""
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)


def _files(environment: Mapping[str, str]) -> Iterable[Path]:
    """pip's configuration files, the farthest first, as `pip config debug` lists them."""
    named = environment.get("PIP_CONFIG_FILE")
    if named == "/dev/null":  # pip's way to say: none at all
        return []
    home = Path(environment["HOME"]) if environment.get("HOME") else None
    files = [
        Path(folder) / "pip/pip.conf" for folder in reversed(environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"))
    ]
    files.append(Path("/etc/pip.conf"))
    if home is not None:
        files.append(home / ".pip/pip.conf")
        config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
        mac = home / "Library/Application Support/pip"
        files.append(mac / "pip.conf" if sys.platform == "darwin" and mac.is_dir() else config / "pip/pip.conf")
    if named:
        files.append(Path(named))
    return [file for file in files if file.is_file()]
