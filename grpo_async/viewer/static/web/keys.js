/* Keys: one table of the page and one of the view. Not while somebody writes, and none with Ctrl, Alt or the command key. */

export function startKeys(table) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented || isWriting(event.target)) {
      return;
    }
    const act = table()[event.key];
    if (act && act(event) !== false) {
      event.preventDefault();
    }
  });
}

function isWriting(element) {
  return element.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(element.tagName);
}
