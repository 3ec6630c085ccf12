// The page: conversations, what their caches hold, and how they are held.

import { Refused, call, converse, download, sessionAt, setKey } from "./api.js";
import { draw } from "./map.js";
import { render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const page = { session: null, system: null, messages: [], stop: null, settings: null, last: null };

// Small things.

const bytes = (count) => {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= scale) return `${(count / scale).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
};

function complain(error, place = $("trouble")) {
  place.textContent = error ? error.message : "";
  place.hidden = !error;
}

function ask(title, label, { value = "", text = true, secret = false } = {}) {
  const dialog = $("asking");
  $("asking-title").textContent = title;
  $("asking-label").textContent = label;
  const input = $("asking-text");
  input.hidden = !text;
  input.type = secret ? "password" : "text";
  input.value = value;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? input.value : null), { once: true });
  });
}

// Does something, and asks for a key when one is needed.
async function trying(action) {
  complain(null);
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (error.name === "AbortError") return null;
      if (!(error instanceof Refused) || error.status !== 401) {
        complain(error);
        return null;
      }
      const key = await ask("This server needs a key", "Key, as headwater keys add showed it", { secret: true });
      if (key === null) return null;
      setKey(key);
    }
  }
}

// Sessions.

async function listSessions() {
  const query = new URLSearchParams({ search: $("search").value });
  const found = await trying(() => call("GET", `/api/sessions?${query}`));
  if (found === null) return;
  $("no-sessions").hidden = found.sessions.length > 0;
  $("sessions").replaceChildren(
    ...found.sessions.map((each) => {
      const row = document.createElement("li");
      const button = row.appendChild(document.createElement("button"));
      button.type = "button";
      button.setAttribute("aria-current", String(each.name === page.session));
      const title = button.appendChild(document.createElement("span"));
      title.className = "title";
      title.textContent = each.name.startsWith("chat-") ? each.title || each.name : each.name;
      const more = button.appendChild(document.createElement("span"));
      more.className = "more";
      const where = each.busy ? "answering" : each.in_memory ? "in memory" : "on disk";
      more.textContent = `${each.turns} messages, ${where}, ${each.updated.slice(0, 16).replace("T", " ")}`;
      button.addEventListener("click", () => open(each.name));
      return row;
    }),
  );
}

async function open(name) {
  page.stop?.abort();
  const shown = await trying(() => call("GET", sessionAt(name)));
  if (shown === null) return;
  page.session = name;
  page.system = shown.system;
  page.messages = shown.messages;
  page.last = null;
  closeMenu();
  showAll();
  showState(shown);
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  await listSessions();
}

function begin() {
  page.stop?.abort();
  Object.assign(page, { session: null, system: null, messages: [], last: null });
  history.replaceState(null, "", location.pathname);
  closeMenu();
  showAll();
  emptyState();
  $("text").focus();
}

// What the cache holds.

function emptyState() {
  const budget = page.settings?.budget ?? 1;
  draw($("map"), { budget, held: 0, pinned: 0, sinks: 0, turns: 0, evicted_turns: 0 }, []);
  $("figures").replaceChildren();
  $("notice").textContent = page.settings ? `A conversation costs ${bytes(page.settings.session_bytes)} of cache.` : "";
}

function showState(shown) {
  if (shown.messages) {
    page.messages.forEach((each, index) => Object.assign(each, shown.messages[index] ?? {}));
    for (const [index, each] of page.messages.entries()) {
      const article = $("messages").children[index];
      article?.classList.toggle("gone", each.held === false);
      const left = each.held === false ? ", has left the cache" : "";
      const heading = article?.querySelector("h3");
      if (heading) heading.textContent = (each.role === "user" ? "You" : page.settings?.model ?? "Model") + left;
    }
  }
  const state = shown.state;
  if (!state) {
    emptyState();
    $("notice").textContent = "This conversation is on the disk; it comes back when it goes on.";
    return;
  }
  draw($("map"), state, page.messages.filter((each) => each.tokens));
  const figures = {
    seen: state.seen.toLocaleString("en"),
    held: `${state.held} of ${state.budget}`,
    left: `${state.evicted_turns} messages, ${state.evicted_tokens.toLocaleString("en")} tokens`,
    cache: bytes(state.cache_bytes),
  };
  if (state.tokens_per_s !== null) figures["tokens/s"] = state.tokens_per_s.toFixed(1);
  if (state.ttft_s !== null) figures["first token"] = `${state.ttft_s.toFixed(2)} s`;
  if (state.surprise !== null) figures.perplexity = Math.exp(state.surprise).toFixed(1);
  if (page.last) figures.computed = `${page.last.fed} tokens, ${page.last.how}`;
  $("figures").replaceChildren(
    ...Object.entries(figures).map(([name, value]) => {
      const row = document.createElement("div");
      row.appendChild(document.createElement("dt")).textContent = name;
      row.appendChild(document.createElement("dd")).textContent = value;
      return row;
    }),
  );
  const said = [state.notice, state.trouble, ...state.recalled.map((each) => `recalled: ${each}`)].filter(Boolean);
  $("notice").textContent = said.join("; ");
}

async function look() {
  if (page.session === null) return;
  const name = page.session;
  const shown = await call("GET", `${sessionAt(name)}?turns=${page.stop === null}`).catch(() => null);
  if (shown !== null && name === page.session) showState(shown);
}

// Messages.

function showAll() {
  $("bar").hidden = page.session === null;
  $("name").textContent = page.session ?? "";
  $("system").value = page.system ?? "";
  $("system").disabled = page.session !== null;
  $("messages").replaceChildren(...page.messages.map(articleOf));
  $("messages").scrollTop = $("messages").scrollHeight;
}

function articleOf(message, index) {
  const article = document.createElement("article");
  article.className = message.role;
  article.appendChild(document.createElement("h3")).textContent =
    message.role === "user" ? "You" : page.settings?.model ?? "Model";
  const body = article.appendChild(document.createElement("div"));
  body.className = "body";
  body.append(render(message.content));
  const actions = article.appendChild(document.createElement("div"));
  actions.className = "actions";
  const button = (label, action) => {
    const out = actions.appendChild(document.createElement("button"));
    out.type = "button";
    out.textContent = label;
    out.addEventListener("click", action);
  };
  if (message.role === "user") button("Edit", () => edit(article, index));
  else button("Answer again", () => say(page.messages[index - 1].content, index - 1));
  return article;
}

function edit(article, index) {
  if (page.stop !== null) return;
  const form = document.createElement("form");
  const label = form.appendChild(document.createElement("label"));
  label.textContent = "Edit this message; what came after it leaves with it";
  const text = label.appendChild(document.createElement("textarea"));
  text.rows = 4;
  text.value = page.messages[index].content;
  const buttons = form.appendChild(document.createElement("div"));
  buttons.className = "buttons";
  const send = buttons.appendChild(document.createElement("button"));
  send.className = "primary";
  send.textContent = "Send";
  const cancel = buttons.appendChild(document.createElement("button"));
  cancel.type = "button";
  cancel.textContent = "Cancel";
  cancel.addEventListener("click", showAll);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (text.value.trim()) say(text.value, index);
  });
  article.replaceChildren(form);
  text.focus();
}

// Says `text` after the first `keep` messages.
async function say(text, keep = page.messages.length) {
  if (page.stop !== null) return;
  $("prompt").open = false;
  page.system = page.session === null ? $("system").value.trim() || null : page.system;
  page.messages = [...page.messages.slice(0, keep), { role: "user", content: text }];
  showAll();
  const request = {
    model: page.settings.model,
    messages: [
      ...(page.system === null ? [] : [{ role: "system", content: page.system }]),
      ...page.messages.map(({ role, content }) => ({ role, content })),
    ],
    temperature: page.settings.temperature,
    max_tokens: page.settings.longest,
  };
  const answer = { role: "assistant", content: "" };
  let article = null;
  const began = (told) => {
    page.last = told;
    page.session = told.session;
    $("bar").hidden = false;
    $("name").textContent = told.session;
    history.replaceState(null, "", `#${encodeURIComponent(told.session)}`);
    page.messages.push(answer);
    article = $("messages").appendChild(articleOf(answer, page.messages.length - 1));
  };
  const heard = (piece) => {
    const box = $("messages");
    const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
    answer.content += piece;
    article.querySelector(".body").replaceChildren(render(answer.content));
    if (follow) box.scrollTop = box.scrollHeight;
  };
  const stop = (page.stop = new AbortController());
  document.body.dataset.busy = "true";
  $("stop").disabled = false;
  $("send").disabled = true;
  const watching = setInterval(look, 700);
  const whole = (page.messages[0].number ?? 0) === 0;
  const session = page.session;
  const end = await trying(() => converse({ request, session, whole, signal: stop.signal, began, heard }));
  clearInterval(watching);
  page.stop = null;
  $("stop").disabled = true;
  $("send").disabled = false;
  $("spoken").textContent = end === null ? "The answer ended early." : `The answer: ${answer.content}`;
  if (article === null) {
    $("text").value = $("text").value || text; // nothing was said: the words are not lost
    page.messages.pop();
    showAll();
  }
  await listSessions();
  if (stop.signal.aborted) await new Promise((done) => setTimeout(done, 300));
  await look();
  delete document.body.dataset.busy;
}

