"""pip's settings reach uv."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.install.pip_settings import read, to_uv, without_passwords


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_variables_win_over_files_and_nearer_files_over_farther_ones(tmp_path: Path) -> None:
    _write(tmp_path / ".pip/pip.conf", "[global]\nindex-url = https://far\nextra-index-url = https://far/extra\n")
    _write(
        tmp_path / "named.conf",
        "[global]\nindex_url = https://near\nfind-links =\n    /a\n    /b\n[install]\ncert = /ca.pem\n",
    )
    environment = {
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": str(tmp_path / "named.conf"),
        "PIP_CERT": "/other.pem",
    }
    settings = read(environment)
    assert settings["index-url"] == "https://near"
    assert settings["extra-index-url"] == "https://far/extra"
    assert settings["find-links"] == "/a /b"
    assert settings["cert"] == "/other.pem"


def test_a_broken_file_is_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "broken.conf", "index-url = https://no-section\n")
    settings = read({"PIP_CONFIG_FILE": str(tmp_path / "broken.conf"), "PIP_INDEX_URL": "https://i"})
    assert settings["index-url"] == "https://i"
    assert "broken.conf cannot be read" in capsys.readouterr().out


def test_the_names_are_those_of_uv() -> None:
    settings = {
        "index-url": "https://i",
        "extra-index-url": "https://a https://b",
        "find-links": "/a /b",
        "cert": "/ca.pem",
        "no-index": "true",
    }
    assert to_uv(settings, {}) == {
        "UV_DEFAULT_INDEX": "https://i",
        "UV_INDEX": "https://a https://b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_NO_INDEX": "1",
    }


def test_what_the_user_told_uv_itself_stays() -> None:
    assert (
        to_uv({"find-links": "/a", "index-url": "https://i"}, {"UV_FIND_LINKS": "/b", "UV_INDEX_URL": "https://j"})
        == {}
    )


def test_passwords_are_not_shown() -> None:
    assert without_passwords("--index https://me:secret@host/simple") == "--index https://***@host/simple"
