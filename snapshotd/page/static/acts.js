// What can be done from the page. Each act says what it will do before it does it.
import { count, html, line, short, view, signal } from "./dom.js";
import { at, get, send, tree } from "./api.js";
import { Command, ask, attempt, dialog, environment, quoted } from "./dialog.js";
import { current, find, go, nameOf, overview, say } from "./state.js";
import { inspected } from "./inspector.js";
import { log } from "./ledger.js";
import { parse } from "./json.js";
import { saved } from "./saved.js";
import { spoken } from "./log.js";
import { Patch } from "./text.js";

/** @typedef {Api.SnapshotInfo} Snapshot */
/** @typedef {Api.TrajectoryInfo} Trajectory */
/** @typedef {{name: string, key: string, main?: boolean, more?: boolean, run: () => unknown}} Act */

/**
 * The acts on a snapshot, or on the trajectory that is looked at. `more`: those that stand in the menu.
 * @returns {Act[]}
 */
export function acts(/** @type {Snapshot | null} */ one) {
  const shown = current.value, of = shown?.trajectory;
  const tree = of ? [{ name: "Tree", key: "v", run: () => go(["tree", nameOf(of)]) }] : [];
  if (saved) return one ? [] : tree;
  if (one)
    return [
      { name: "Fork from here", key: "f", main: true, run: () => fork(one) },
      { name: "Rewind", key: "r", run: () => rewind(one) },
      { name: "Compare", key: "c", run: () => choose() },
      { name: "Terminal", key: "x", run: () => go(["terminal", one.id]) },
      { name: "Tag", key: "t", more: true, run: () => tag(one) },
      { name: "Restore", key: "d", more: true, run: () => restore(one) },
      { name: "Apply", key: "p", more: true, run: () => apply(one) },
      { name: "Experiment", key: "e", more: true, run: () => go(["experiments", "new", one.id, ...(of?.name ? [of.name] : [])]) },
    ];
  if (!of) return [];
  const found = /** @type {Act[]} */ ([]);
  if (of.status === "running") found.push({ name: "Stop", key: "s", run: () => stop(of) });
  else if (of.agent && of.status !== "finished") found.push({ name: "Resume", key: "s", run: () => resume(of) });
  if (shown.origin) found.push({ name: "Promote", key: "m", run: () => promote(shown) });
  if (undoes(shown)) found.push({ name: "Undo", key: "u", run: () => undo(of) });
  found.push({ name: "Compare", key: "c", run: () => choose() }, ...tree);
  return found;
}

/** What `undo` takes back. */
const UNDOABLE = ["rewind", "undo", "retry", "promote", "merge"];

/** True if the last thing that was done to a trajectory can be taken back. An agent may have a tool of such a name; in a folder, other records of the daemon may have followed. */
function undoes(/** @type {Api.OverviewInfo} */ { trajectory, newest }) {
  for (let one = newest, rows = log.value?.rows; one; one = trajectory.runtime === "folder" ? rows?.get(one.seq - 1) ?? null : null) {
    const { kind = null } = rows?.get(one.seq) ?? one;
    if (kind === "call") return false;
    if (UNDOABLE.includes(one.tool.name)) return true;
  }
  return false;
}

/** Run the act that a key stands for: on the call that is looked at, else on its trajectory. True if there is one. */
export function press(/** @type {string} */ key) {
  const act = [...acts(inspected.value), ...acts(null)].find((one) => one.key === key);
  act?.run();
  return act !== undefined;
}

/** The buttons of acts; the rarer ones in a menu. */
export const Acts = view(() => {
  const open = signal(false);
  const leave = (/** @type {FocusEvent} */ event) => /** @type {HTMLElement} */ (event.currentTarget).contains(/** @type {Node | null} */ (event.relatedTarget)) || (open.value = false);
  const close = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape" || !open.value) return;
    event.stopPropagation();  // the call that is looked at stays
    /** @type {HTMLElement} */ (event.currentTarget).querySelector("button")?.focus();
    open.value = false;
  };
  const button = (/** @type {Act} */ { name, key, main, run }) => html`<button class=${main ? "main" : ""} title=${`${name} (${key})`} onClick=${() => ((open.value = false), run())}>${name} <kbd>${key}</kbd></button>`;
  return (/** @type {{of: Snapshot | null}} */ { of }) => {
    const all = acts(of), rest = all.filter(({ more }) => more);
    return html`<div class="acts">${all.filter(({ more }) => !more).map(button)}
      ${rest.length ? html`<span class="more" onKeyDown=${close} onFocusOut=${leave}><button aria-expanded=${open.value} aria-label="More acts" onClick=${() => (open.value = !open.value)}>More</button>
        ${open.value ? html`<span class="menu">${rest.map(button)}</span>` : null}</span>` : null}</div>`;
  };
});

