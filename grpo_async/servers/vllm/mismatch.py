"""Whether a weight update fits the model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from grpo_async.weights.buckets import ParameterSpec


def find_mismatches(
    specs: Sequence[ParameterSpec], expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> Iterator[str]:
    """Say how an update differs from the checkpoint that the model was loaded from. A part of a model is refused: vLLM
    fuses layers (q, k, v), and a fused layer that gets one part only computes garbage.

    Args:
        specs: the update.
        expected: name -> shape of the checkpoint's tensors.
        tied: the head shares the embeddings, so it may be present or absent on either side.

    Worked example: expected {"a": (2, 3), "b": (4,)}, update of a with shape (2, 2)
    -> "a has shape [2, 2], the model [2, 3]", "b is missing".
    """
    for spec in specs:
        if spec.name not in expected:
            if not (tied and _is_head(spec.name)):
                yield f"{spec.name} is not a parameter of the model"
        elif spec.shape != tuple(expected[spec.name]):
            yield f"{spec.name} has shape {list(spec.shape)}, the model {list(expected[spec.name])}"
    given = {spec.name for spec in specs}
    if len(given) != len(specs):
        yield "a parameter is given twice"
    for name in expected:
        # some old checkpoints hold rotary tables, which are not parameters
        if name not in given and not (tied and _is_head(name)) and not name.endswith("rotary_emb.inv_freq"):
            yield f"{name} is missing"


def _is_head(name: str) -> bool:
    return name.endswith("lm_head.weight")
