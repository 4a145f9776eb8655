from rewards import in_a_block


def says(text):
    return [{"role": "assistant", "content": text}]


def test_a_block_alone_pays():
    assert in_a_block([says("```python\nx = 1\n```"), says("Sure!\n```python\nx = 1\n```")]) == [1.0, 0.0]
    assert in_a_block([says("<think>\nhm\n</think>\n\n```python\nx = 1\n```")]) == [1.0]
    assert in_a_block([says("```python\nx = 1\n```\nor\n```python\nx = 2\n```")]) == [0.0]
