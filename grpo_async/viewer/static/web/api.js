/* Requests to the server, or in a report to the answers that stand in the page, and addresses of views. A failed answer is an ApiError with the server's message. Every view has an address: #/rollouts?run=NAME&q=reward<0.2&sort=-reward. */

export const DEFAULT_VIEW = "home";

export class ApiError extends Error {
  constructor(status, body) {
    super(body.error || `the server answered ${status}`);
    this.status = status;
  }
}

/** "?a=1&b=x" without what is null, false or empty; true is 1. */
function queryString(parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) {
      query.set(key, value === true ? "1" : String(value));
    }
  }
  return query.size ? `?${query}` : "";
}

const written = document.getElementById("report");

/** What a report has instead of a server: {made, folder, answers: [[view, parameters, answer, why not]]}; null: there is a server. A
    list has one answer, which is all that the report has of it. */
export const report = written && JSON.parse(written.textContent);

const question = (name, { offset, limit, ...parameters }) => {
  const query = new URLSearchParams(queryString(parameters));
  query.sort();
  return `${name}?${query}`;
};
const answers = new Map((report?.answers ?? []).map(([name, parameters, answer, why]) => [question(name, parameters), { why, answer }]));

/** Whether there is an answer: a report has a sample. */
export function isKnown(name, { run, id, seq } = {}) {
  return !report || answers.has(question(name, { run, id, seq }));
}

function answerInPage(name, parameters) {
  const { why, answer } = answers.get(question(name, parameters)) || { why: "The report does not have this. Where the run is: grpo-async inspect" };
  if (why) {
    throw new ApiError(404, { error: why });
  }
  return answer;
}

export async function get(name, parameters = {}, signal = undefined) {
  if (report) {
    return answerInPage(name, parameters);
  }
  let answer;
  let body;
  try {
    answer = await ask(`api/${name}${queryString(parameters)}`, signal);
    body = await (answer.ok ? answer.json() : answer.json().catch(() => ({}))); // that of an error may be another server's page
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ApiError(0, { error: "the inspector is not responding; if it has stopped, start it again: grpo-async inspect" });
  }
  if (!answer.ok) {
    throw new ApiError(answer.status, body);
  }
  return body;
}

/** A request with the token, which is kept for further tabs of this origin. */
function ask(path, signal) {
  return fetch(path, { signal, headers: { Authorization: `Bearer ${encodeURIComponent(memory.get("token"))}` } });
}

/** Keeps a file of the server's; a link to it would lack the token. */
export async function download(path, name) {
  const answer = await ask(path);
  const address = URL.createObjectURL(await answer.blob());
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}

export function current(hash = location.hash) {
  const [view, ...rest] = hash.replace(/^#\/?/, "").split("?");
  return { view: view || DEFAULT_VIEW, parameters: Object.fromEntries(new URLSearchParams(rest.join("?"))) };
}

export function address(view, parameters = {}) {
  return `#/${view}${queryString(parameters)}`;
}

export function go(view, parameters) {
  location.hash = address(view, parameters);
}

/** The same view with other parameters, without a new entry in the history and without drawing it again. */
export function note(view, parameters) {
  history.replaceState(null, "", address(view, parameters));
}

/** Names of runs as one parameter, with commas between; null: none. */
export function joined(names) {
  return names.map((name) => name.replace(/[%,]/g, encodeURIComponent)).join(",") || null;
}

/** The names in such a parameter. */
export function split(names) {
  return names ? names.split(",").map(decodeURIComponent) : [];
}

/** The address of the report of a run. */
export function reportAddress(run) {
  return `api/report${queryString({ run })}`;
}

/** What was chosen last, also in other runs and after the next start. */
export const memory = {
  get: (name) => stored(() => localStorage.getItem(`grpo-async ${name}`)) ?? "",
  set: (name, value) => stored(() => localStorage.setItem(`grpo-async ${name}`, value)),
};

function stored(work) {
  try {
    return work();
  } catch {
    return null; // a browser that stores nothing
  }
}
