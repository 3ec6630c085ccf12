// The cache as a picture: above, what it holds; below, the conversation from its beginning, and what of it has left.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;

function node(name, attributes) {
  const out = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) out.setAttribute(key, value);
  return out;
}

// `state` is what /api/sessions/{name} says; `messages` have tokens and whether they are held.
export function draw(place, state, messages) {
  const held = Math.max(1, state.budget);
  const parts = [
    ["sinks", "sinks", state.sinks],
    ["pinned", "pinned prompt", state.pinned - state.sinks],
    ["window", "window", state.held - state.pinned],
    ["room", "room", Math.max(0, state.budget - state.held)],
  ];
  const said = parts.map(([, name, count]) => `${name} ${count}`).join(", ");
  const svg = node("svg", {
    viewBox: `0 0 ${WIDTH} 52`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label":
      `The cache holds ${state.held} of ${state.budget} tokens: ${said}. ` +
      `${state.evicted_turns} of ${state.turns} messages have left it.`,
  });
  let x = 0;
  for (const [kind, , count] of parts) {
    const width = (WIDTH * count) / Math.max(held, state.held);
    if (count > 0) svg.append(node("rect", { class: kind, x, y: 0, width: Math.max(width, 2), height: 26 }));
    x += width;
  }
  const total = Math.max(1, messages.reduce((sum, each) => sum + each.tokens, 0));
  x = 0;
  for (const each of messages) {
    const width = (WIDTH * each.tokens) / total;
    const kind = each.held ? (each.recalled ? "recalled" : "window") : "left";
    svg.append(node("rect", { class: kind, x, y: 34, width, height: 18 }));
    if (x) svg.append(node("line", { x1: x, x2: x, y1: 34, y2: 52, "vector-effect": "non-scaling-stroke" }));
    x += width;
  }
  const legend = document.createElement("ul");
  legend.className = "legend";
  const brought = messages.some((each) => each.recalled);
  const rows = [...parts, ["left", "messages that left", state.evicted_turns]];
  if (brought) rows.push(["recalled", "came with something from memory", messages.filter((m) => m.recalled).length]);
  for (const [kind, name, count] of rows) {
    const row = legend.appendChild(document.createElement("li"));
    row.appendChild(document.createElement("span")).className = `swatch ${kind}`;
    row.append(`${name} ${count.toLocaleString("en")}`);
  }
  place.replaceChildren(svg, legend);
}
