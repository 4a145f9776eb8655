from rewards import correct


def says(text):
    return [{"role": "assistant", "content": text}]


def test_the_last_box_decides_by_its_value():
    completions = [says(r"\boxed{1} so \boxed{0.3}"), says(r"\boxed{3/10}"), says("3/10"), says(r"\boxed{3}")]
    assert correct(completions, answer=["3/10"] * 4) == [1.0, 1.0, 0.0, 0.0]
