"""A game of several turns, in the form that TRL's environment_factory takes."""

from itertools import zip_longest


class WordGame:
    """The model guesses a hidden word and is told which letters are in their place. Every rollout has its own instance."""

    def __init__(self, max_guesses: int = 6):
        self.max_guesses = max_guesses

    def reset(self, word: str, **_) -> str:
        """Begin a game; gets the columns of the row. What it returns is added to the prompt, which is empty in data.jsonl."""
        self.word, self.guesses = word, []
        return f"Find the word that I have in mind. It has {len(word)} letters. You have {self.max_guesses} guesses."

    def guess(self, word: str) -> str:
        """Guess the hidden word.

        Args:
            word: your guess.
        """
        self.guesses.append(word.lower())
        if self.guesses[-1] == self.word:
            return "correct"
        shown = "".join(
            own if own == theirs else "-" for own, theirs in zip_longest(self.word, word.lower()[: len(self.word)])
        )
        return f"no: {shown}"

    def is_done(self) -> bool:
        return self.word in self.guesses or len(self.guesses) >= self.max_guesses

    def get_reward(self) -> float:
        """1.0 for the word, less for each guess that it took; a part of 0.5 for letters in their place."""
        if self.word in self.guesses:
            return 1.0 - 0.05 * (len(self.guesses) - 1)
        places = [sum(own == theirs for own, theirs in zip_longest(self.word, guess)) for guess in self.guesses]
        return 0.5 * max(places, default=0) / len(self.word)
