from rewards import brief, correct


def says(text):
    return [{"role": "assistant", "content": text}]


def test_the_last_line_decides():
    completions = [says("Let me think.\nParis."), says("Paris?\nNo, Rome"), says("")]
    assert correct(completions, answer=["Paris"] * 3) == [1.0, 0.0, 0.0]


def test_a_short_answer_earns_more_than_a_long_one():
    short, long = brief([says("Paris"), says("word " * 200)])
    assert short > 0.9
    assert long == 0.0
