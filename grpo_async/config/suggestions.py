"""What an unknown key was meant to be: a name of another trainer, else the nearest key of ours, in the same section first.

num_generations    -> 'rollout.group_size'   what TRL calls it
rollout.group_sise -> 'group_size'           a slip within the section: the key alone
rollout.lr         -> 'optimizer.lr'         right key, wrong section: the whole path
optim.lrr          -> 'optimizer.lr'
"""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches

from grpo_async.config.shape import Shape
from grpo_async.config.tree import Path

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


def did_you_mean(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known word is near."""
    near = get_close_matches(word, known, n=1, cutoff=_CLOSE_ENOUGH) if len(word) <= _LONGEST_KEY else []
    return f"; did you mean '{near[0]}'?" if near else ""


def suggest_key(root: Shape, path: Path) -> str:
    """What to write instead of a path whose last key (or an earlier one) is unknown; empty without a good guess."""
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
