"""Text of single tokens, by the `tokenizers` library alone: transformers takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.config.loader import read_values
from grpo_async.errors import RunError
from grpo_async.run_directory import RunDir

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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

    Looks for tokenizer.json in the model folder that RUN/config.yaml names, then in the run's own exported model.

    Raises:
        RunError: a tokenizer.json is there and cannot be read.
    """
    tried = []
    for folder in (_model_folder(run), run.model):
        path = folder / "tokenizer.json" if folder is not None else None
        if path is not None and path.is_file():
            return TokenTexts(_load(path))
        if path is not None:
            tried.append(str(path))
    return f"token texts are left out: no {' and no '.join(tried)}"


def _model_folder(run: RunDir) -> Path | None:
    match read_values(run.config, []):
        case {"model": {"path": str(path)}}:
            return Path(path)
    return None


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise RunError(f"{path} is not a tokenizer: {error}") from error
