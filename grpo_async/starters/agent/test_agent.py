from agent import score, step


def test_a_price_is_told_and_an_answer_ends_it():
    assert step('{"look_up": "lamp"}') == "35"
    assert step('{"look_up": "lamb"}').startswith("Articles: lamp")
    assert step("three lamps") == "That is not a JSON object."
    assert step('{"answer": 105}') == 105


def test_the_right_answer_pays_most():
    assert score(105, "105") == 1.0
    assert score(35, "105") == 0.1
