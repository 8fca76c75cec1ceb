/** A group of rollouts of one prompt, side by side: rewards, how they ended, and whether they can teach anything. */
import { columnsOf, EMPTY, isUsable } from "page/list/cells.js";
import { clock, count, decimal, fill, h, sum } from "page/dom.js";
import { errorLine, figures, LiveTable, poll, TITLE_CHARACTERS } from "page/list/live.js";
import { contentOf } from "page/rollout/content.js";

const PAGE_SIZE = 1000;
// A group has at most 1,024 rollouts and as many refills. What is larger is a label that many rollouts share.
const MOST_ROLLOUTS = 2048;
// To count trained tokens, the samples of each rollout are read.
const MOST_COUNTED = 64;
const TRAINED = `Tokens with mask 1 in trainable samples; counted in groups of at most ${MOST_COUNTED} rollouts`;

/**
 * @typedef {{rollout: Object, index: number|null, isReplaced: boolean, usable: boolean|null, advantage: number|null}}
 *   Member - `isReplaced`: another rollout was started in its place; `usable`: null while it runs; `advantage`: reward
 *   minus mean
 */

/** @returns {{title: string, element: HTMLElement}} up to date until `signal` is aborted */
export function groupPage(source, id, signal) {
  return { title: `Group ${id.slice(0, 60)}`, element: new Group(source, id, signal).element };
}

class Group {
  constructor(source, id, signal) {
    this.source = source;
    this.id = id;
    this.signal = signal;
    /** @type {Member[]} */
    this.members = [];
    /** @type {Map<string, {trained: number|null, versions: string}>} trained tokens by uid */
    this.samples = new Map();
    this.error = errorLine();
    this.about = h("span");
    this.prompt = h("div.group-prompt", { hidden: true });
    this.figures = figures("Rewards", ["finished", "usable", "mean reward", "std", "min", "max", "mean tokens"]);
    this.signs = h("div.group-signs", { role: "status" });
    this.table = new LiveTable("Rollouts of the group, by index", this._columns(), (member) => member.rollout.uid);
    const title = h("h1.group-title", {}, "Group ", h("bdi.mono", { title: id.slice(0, TITLE_CHARACTERS) }, id));
    const list = h("a", { href: `#/?${new URLSearchParams({ group_id: id })}` }, "show in the list");
    const head = [title, h("p.group-about.quiet", {}, this.about, " · ", list), this.error.element, this.prompt];
    this.element = h("section.group", {}, head, this.figures.element, this.signs, this.table.element);
    this.table.listenToKeys(signal);
    poll(() => this._step(), (error) => this.error.show(error), signal);
  }

  _columns() {
    const trained = (member) => this._trainedCell(member);
    return [
      { name: "index", label: "#", title: "Index in the group", show: ({ index }) => ({ text: String(index ?? "") }) },
      ...memberColumns("state", "uid", "id", "reward"),
      { name: "advantage", label: "− mean", title: "Reward minus the mean of the group", show: advantageCell },
      ...memberColumns("scores", "end", "turns", "tokens"),
      { name: "trained", label: "Trained", title: TRAINED, show: trained },
      { name: "usable", label: "Usable", title: "It completed, or failed in a class that trains", show: usableCell },
      ...memberColumns("duration"),
    ];
  }

  async _step() {
    const [group, rollouts] = await Promise.all([this._group(), this._rollouts()]);
    this.members = membersOf(rollouts, group);
    this._show(group);
    if (this.prompt.hidden && rollouts.length) await this._showPrompt(this.members[0].rollout.uid);
    await this._countTrained();
  }

  /** The group as it was started; null: its rollouts were started one by one and share only the group's id. */
  async _group() {
    if (this.isLabel) return null;
    try {
      return await this.source.group(this.id);
    } catch (error) {
      if (error.status !== 404) throw error;
      // Known for good once there are rollouts.
      this.isLabel = this.members.length > 0;
      return null;
    }
  }

  async _rollouts() {
    const found = [];
    let token = "";
    do {
      const page = await this.source.list({ group_id: this.id, page_size: PAGE_SIZE, page_token: token });
      found.push(...page.rollouts);
      token = page.next_page_token;
    } while (token && found.length < MOST_ROLLOUTS);
    this.hasMore = Boolean(token);
    return found;
  }

  _show(group) {
    const current = this.members.filter((member) => !member.isReplaced);
    const statistics = statisticsOf(current);
    fill(this.about, aboutText(group, this.members, this.hasMore));
    showFigures(this.figures, current, statistics, group);
    const signs = signsOf(current, statistics);
    // An unchanged sign is not announced again.
    if (this.signs.textContent !== signs.join("")) fill(this.signs, signs.map((text) => h("p.group-sign", {}, text)));
    this.table.show(this.members);
    this.table.element.hidden = !this.members.length;
  }

  async _showPrompt(uid) {
    const { spec } = await this.source.rollout(uid, "messages");
    const messages = spec.messages ?? [];
    const message = messages.find((each) => each.role === "user") ?? messages[0];
    const from = [spec.agent, spec.completions?.model || spec.completions?.url].filter(Boolean).join(" · ");
    const content = message ? contentOf(message.content) : "The request has no messages.";
    const body = h("div", { tabIndex: 0, role: "region", "aria-label": "Prompt" }, content);
    fill(this.prompt, h("span.quiet", {}, `Prompt for ${from}`), body).hidden = false;
  }

