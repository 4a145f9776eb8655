/* Differences between two texts by words: Myers' shortest edit script, with common ends cut off first. */

const MOST_EDITS = 3000; // beyond that the middle counts as replaced as a whole

/** Pieces of both texts in order: [{kind: "same" | "left" | "right", text}]; neighbours of one kind are joined.

   diff("a b c", "a x c") -> same "a ", left "b", right "x", same " c". */
export function diff(left, right) {
  const [a, b] = [words(left), words(right)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) {
    start += 1;
  }
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) {
    end += 1;
  }
  const middle = edits(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const pieces = [["same", a.slice(0, start)], ...middle, ["same", a.slice(a.length - end)]]
    .map(([kind, parts]) => ({ kind, text: parts.join("") }))
    .filter((piece) => piece.text !== "");
  return join(pieces);
}

/** Neighbours of one kind as one piece; a space between two changes belongs to the change. */
function join(pieces) {
  const joined = [];
  let change = { left: "", right: "" };
  const flush = () => {
    for (const kind of ["left", "right"]) {
      if (change[kind]) {
        joined.push({ kind, text: change[kind] });
      }
    }
    change = { left: "", right: "" };
  };
  pieces.forEach((piece, index) => {
    const next = pieces[index + 1];
    const isWithin = (change.left || change.right) && next && next.kind !== "same" && /^\s+$/.test(piece.text);
    if (piece.kind !== "same") {
      change[piece.kind] += piece.text;
    } else if (isWithin) {
      change.left += piece.text;
      change.right += piece.text;
    } else {
      flush();
      const last = joined[joined.length - 1];
      if (last && last.kind === "same") {
        last.text += piece.text;
      } else {
        joined.push({ ...piece });
      }
    }
  });
  flush();
  return joined;
}

/** Words, runs of spaces and single signs. */
export function words(text) {
  return text.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) || [];
}

function edits(a, b) {
  if (a.length === 0 || b.length === 0) {
    return [["left", a], ["right", b]];
  }
  const most = Math.min(a.length + b.length, MOST_EDITS);
  const trace = [];
  let reached = new Map([[1, 0]]);
  for (let d = 0; d <= most; d += 1) {
    trace.push(new Map(reached));
    for (let k = -d; k <= d; k += 2) {
      const isDown = k === -d || (k !== d && reached.get(k - 1) < reached.get(k + 1));
      let x = isDown ? reached.get(k + 1) : reached.get(k - 1) + 1;
      let y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) {
        x += 1;
        y += 1;
      }
      reached.set(k, x);
      if (x >= a.length && y >= b.length) {
        return walkBack(trace, a, b, d);
      }
    }
    if (trace.length * reached.size > 1_500_000) {
      break;
    }
  }
  return [["left", a], ["right", b]];
}

function walkBack(trace, a, b, length) {
  const steps = [];
  let [x, y] = [a.length, b.length];
  for (let d = length; d > 0; d -= 1) {
    const reached = trace[d];
    const k = x - y;
    const isDown = k === -d || (k !== d && reached.get(k - 1) < reached.get(k + 1));
    const before = isDown ? k + 1 : k - 1;
    const fromX = reached.get(before);
    const fromY = fromX - before;
    while (x > fromX && y > fromY) {
      steps.push(["same", [a[x - 1]]]);
      x -= 1;
      y -= 1;
    }
    steps.push(isDown ? ["right", [b[y - 1]]] : ["left", [a[x - 1]]]);
    [x, y] = [fromX, fromY];
  }
  while (x > 0) {
    steps.push(["same", [a[x - 1]]]);
    x -= 1;
  }
  return steps.reverse();
}
