/* Asks the server. A failed answer is an ApiError with the server's words, and, for a query, the place of the mistake. */

export class ApiError extends Error {
  constructor(status, body) {
    super(body.error || `the server answered ${status}`);
    this.status = status;
    this.position = body.position;
    this.length = body.length;
    this.suggestions = body.suggestions || [];
  }
}

export async function get(name, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) {
      query.set(key, value === true ? "1" : String(value));
    }
  }
  const tail = query.toString();
  const answer = await ask(`api/${name}${tail ? `?${tail}` : ""}`, { signal, credentials: "same-origin" });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    throw new ApiError(answer.status, body);
  }
  return body;
}

async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ApiError(0, { error: "the inspector does not answer: was it ended? Start it again: grpo-async inspect-rollouts RUN --web" });
  }
}

/** The token for a cookie; false: it is wrong. */
export async function openSession(token) {
  const answer = await ask("api/session", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
  return answer.ok;
}
