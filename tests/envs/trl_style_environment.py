"""Environments and reward functions as people write them for TRL's GRPOTrainer; nothing here knows of this package."""


class FakeClient:
    """Stands for the client of an environment's server."""

    def __init__(self, base_url):
        self.base_url = base_url
        self.is_open = True

    def step(self, message):
        return message, len(message) / 10

    def close(self):
        self.is_open = False


class EchoToolEnv:
    def __init__(self):
        self.client = FakeClient(base_url="http://localhost:8001")
        self.reward = 0.0

    def reset(self, **kwargs) -> None | str:  # noqa: RUF036 - as the documentation writes it
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        answer, self.reward = self.client.step(message)
        return answer


class WordleEnv:
    def __init__(self):
        self.client = FakeClient(base_url="http://localhost:8002")

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


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


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