async function fork(/** @type {Snapshot} */ one) {
  const of = current.value?.trajectory, program = of?.agent;
  const last = one.messages ? (await get(at`/snapshots/${one.id}/conversation`, { start: one.messages - 1, count: 1 }).catch(() => []))[0] : null;
  const args = program ? program.argv.slice(program.program) : [];
  const isFunction = one.tool.exit_code === null && one.tool.status === "done" && one.seq > 0;
  ask({
    title: `Fork from call ${one.seq}`,
    text: `New sandboxes begin with the files, the conversation and the state of ${short(one.id)}. This trajectory stays as it is.`,
    fields: [
      { name: "message", label: "Say this to the agent first", kind: "area" },
      ...(last ? [{ name: "instead", label: `In place of the last message: “${line(spoken(last) || last.role, 60)}”`, kind: /** @type {const} */ ("check") }] : []),
      ...(isFunction ? [{ name: "result", label: "Result of this call, as JSON", kind: /** @type {const} */ ("area"), hint: "as it was recorded" }] : []),
      { name: "env", label: "Environment, one NAME=VALUE a line", kind: "area" },
      ...(program ? [{ name: "args", label: "Arguments of the program, one a line", kind: /** @type {const} */ ("area"), value: args.join("\n") }] : []),
      { name: "name", label: "Name", value: unused(`${nameOf(of ?? { id: one.trajectory, name: null })}-fork`) },
      { name: "n", label: "Number of forks", value: "1", kind: "number" },
      ...(program ? [{ name: "resume", label: "Let the agent go on at once", kind: /** @type {const} */ ("check"), value: "yes" }] : []),
    ],
    button: "Fork",
    run: ({ n, name, message, instead, result, args: given = "", env, resume }) => {
      const values = environment(env), edit = /** @type {Api.EditFields} */ ({});
      if (message) edit.add_messages = [{ role: "user", content: message }];
      if (instead === "yes") edit.drop_messages = 1;
      if (result) edit.result = parsed(result);
      const variant = { env: values, ...(Object.keys(edit).length ? { edit } : {}) };
      const changed = Object.keys(values).length || variant.edit;
      const body = /** @type {Api.ForkRequest} */ ({
        ...(changed ? { variants: Array.from({ length: Number(n) }, (_, i) => ({ label: String(i), ...variant, ...(name && n === "1" ? { name } : {}) })) } : { n: Number(n) }),
        ...(given.trim() !== args.join("\n").trim() ? { args: given.split("\n").filter(Boolean) } : {}),
        name: name || null, resume: resume === "yes",
      });
      return attempt(() => /** @type {Promise<Api.ForkInfo>} */ (send("POST", at`/snapshots/${one.id}/fork`, body)), ({ trajectories }) => `forked: ${trajectories.map(nameOf).join(", ")}`)
        .then((made) => made && go(["t", nameOf(made.trajectories[0])]));
    },
  });
}

/** The name, or the first one like it that no trajectory has. */
function unused(/** @type {string} */ name) {
  let found = name;
  for (let i = 2; find(found); i++) found = `${name}-${i}`;
  return found;
}

function parsed(/** @type {string} */ text) {
  try {
    return /** @type {unknown} */ (parse(text));
  } catch {
    throw new Error("the result is no JSON; a text stands in double quotes");
  }
}

const SIGNS = { added: "+", changed: "~", deleted: "−" };

async function rewind(/** @type {Snapshot} */ one) {
  const of = current.value?.trajectory;
  if (!of) return;
  let preview;
  try {
    preview = /** @type {Api.RewindPreview} */ (await get(at`/trajectories/${of.id}/rewind`, { to: one.id }));
  } catch (error) {
    return say(error);
  }
  const { changes, effects, untouched } = preview;
  ask({
    title: `Rewind ${nameOf(of)} to call ${one.seq}`,
    text: html`<p>Files, conversation and state go back to ${short(one.id)}. What came after it stays in the log, and “Undo” brings it back.</p>
      <p>${count(preview.change_count, "file")} would change, ${count(preview.messages.length, "message")} would go.</p>
      ${effects.length ? html`<p class="warn">${effects.length} irreversible call${effects.length === 1 ? " is" : "s are"} not taken back: ${line(effects.map(({ name }) => name).join(", "))}</p>` : null}
      ${untouched.map((text) => html`<p class="warn">${line(text)}</p>`)}
      ${changes.length ? html`<pre class="preview">${changes.slice(0, 200).map(({ change, path }) => `${SIGNS[change]} /${line(path)}`).join("\n")}</pre>` : null}`,
    button: "Rewind",
    run: () => attempt(() => send("POST", at`/trajectories/${of.id}/rewind`, { to: one.id }), `${nameOf(of)} is back at call ${one.seq}`),
  });
}

function tag(/** @type {Snapshot} */ one) {
  ask({
    title: `Tag call ${one.seq}`, text: "A tag is a name for this snapshot, and keeps its files.", button: "Tag",
    fields: [{ name: "name", label: "Name" }, { name: "move", label: "Take it away from the snapshot that has it", kind: "check" }],
    run: ({ name, move }) => {
      if (!/^[A-Za-z0-9][\w.-]{0,63}$/.test(name)) throw new Error("a name has up to 64 letters, digits and ._- and begins with a letter or digit");
      return attempt(() => send("PUT", at`/tags/${name}`, { ref: one.id, move: move === "yes" }), `${short(one.id)} is ${name}`);
    },
  });
}

