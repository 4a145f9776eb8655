"""Text of single tokens, by the `tokenizers` library alone: transformers takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.config.loader import read_values
from grpo_async.errors import RunError
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import downloaded_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


class TokenTexts:
    """id -> text. Bytes that are not a whole character alone are shown as the vocabulary spells them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return text
        return self._tokenizer.id_to_token(token_id) or f"<no token {token_id}>"


def load_token_texts(run: RunDir) -> TokenTexts | str:
    """The texts for a run's tokens, or a sentence that says why there are none.

    Looks for tokenizer.json in the model that RUN/config.yaml names, a folder or a download from the hub, then in the run's own
    exported model.
    """
    tried = []
    for path in (_of_model(run), run.model / _FILE):
        if path is not None and path.is_file():
            return TokenTexts(_load(path))
        if path is not None:
            tried.append(str(path))
    return f"token texts are left out: no {' and no '.join(tried)}"


def _of_model(run: RunDir) -> Path | None:
    match read_values(run.config, []):
        case {"model": {"path": str(name), **others}}:
            revision = others.get("revision")
            in_folder = Path(name) / _FILE
            if Path(name).is_dir():
                return in_folder
            return downloaded_file(name, _FILE, revision if isinstance(revision, str) else None) or in_folder
    return None


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise RunError(f"{path} is not a tokenizer: {error}") from error