// Settings.

async function readSettings() {
  const now = await trying(() => call("GET", "/api/settings"));
  if (now === null) return;
  const kept = page.settings;
  page.settings = now;
  page.settings.temperature = kept?.temperature ?? now.sampling.temperature;
  page.settings.longest = kept?.longest ?? now.max_tokens;
  $("model").textContent = `${now.model}, ${now.policy}, ${now.budget} tokens`;
  $("policy").replaceChildren(...now.policies.map((name) => new Option(name, name, false, name === now.policy)));
  $("budget").max = now.context_length - 1;
  for (const name of ["budget", "sinks", "temperature", "longest"]) $(name).value = page.settings[name];
  $("memory").textContent = now.memory
    ? "Memory is on: what leaves the cache is brought back when it has to do with a message."
    : "Memory is off; headwater serve --memory brings back what has left the cache.";
  showCost();
}

function showCost() {
  const now = page.settings;
  const each = now.token_bytes * (Number($("budget").value) + 1);
  const fit = Math.max(1, Math.floor(now.memory_bytes / Math.max(1, each)));
  $("cost").textContent =
    `A conversation costs ${bytes(each)} of cache; ${fit.toLocaleString("en")} fit the limit of ` +
    `${bytes(now.memory_bytes)}, and others wait on the disk. Caches are made again after a change.`;
}

