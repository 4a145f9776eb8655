"""Do the parameters of the trainer fit the model that a server serves? Pure; used at both ends.

The trainer asks before the first push, a server before it loads an update. A part of a model is refused too: vLLM fuses
layers (q, k, v), and a fused layer that gets one part only computes garbage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from grpo_async.weights.buckets import ParameterSpec


def check_names(
    specs: Sequence[ParameterSpec], served_shapes: Mapping[str, Sequence[int]], optional: Collection[str] = ()
) -> list[str]:
    """One sentence per difference; [] when the update fits, or when the server does not know its parameters.

    Args:
        specs: what is sent.
        served_shapes: name -> shape of what the server wants, empty when it cannot know (surface.ServedParameters).
        optional: names that may be sent or not (a head that is tied to the embeddings).

    Worked example: served {"a": (2, 3), "b": (4,)}, sent a with shape (2, 2)
    -> "a has the shape [2, 2], the server's [2, 3]", "b is missing".
    """
    if not served_shapes:
        return []
    problems = []
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            problems.append(f"{spec.name} is sent twice")
            continue
        seen.add(spec.name)
        if spec.name not in served_shapes:
            if spec.name not in optional:
                problems.append(f"{spec.name} is not a parameter of the served model")
        elif list(spec.shape) != list(served_shapes[spec.name]):
            problems.append(
                f"{spec.name} has the shape {list(spec.shape)}, the server's {list(served_shapes[spec.name])}"
            )
    problems.extend(f"{name} is missing" for name in served_shapes if name not in seen and name not in optional)
    return problems