  /** Count the trained tokens of finished rollouts, one request at a time. */
  async _countTrained() {
    if (this.members.length > MOST_COUNTED) return;
    for (const { rollout } of this.members) {
      if (this.signal.aborted) return;
      if (rollout.state !== "finished" || this.samples.has(rollout.uid)) continue;
      this.samples.set(rollout.uid, trainedOf(await this.source.rollout(rollout.uid, "samples")));
    }
    this.table.show(this.members);
  }

  _trainedCell({ rollout }) {
    const found = this.samples.get(rollout.uid);
    if (!found) return EMPTY;
    if (found.trained === null) return { text: "–", title: "The rollout has no samples." };
    return { text: count(found.trained), title: found.versions && `Policy ${found.versions}` };
  }
}

function memberColumns(...names) {
  return columnsOf(...names).map((column) => ({ ...column, show: (member) => column.show(member.rollout) }));
}

/** @returns {Member[]} sorted by index; those that were replaced before those in their place */
function membersOf(rollouts, group) {
  const indices = new Map(group?.members.map((member) => [member.uid, member.index]));
  const members = rollouts.map((rollout) => ({
    rollout,
    index: indices.get(rollout.uid) ?? rollout.spec.group_index ?? null,
    isReplaced: indices.size > 0 && !indices.has(rollout.uid),
    usable: rollout.outcome ? isUsable(rollout) : null,
    advantage: null,
  }));
  const { mean } = statisticsOf(members.filter((member) => !member.isReplaced));
  for (const member of members) {
    const reward = member.rollout.outcome?.reward ?? null;
    if (reward !== null && !member.isReplaced) member.advantage = reward - mean;
  }
  const order = (member) => member.index ?? Infinity;
  const inTime = (a, b) => (a.rollout.create_time < b.rollout.create_time ? -1 : 1);
  return members.sort((a, b) => (order(a) === order(b) ? inTime(a, b) : order(a) - order(b)));
}

/** Mean, sample standard deviation (divided by n - 1) and bounds of the rewards. NaN if there are too few. */
function statisticsOf(members) {
  const rewards = members.map((member) => member.rollout.outcome?.reward ?? null).filter((each) => each !== null);
  const mean = sum(rewards, (each) => each) / rewards.length;
  const variance = sum(rewards, (each) => (each - mean) ** 2) / (rewards.length - 1);
  const [min, max] = rewards.length ? [Math.min(...rewards), Math.max(...rewards)] : [NaN, NaN];
  return { number: rewards.length, mean, std: rewards.length > 1 ? Math.sqrt(variance) : NaN, min, max };
}

function showFigures({ show }, members, { mean, std, min, max }, group) {
  const finished = members.filter((member) => member.rollout.outcome);
  const generated = sum(finished, ({ rollout }) => rollout.metrics.generated_tokens);
  const shown = (value) => (Number.isNaN(value) ? "–" : decimal(value));
  show("finished", count(finished.length), `of ${count(members.length)}`);
  const needed = group?.min_usable ? `of ${group.min_usable} needed` : "";
  show("usable", count(finished.filter((member) => member.usable).length), needed);
  show("mean reward", shown(mean));
  show("std", shown(std));
  show("min", shown(min));
  show("max", shown(max));
  show("mean tokens", finished.length ? count(Math.round(generated / finished.length)) : "–");
}

/** What is wrong with the group as training data. @returns {string[]} */
function signsOf(members, { number, min, max }) {
  const finished = members.filter((member) => member.rollout.outcome);
  const without = finished.filter((member) => (member.rollout.outcome.reward ?? null) === null).length;
  const soFar = finished.length < members.length ? " so far" : "";
  const signs = [];
  const equal = `Zero advantage: all ${number} rewards${soFar} are ${decimal(min)}.`;
  if (number > 1 && min === max) signs.push(soFar ? equal : `${equal} This group teaches nothing.`);
  const verb = without === 1 ? "has" : "have";
  if (without) signs.push(`${without} of ${finished.length} finished rollouts ${verb} no reward.`);
  return signs;
}

function aboutText(group, members, hasMore) {
  if (!members.length) return "No rollouts of this group: none was started, or the server has dropped them.";
  const parts = [`${hasMore ? "the newest " : ""}${count(members.length)} rollout${members.length === 1 ? "" : "s"}`];
  if (!group) parts.push("started one by one with this group id");
  if (group?.refill) parts.push(`${members.filter((member) => member.isReplaced).length} of ${group.refill} refills`);
  if (group?.result?.early_stop) parts.push("stopped early: enough were usable");
  return [parts.join(" · "), " · started at ", clock(members[0].rollout.create_time)];
}

function advantageCell({ advantage }) {
  if (advantage === null) return EMPTY;
  const kind = advantage > 0 ? "good" : advantage < 0 ? "bad" : "quiet";
  return { text: `${advantage > 0 ? "+" : advantage < 0 ? "−" : ""}${decimal(Math.abs(advantage))}`, kind };
}

function usableCell({ usable, isReplaced }) {
  if (isReplaced) return { text: "replaced", title: "Another rollout was started in its place.", kind: "warn" };
  return usable === null ? EMPTY : { text: usable ? "yes" : "no", kind: usable ? "" : "bad" };
}

function trainedOf({ outcome }) {
  if (!outcome?.samples?.length) return { trained: null, versions: "" };
  const samples = outcome.samples.filter((sample) => sample.trainable !== false);
  const trained = samples.flatMap((sample) => sample.spans).filter((span) => (span.mask_reason ?? null) === null);
  const versions = new Set(trained.map((span) => span.policy_version).filter(Boolean));
  return { trained: sum(trained, (span) => span.stop - span.start), versions: [...versions].join(", ") };
}
