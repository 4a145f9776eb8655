"""Environments and reward functions as people write them for TRL's GRPOTrainer; nothing here knows of this package."""


class WordleEnv:
    def reset(self, word="crane", **kwargs) -> str | None:
        self._word = word
        self.reward = 0.0
        self.done = False
        self.tries = 0
        return "You have 6 tries to guess a word of 5 letters."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        letters = guess.strip("[]")
        self.tries += 1
        self.reward = float(letters == self._word)
        self.done = self.reward == 1.0 or self.tries == 6
        return self._feedback(letters)

    def _feedback(self, letters):
        marks = ["G" if a == b else "Y" if a in self._word else "X" for a, b in zip(letters, self._word, strict=False)]
        return f"{' '.join(letters.upper())}\n{' '.join(marks)}"


class IncrementEnv:
    # Reserved methods
    def reset(self, target, **kwargs) -> str:
        self.counter = 0
        self.target = target
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def only_wordle(environments, **kwargs) -> list[float | None]:
    return [env.reward if isinstance(env, WordleEnv) else None for env in environments]


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b
