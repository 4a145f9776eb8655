/* Every view has an address: #/rollouts?run=NAME&q=reward<0.2&sort=-reward. */

export const DEFAULT_VIEW = "groups";

export function current() {
  const hash = location.hash.replace(/^#\/?/, "");
  const cut = hash.indexOf("?");
  const view = (cut < 0 ? hash : hash.slice(0, cut)) || DEFAULT_VIEW;
  const parameters = Object.fromEntries(new URLSearchParams(cut < 0 ? "" : hash.slice(cut + 1)));
  return { view, parameters };
}

export function address(view, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) {
      query.set(key, value === true ? "1" : String(value));
    }
  }
  const tail = query.toString();
  return `#/${view}${tail ? `?${tail}` : ""}`;
}

/** A rollout as one parameter: "run:seq:id". `seq` of its group tells one from another of the same id, which a resume left behind. */
export function place(run, id, seq) {
  return `${run}:${seq}:${id}`;
}

/** Of `place`, or of "run:id" as a person writes it; an id holds no colon. */
export function placed(value) {
  const found = /^(.*?):(?:(\d+):)?([^:]*)$/s.exec(value || "");
  return found ? { run: found[1], seq: found[2], id: found[3] } : {};
}

export function go(view, parameters) {
  location.hash = address(view, parameters);
}

/** The same view with other parameters, without a new entry in the history and without drawing it anew. */
export function note(view, parameters) {
  history.replaceState(null, "", address(view, parameters));
}
