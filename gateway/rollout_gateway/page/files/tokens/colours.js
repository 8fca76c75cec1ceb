/** What the colours of the token strip show: the class of each token, and the legend. */
import { count, decimal } from "page/dom.js";
import { KINDS, kindOf } from "page/tokens/texts.js";

/**
 * @typedef {import("page/rollout/model.js").Segment} Segment
 * @typedef {import("page/rollout/model.js").Span} Span
 * @typedef {{name: string|null, key?: string, text: string, why?: string}} Row - `name`: class; `key`: letter
 * @typedef {{name: string, shader: (segment: Segment) => (span: Span, index: number) => string|null,
 *   legend: (segment: Segment) => Row[]}} Colouring - `index`: of the token in the segment
 */

const HUES = 6;
/** Lower bounds of the probability of the classes 0 (most likely) to 9. */
const HEAT = [0.99, 0.95, 0.9, 0.8, 0.65, 0.5, 0.3, 0.1, 0.01, 0];

/** @type {Object<string, Colouring>} */
export const COLOURINGS = {
  author: { name: "who wrote it", shader: () => () => "tokens-by-author", legend: authorRows },
  logprob: { name: "logprob", shader: () => heat, legend: logprobRows },
  policy: { name: "policy", shader: policyShader, legend: policyRows },
  turn: { name: "turn", shader: () => (span) => hue(span.turn), legend: turnRows },
};

function hue(number) {
  return `tokens-hue-${number % HUES}`;
}

function heat(span, index) {
  const logprob = span.author === "model" ? span.logprobs?.[index - span.start] : undefined;
  if (logprob === undefined) return null;
  const found = HEAT.findIndex((bound) => Math.exp(logprob) >= bound);
  return `tokens-heat-${found < 0 ? HEAT.length - 1 : found}`;
}

function policyOf(span) {
  const version = span.policyVersion || "unknown version";
  return span.policyStep === null ? version : `${version}, step ${span.policyStep}`;
}

function policyShader(segment) {
  const order = [...sums(sampled(segment), policyOf).keys()];
  return (span) => (span.author === "model" ? hue(order.indexOf(policyOf(span))) : null);
}

/** The numbers of tokens by a property of their spans, in the order of the first tokens. */
function sums(spans, property) {
  const found = new Map();
  for (const span of spans) found.set(property(span), (found.get(property(span)) ?? 0) + span.ids.length);
  return found;
}

function sampled({ spans }) {
  return spans.filter((span) => span.author === "model");
}

function authorRows(segment) {
  const found = sums(segment.spans, kindOf);
  const shown = Object.entries(KINDS).filter(([kind]) => kind === "M" || found.get(kind));
  return shown.map(([kind, { name, why }]) => {
    const text = `${name}${kind === "M" ? ", trains" : ""} ${count(found.get(kind) ?? 0)}`;
    return { name: `tokens-${name}`, key: kind, text, why };
  });
}

function logprobRows(segment) {
  const known = sums(sampled(segment), (span) => span.logprobs !== null);
  if (!known.get(true)) return [{ name: null, text: "The trainer sent no logprobs for this segment." }];
  const text = (bound) => (bound ? `p ≥ ${decimal(bound)}` : "less");
  const rows = HEAT.map((bound, index) => ({ name: `tokens-heat-${index}`, text: text(bound) }));
  if (known.has(false)) rows.push({ name: null, text: `${count(known.get(false))} model tokens have no logprob` });
  return rows;
}

function policyRows(segment) {
  const row = ([policy, tokens], index) => ({ name: hue(index), text: `${policy}: ${count(tokens)}` });
  return [...sums(sampled(segment), policyOf)].map(row);
}

function turnRows(segment) {
  const turns = [...new Set(segment.spans.map((span) => span.turn))];
  const rows = turns.slice(0, HUES).map((turn) => ({ name: hue(turn), text: `turn ${turn}` }));
  if (turns.length > HUES) rows.push({ name: null, text: `… ${count(turns.length)} turns; colours repeat` });
  return rows;
}
