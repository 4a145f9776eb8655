"""What ruff's S rules cannot see: what the shell scripts fetch."""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_shell_scripts_fetch_over_https_with_certificates_checked() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in SCRIPTS.iterdir() if file.is_file()}
    assert len(texts) > 4
    for name, text in texts.items():
        for word in ("--insecure", "--no-check-certificate", "--trusted-host", "http://", "| sh", "| bash", "eval "):
            assert word not in text, f"{name}: {word}"
