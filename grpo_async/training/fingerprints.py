"""What the tensors of a checkpoint mean only together with: base model, tokenizer, chat template, KL reference, reward models.

Fingerprints are of content: a folder that was moved or copied is the same model. A checkpoint keeps those of its run, and a
resume or an export with others is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.utils.files import downloaded_file
from grpo_async.weights.adapters import BaseWeights

Fingerprints: TypeAlias = dict[str, dict[str, str]]
"""By what it is of: {"digest": SHA-256 of the content, "source": where that was read}."""
_NOT_CONTENT = ("_name_or_path", "transformers_version")  # of config.json: who wrote it
_OF_A_CALL = ("truncation", "padding")  # of a tokenizer: settings of its last call


def run_fingerprints(config: ExperimentConfig, renderer: ChatRenderer) -> Fingerprints:
    """Return those of all that a run depends on. The model is on this machine already."""
    found = model_fingerprints(config.model, renderer)
    if config.loss.needs_reference:
        is_initial, path = config.loss.reference == "initial", config.loss.reference
        found["loss.reference"] = found["model.path"] if is_initial else _of_model(path, None)
    folders = [reward.model for reward in config.rewards if reward.model and Path(reward.model).is_dir()]
    return found | {f"reward model {folder}": _of_model(folder, None) for folder in folders}


def model_fingerprints(model: ModelSection, renderer: ChatRenderer) -> Fingerprints:
    """Return those of base model, tokenizer (all that decides ids and where a turn ends) and chat template."""
    tokenizer = renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    rules = {name: rule for name, rule in rules.items() if name not in _OF_A_CALL}
    ids = [rules, tokenizer.special_tokens_map, renderer.end_of_turn_ids]
    template = str(model.chat_template or model.path)
    return {
        "model.path": _of_model(model.path, model.revision),
        "tokenizer": {"digest": _digest(ids), "source": model.path},
        "chat template": {"digest": _digest(tokenizer.chat_template), "source": template},
    }


def check_fingerprints(saved: Fingerprints, current: Fingerprints, *, step: int) -> None:
    changed = [name for name in saved if name in current and saved[name]["digest"] != current[name]["digest"]]
    if not changed:
        return
    lines = "".join(f"\n  {name}: {_shown(saved[name])} -> {_shown(current[name])}" for name in changed)
    raise ConfigError(
        f"the checkpoint of step {step} was trained with other content of{lines}\n"
        "restore it (a folder's files; of a hub name set the commit as its revision), or begin a new run (another run.name)"
    )


def _of_model(path: str, revision: str | None) -> dict[str, str]:
    file: Path | None = Path(path) / "config.json"
    source = path
    if not Path(path).is_dir() and (file := downloaded_file(path, "config.json", revision)) is not None:
        source = f"{path}, commit {file.parent.name}"  # models--NAME/snapshots/COMMIT/config.json
    config = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}
    config = {name: value for name, value in config.items() if name not in _NOT_CONTENT}
    weights = BaseWeights(path, revision=revision).digest_or_none()
    return {"digest": _digest([config, weights]), "source": source}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _shown(fingerprint: Mapping[str, str]) -> str:
    return f"{fingerprint['source']} ({fingerprint['digest'][:12]})"
