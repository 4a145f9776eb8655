"""What the model may call. Its docstring and types describe it to the model."""

PRICES = {"lamp": 35, "chair": 80, "table": 210, "shelf": 95, "mirror": 60}


def price_of(article: str) -> int:
    """Look up the price of an article.

    Args:
        article: name of the article, such as "lamp".
    """
    if article not in PRICES:
        raise ValueError(f"there is no article {article!r}; there are {', '.join(PRICES)}")  # the model reads this
    return PRICES[article]
