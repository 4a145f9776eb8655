import pytest
from rewards import correct
from tools import price_of

CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "price_of"}}]}
RESULT = {"role": "tool", "content": "35"}


def test_the_last_message_decides():
    right = [CALL, RESULT, {"role": "assistant", "content": "105"}]
    wrong = [CALL, RESULT, {"role": "assistant", "content": "35"}]
    thinks = [CALL, RESULT, {"role": "assistant", "content": "<think>\n3 x 35\n</think>\n\n105"}]
    assert correct([right, wrong, [CALL, RESULT], thinks], answer=["105"] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_the_tool_says_what_is_wrong():
    assert price_of("lamp") == 35
    with pytest.raises(ValueError, match="there is no article 'lamb'"):
        price_of("lamb")
