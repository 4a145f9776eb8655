from environment import WordGame


def play(*guesses):
    game = WordGame(max_guesses=3)
    game.reset(word="apple")
    return game, [game.guess(guess) for guess in guesses]


def test_the_word_ends_the_game_and_pays_most():
    game, said = play("angle", "apple")
    assert said == ["no: a--le", "correct"]
    assert game.is_done()
    assert game.get_reward() == 0.95


def test_letters_pay_a_little_and_guesses_run_out():
    game, _ = play("angle", "house", "grape")
    assert game.is_done()
    assert game.get_reward() == 0.5 * 3 / 5
