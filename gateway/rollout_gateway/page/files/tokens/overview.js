/** A bar that shows a whole segment at once: who wrote which part of it, and where it drifts. */
import { fill, svg } from "page/dom.js";
import { KINDS, kindOf } from "page/tokens/texts.js";

/** The width of a drift's mark, as a part of the bar. */
const MARK = 1 / 300;

/**
 * @param {(part: number) => void} go - called with the place of a click, from 0 to 1
 * @returns {{element: SVGElement,
 *   draw: (segment: import("page/rollout/model.js").Segment|null, drifts: {index: number}[]) => void}}
 */
export function tokenOverview(go) {
  // The keys Home, End, Page Up and Page Down do the same for those who use no pointer.
  const element = svg("svg", { class: "tokens-overview", preserveAspectRatio: "none", "aria-hidden": "true" });
  element.addEventListener("click", (event) => {
    const { left, width } = element.getBoundingClientRect();
    go((event.clientX - left) / width);
  });
  const draw = (segment, drifts) => {
    const length = segment?.length ?? 0;
    const rect = (name, x, width) => svg("rect", { class: `tokens-${name}`, x, y: 0, width, height: 1 });
    const spans = (segment?.spans ?? []).map((span) => rect(KINDS[kindOf(span)].name, span.start, span.ids.length));
    fill(element, spans, drifts.map((drift) => rect("drift", drift.index, length * MARK)));
    element.setAttribute("viewBox", `0 0 ${Math.max(1, length)} 1`);
  };
  return { element, draw };
}