function restore(/** @type {Snapshot} */ one) {
  ask({
    title: `Files of call ${one.seq}`,
    text: html`<p>All files of the sandbox as they were, as one tar:</p>
      <p><a class="button" href=${tree(one.id)} download=${`${short(one.id)}.tar`}>Download ${short(one.id)}.tar</a></p>
      <p>Or into a folder of the machine that runs snapshotd:</p><${Command} text=${`snapshotd restore ${short(one.id)} --path /workspace --to ./${short(one.id)}`}/>`,
  });
}

/** The snapshot that an apply begins at: the first one of the trajectory that all came from. */
async function beginning(/** @type {Snapshot} */ one) {
  let root = find(one.trajectory);
  while (root?.origin) root = find(root.origin.trajectory);
  const [first] = /** @type {Snapshot[]} */ (await get(at`/trajectories/${root?.trajectory.id ?? one.trajectory}/log`, { last: 1, before: 1 }));
  return first;
}

async function apply(/** @type {Snapshot} */ one) {
  const base = await beginning(one).catch(say);
  if (!base) return;
  ask({
    title: `Apply call ${one.seq} to a folder`, wide: true,
    text: html`<p>This is what the sandbox changed below /workspace since ${short(base.id)}. An apply brings it to a folder of yours, merges
        texts that the folder has changed by lines, and writes nothing where both exclude each other. It runs on the command line:</p>
      <${Command} text=${`snapshotd apply ${quoted(short(one.id))} --to . --dry-run`}/>
      <div class="body framed"><${Patch} a=${base.id} b=${one.id}/></div>`,
  });
}

const stop = (/** @type {Trajectory} */ of) => ask({
  title: `Stop ${nameOf(of)}`, text: "Its sandbox ends after a last snapshot. It can be resumed.", button: "Stop",
  run: () => attempt(() => send("POST", at`/trajectories/${of.id}/stop`), `${nameOf(of)} has stopped`),
});

const resume = (/** @type {Trajectory} */ of) => ask({
  title: `Resume ${nameOf(of)}`, text: "Its agent goes on where it stopped.", button: "Resume",
  run: () => attempt(() => send("POST", at`/trajectories/${of.id}/resume`, {}), `${nameOf(of)} goes on`),
});

const undo = (/** @type {Trajectory} */ of) => ask({
  title: "Undo", text: `Take the last rewind, promotion or merge of ${nameOf(of)} back.`, button: "Undo",
  run: () => attempt(() => send("POST", at`/trajectories/${of.id}/undo`), `${nameOf(of)} is as it was before`),
});

function promote(/** @type {Api.OverviewInfo} */ { trajectory: of, origin }) {
  const into = find(origin?.trajectory ?? "");
  if (!into || !origin) return say(new Error("the trajectory that it was forked from is gone"));
  const later = Math.max(0, (into.newest?.seq ?? 0) - origin.seq);
  ask({
    title: `Promote ${nameOf(of)}`,
    text: html`<p>${nameOf(into.trajectory)} takes over files, conversation and state of ${nameOf(of)}, as a new snapshot. Nothing is lost, and “Undo” takes it back.</p>
      ${later ? html`<p class="warn">${nameOf(into.trajectory)} has taken ${count(later, "step")} since the fork.</p>` : null}`,
    fields: later ? [{ name: "leave", label: "Leave them behind, in the log", kind: "check" }, { name: "compensate", label: "And run the compensations of irreversible calls among them", kind: "check" }] : [],
    button: "Promote",
    run: ({ leave, compensate }) => attempt(() => send("POST", at`/trajectories/${of.id}/promote`, { leave_behind: leave === "yes", compensate: compensate === "yes" }),
      `${nameOf(into.trajectory)} has what ${nameOf(of)} did`).then((made) => made && go(["t", nameOf(into.trajectory)])),
  });
}

function choose() {
  const of = current.value?.trajectory;
  if (!of) return;
  const family = overview.value.filter(({ trajectory, origin }) => trajectory.id !== of.id && (origin?.trajectory === of.id || trajectory.id === current.value?.origin?.trajectory));
  const others = family.length ? family : overview.value.filter(({ trajectory }) => trajectory.id !== of.id);
  ask({
    title: `Compare ${nameOf(of)} with`, fields: others.slice(-30).map(({ trajectory }, i) => ({ name: trajectory.id, label: nameOf(trajectory), kind: "check", value: i === 0 && family.length ? "yes" : "" })),
    text: others.length ? "Call by call, up to where they part and on from there." : "There is no other trajectory.", button: "Compare",
    run: (values) => {
      const wanted = Object.keys(values).filter((id) => values[id] === "yes");
      if (!wanted.length) throw new Error("choose at least one");
      dialog.value = null;
      go(["compare", of.id, ...wanted]);
    },
  });
}
