"""An agent: a loop that calls a model over HTTP. It knows nothing about training."""

import json

import httpx

PRICES = {"lamp": 35, "chair": 80, "table": 210, "shelf": 95, "mirror": 60}
SYSTEM = (
    'Answer with one JSON object alone: {"look_up": ARTICLE} to be told a price, or {"answer": NUMBER} when you know.'
)


async def run(row, client):
    """1.0 where the answer is the row's, 0.1 where there is one, else 0.0.

    Plain httpx here; with `pip install 'grpo-async[agents]'`, `client.openai` is a client of the package openai that is ready.
    """
    url, headers = f"{client.base_url}/chat/completions", {"Authorization": f"Bearer {client.api_key}"}
    messages = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    async with httpx.AsyncClient(timeout=120) as http:
        for _ in range(4):
            answer = await http.post(url, headers=headers, json={"model": client.model, "messages": messages})
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            reply = step(message["content"] or "")
            if not isinstance(reply, str):
                return score(reply, row["answer"])
            messages += [message, {"role": "user", "content": reply}]
    return 0.0


def step(text):
    """The next message to the model, as text; or the final answer, as a number."""
    try:
        asked = json.loads(text)
    except ValueError:
        return "That is not a JSON object."
    if not isinstance(asked, dict):
        return "That is not a JSON object."
    if isinstance(asked.get("answer"), int | float):
        return asked["answer"]
    return str(PRICES.get(str(asked.get("look_up")), f"Articles: {', '.join(PRICES)}"))


def score(answer, gold):
    return 1.0 if answer == float(gold) else 0.1
