"""DuckDB as the store uses it: databases in memory that load no extensions, and what is written into SQL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def connect(**settings: str) -> DuckDBPyConnection:
    """A database of its own. `settings` are further ones of DuckDB."""
    import duckdb

    extensions = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    return duckdb.connect(":memory:", config={**extensions, **settings})


def quote(text: str) -> str:
    """`text` as a literal of SQL: "it's" -> "'it''s'"."""
    return "'" + text.replace("'", "''") + "'"


def sql_path(path: Path) -> str:
    """A path as a parameter of DuckDB's read functions, which would take brackets, stars and question marks for a pattern: the run
    `a[1]` must not be read from `a1`."""
    return re.sub(r"[\[*?]", r"[\g<0>]", str(path))
