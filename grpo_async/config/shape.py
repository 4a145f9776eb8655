"""What may be written where: walks the annotations of the configuration's models along a path of keys; and what an unknown key
was meant to be.

A union that is told apart by `type` is walked with the keys of all its members until the type is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_async.config.tree import Path, index_of

_CLOSE_ENOUGH = 0.7  # difflib's ratio; below it a suggestion is more often noise than help
_LONGEST_KEY = 60  # difflib's time grows with the square

# Names of TRL (and of the optimizers' and servers' own arguments): our path, or what to know where there is none.
_FOREIGN = {
    "adam_beta1": "optimizer.betas",
    "bf16": "model.compute_dtype",
    "eval_steps": "evaluation.every_steps",
    "gradient_accumulation_steps": "is not needed: rollout.groups_per_step is the size of a step, and training.micro_batch_tokens "
    "divides it",
    "gradient_checkpointing": "model.activation_checkpointing",
    "learning_rate": "optimizer.lr",
    "logging_steps": "is not needed: every step is logged to metrics.jsonl",
    "lr_scheduler_type": "optimizer.schedule",
    "mask_truncated_completions": "rollout.overlong",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_prompt_length": "data.train.max_prompt_tokens",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_iterations": "is not supported: a sample is trained once; training.minibatches makes several updates of a step's samples",
    "num_train_epochs": "is not supported: training.max_steps is the length of a run",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "is not needed: rollout.groups_per_step x rollout.group_size is the batch, and "
    "training.micro_batch_tokens divides it",
    "report_to": "tracking",
    "reward_funcs": "rewards",
    "save_steps": "checkpoint.every_steps",
    "scale_rewards": "advantage.type",
    **dict.fromkeys(
        ("top_p", "top_k", "min_p", "repetition_penalty"),
        "is not supported: completions are sampled from the policy as it is; rollout.temperature can be set",
    ),
    "use_peft": "model.lora",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The alternatives of one value. `tag_key` is the key that tells them apart, for unions on `type`."""

    alternatives: tuple[Any, ...]
    tag_key: str | None = None

    @classmethod
    def of(cls, annotation: Any, tag_key: str | None = None) -> Shape:
        """The shape of an annotation: `Annotated` and `| None` are looked through."""
        if get_origin(annotation) is Annotated:
            base, *extras = get_args(annotation)
            for extra in extras:
                if isinstance(extra, FieldInfo) and isinstance(extra.discriminator, str):
                    tag_key = extra.discriminator
            return cls.of(base, tag_key)
        if get_origin(annotation) in (Union, UnionType):
            parts = [cls.of(part, tag_key) for part in get_args(annotation) if part is not NoneType]
            keys = {part.tag_key for part in parts if part.tag_key}
            return cls(tuple(a for part in parts for a in part.alternatives), keys.pop() if keys else None)
        return cls((annotation,), tag_key)

    @property
    def models(self) -> list[type[BaseModel]]:
        return [a for a in self.alternatives if isinstance(a, type) and issubclass(a, BaseModel)]

    @property
    def tags(self) -> dict[str, type[BaseModel]]:
        """type -> model, for a union on `type`; empty otherwise."""
        if self.tag_key is None:
            return {}
        found = {}
        for model in self.models:
            field = model.model_fields[self.tag_key]
            found.update({str(tag): model for tag in get_args(field.annotation)})
        return found

    @property
    def default_tag(self) -> str | None:
        """The type that is meant when none is written: that of the one member whose `type` has a default."""
        defaults = [tag for tag, model in self.tags.items() if model.model_fields[self.tag_key or ""].default == tag]
        return defaults[0] if len(defaults) == 1 else None

    def narrowed(self, tag: object) -> Shape:
        """The member of the union with this type; the whole union when there is none."""
        model = self.tags.get(str(tag))
        return Shape((model,)) if model is not None else self

    def keys(self) -> list[str]:
        """Known keys, of all members of a union."""
        return list(dict.fromkeys(name for model in self.models for name in model.model_fields))

    def below(self, key: str) -> Shape | None:
        """The shape under a key or list index; None when nothing can stand there."""
        parts: list[Shape] = []
        for alternative in self.alternatives:
            origin, arguments = get_origin(alternative), get_args(alternative)
            if alternative is Any:
                parts.append(Shape((Any,)))
            elif isinstance(alternative, type) and issubclass(alternative, BaseModel):
                if key in alternative.model_fields:
                    parts.append(_of_field(alternative.model_fields[key]))
            elif origin is dict:
                parts.append(Shape.of(arguments[1]))
            elif origin is list and index_of(key) is not None:
                parts.append(Shape.of(arguments[0]))
            elif origin is tuple and (index := index_of(key)) is not None and index < len(arguments):
                parts.append(Shape.of(arguments[index]))
        if not parts:
            return None
        tag_key = next((part.tag_key for part in parts if part.tag_key), None)
        return Shape(tuple(a for part in parts for a in part.alternatives), tag_key)

    def find(self, path: tuple[str, ...]) -> Shape | None:
        shape: Shape | None = self
        for key in path:
            shape = shape.below(key) if shape is not None else None
        return shape

    def dotted_paths(self, prefix: str = "") -> Iterator[str]:
        """Every key that can be written, as `--set` takes it; entry 0 stands for a list's entries."""
        for key in self.keys():
            below = self.below(key)
            assert below is not None
            yield prefix + key
            yield from below.dotted_paths(f"{prefix}{key}.")
        for alternative in self.alternatives:
            if get_origin(alternative) is list:
                yield from Shape.of(get_args(alternative)[0]).dotted_paths(f"{prefix}0.")


