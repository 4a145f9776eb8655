"""How an update differs from what a server wants."""

from __future__ import annotations

from grpo_async.weights.buckets import ParameterSpec, check_names

SERVED = {"a": [2, 3], "b": [4]}


def _specs(**shapes: tuple[int, ...]) -> list[ParameterSpec]:
    return [ParameterSpec(name=name, dtype_name="float32", shape=shape) for name, shape in shapes.items()]


def test_what_fits_is_not_mentioned() -> None:
    assert check_names(_specs(a=(2, 3), b=(4,)), SERVED) == []


def test_each_difference_is_a_sentence() -> None:
    """The example of the docstring, with a name too many."""
    assert check_names(_specs(a=(2, 2), c=(1,)), SERVED) == [
        "a has the shape [2, 2], the server's [2, 3]",
        "c is not a parameter of the served model",
        "b is missing",
    ]


def test_a_name_that_comes_twice_is_said_once() -> None:
    assert check_names([*_specs(a=(2, 3), b=(4,)), *_specs(b=(4,))], SERVED) == ["b is sent twice"]


def test_a_tied_head_may_be_sent_or_not_whichever_side_knows_it() -> None:
    fits = _specs(a=(2, 3), b=(4,))
    assert check_names(fits, {**SERVED, "lm_head.weight": [2, 3]}, ["lm_head.weight"]) == []
    assert check_names([*fits, *_specs(**{"lm_head.weight": (2, 3)})], SERVED, ["lm_head.weight"]) == []
    wrong = [*fits, *_specs(**{"lm_head.weight": (9, 3)})]
    assert len(check_names(wrong, {**SERVED, "lm_head.weight": [2, 3]}, ["lm_head.weight"])) == 1


def test_a_server_that_does_not_know_its_parameters_cannot_be_compared() -> None:
    assert check_names(_specs(x=(1,)), {}) == []
