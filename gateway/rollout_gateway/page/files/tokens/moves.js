/** Where the keys of the token strip lead. */

/**
 * @param {string} key - as in KeyboardEvent
 * @param {number} token - the selected one
 * @param {{segment: import("page/rollout/model.js").Segment, range: {start: number, stop: number},
 *   cells: () => HTMLElement[]}} place - `range`: what the arrows step over; `cells`: those that are drawn, in order
 * @returns {number|null} the token to which the key moves; null: it is no key of the strip
 */
export function targetOf(key, token, { segment, range, cells }) {
  const { spans } = segment;
  const turns = spans.filter((span, index) => index === 0 || span.turn !== spans[index - 1].turn);
  const step = (list, by) => {
    const at = list.findLastIndex((span) => span.start <= token) + by;
    return list[Math.max(0, Math.min(list.length - 1, at))].start;
  };
  switch (key) {
    case "ArrowRight": return range.stop;
    case "ArrowLeft": return range.start - 1;
    case "ArrowDown": return beside(cells(), token, 1);
    case "ArrowUp": return beside(cells(), token, -1);
    case "Home": return 0;
    case "End": return segment.length - 1;
    case "PageDown": return step(turns, 1);
    case "PageUp": return step(turns, -1);
    case "]": return step(spans, 1);
    case "[": return step(spans, -1);
    default: return null;
  }
}

/** @returns {number} the token above (-1) or below (1) another, as it is drawn */
function beside(cells, token, direction) {
  const here = cells.findIndex(({ dataset }) => token >= Number(dataset.start) && token < Number(dataset.stop));
  if (here < 0) return token;
  const box = cells[here].getBoundingClientRect();
  let best = { token, top: null, distance: Infinity };
  for (let index = here + direction; index >= 0 && index < cells.length; index += direction) {
    const { top, left } = cells[index].getBoundingClientRect();
    if (Math.abs(top - box.top) < box.height / 2) continue;
    if (best.top !== null && Math.abs(top - best.top) > box.height / 2) break;
    const distance = Math.abs(left - box.left);
    if (distance < best.distance) best = { token: Number(cells[index].dataset.start), top, distance };
  }
  return best.token;
}