async function applySettings() {
  const trouble = $("settings-trouble");
  complain(null, trouble);
  const change = { policy: $("policy").value, budget: Number($("budget").value) };
  if (change.policy === "streaming-llm") change.sinks = Number($("sinks").value);
  try {
    page.settings.temperature = Number($("temperature").value);
    page.settings.longest = Number($("longest").value);
    await call("PUT", "/api/settings", change);
    await readSettings();
    await look();
    $("settings").close();
  } catch (error) {
    complain(error, trouble);
  }
}

// Doors.

function closeMenu() {
  $("sidebar").classList.remove("open");
  $("menu").setAttribute("aria-expanded", "false");
}

$("menu").addEventListener("click", () => {
  const opened = $("sidebar").classList.toggle("open");
  $("menu").setAttribute("aria-expanded", String(opened));
});
$("new").addEventListener("click", begin);
$("search").addEventListener("input", listSessions);
$("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (!text.trim() || page.stop !== null || page.settings === null) return;
  $("text").value = "";
  say(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("say").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") page.stop?.abort();
});
$("stop").addEventListener("click", () => page.stop?.abort());
$("rename").addEventListener("click", async () => {
  const name = await ask("Rename this conversation", "New name", { value: page.session });
  if (name === null || name === page.session) return;
  const renamed = await trying(() => call("PATCH", sessionAt(page.session), { name }));
  if (renamed !== null) await open(renamed.name);
});
$("export").addEventListener("click", async (event) => {
  event.preventDefault();
  const content = await trying(() => download(`${sessionAt(page.session)}/export?kind=markdown`));
  if (content === null) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = `${page.session}.md`;
  link.click();
  URL.revokeObjectURL(link.href);
});
$("delete").addEventListener("click", async () => {
  const sure = await ask("Delete this conversation for good?", `“${page.session}” cannot be brought back.`, { text: false });
  if (sure === null) return;
  const done = await trying(async () => {
    await call("DELETE", sessionAt(page.session));
    return true;
  });
  if (done) {
    begin();
    await listSessions();
  }
});
$("open-settings").addEventListener("click", async () => {
  await readSettings();
  $("settings").showModal();
});
$("budget").addEventListener("input", showCost);
$("apply").addEventListener("click", applySettings);

await readSettings();
await listSessions();
const wanted = decodeURIComponent(location.hash.slice(1));
if (wanted) await open(wanted);
else emptyState();
document.documentElement.dataset.ready = "true";