def _of_field(field: FieldInfo) -> Shape:
    # pydantic lifts the outermost Annotated of a field into its FieldInfo
    return Shape.of(field.annotation, field.discriminator if isinstance(field.discriminator, str) else None)


def did_you_mean(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known word is near."""
    near = get_close_matches(word, known, n=1, cutoff=_CLOSE_ENOUGH) if len(word) <= _LONGEST_KEY else []
    return f"; did you mean '{near[0]}'?" if near else ""


def suggest_key(root: Shape, path: Path) -> str:
    """What to write instead of a path whose last key (or an earlier one) is unknown; empty without a good guess. A name of another
    trainer is known; else it is the nearest key of ours, in the same section first.

    num_generations    -> 'rollout.group_size'   what TRL calls it
    rollout.group_sise -> 'group_size'           a slip within the section: the key alone
    rollout.lr         -> 'optimizer.lr'         right key, wrong section: the whole path
    optim.lrr          -> 'optimizer.lr'
    """
    section = root
    for depth, key in enumerate(path):
        below = section.below(key)
        if below is None and section.alternatives and not section.keys() and depth:
            return f"; did you mean '{'.'.join(path[:depth])}'?"
        if below is None:
            last = depth == len(path) - 1
            near = did_you_mean(key, section.keys()) if last else ""
            return near or _foreign(path[-1]) or _anywhere(root, path) or did_you_mean(key, section.keys())
        section = below
    return ""


def _foreign(key: str) -> str:
    meant = _FOREIGN.get(key, "")
    return f"; it {meant}" if " " in meant else f"; here it is '{meant}'" if meant else ""


def _anywhere(root: Shape, path: Path) -> str:
    """The nearest path of all whose last key is near: sections that are alike make no keys alike."""
    if len(".".join(path)) > 2 * _LONGEST_KEY:
        return ""
    dotted, last = ".".join(path), path[-1]
    best, best_score = "", 0.0
    for candidate in root.dotted_paths():
        below = root.find(tuple(candidate.split(".")))
        if below is not None and below.models:
            continue  # a section is no answer to "which setting?": rollout.zzz would get 'rollout'
        likeness = SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
        score = likeness + SequenceMatcher(None, dotted, candidate).ratio() / 2
        if likeness > _CLOSE_ENOUGH and score > best_score:
            best, best_score = candidate, score
    return f"; did you mean '{best}'?" if best else ""
