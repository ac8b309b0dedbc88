// Keeps a page fresh by server-sent events, and filters, sorts and follows what it shows. It holds no state of jobs.
"use strict";

const byId = (id) => document.getElementById(id);

function elementOf(html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  return template.content.firstElementChild;
}

// The server escapes all text of HTML that it sends.
function showPart(id, html) {
  const element = byId(id);
  if (element) element.innerHTML = html;
}

function showList(name, change) {
  const list = document.querySelector(`[data-list="${CSS.escape(name)}"]`);
  if (!list) return;
  for (const [id, html] of Object.entries(change.items)) {
    const fresh = elementOf(html);
    const shown = byId(id);
    if (!shown) {
      list.append(fresh);
      continue;
    }
    const focused = shown === document.activeElement || (shown.contains(document.activeElement) && document.activeElement);
    if (shown.open) fresh.open = true;
    if (shown.getAttribute("aria-pressed")) fresh.setAttribute("aria-pressed", "true");
    fresh.tabIndex = shown.tabIndex;
    if (fresh.tagName !== "BUTTON") fresh.removeAttribute("tabindex");
    shown.replaceWith(fresh);
    if (focused) (fresh.matches("button") ? fresh : fresh.querySelector("a, summary"))?.focus();
  }
  if (change.order) {
    const kept = new Set(change.order);
    for (const element of [...list.children]) if (!kept.has(element.id)) element.remove();
    if (!sorted) change.order.forEach((id, place) => {
      const element = byId(id);
      if (element && list.children[place] !== element) list.insertBefore(element, list.children[place] ?? null);
    });
  }
}

function follow(address) {
  const events = new EventSource(address);
  events.onopen = () => { byId("away").hidden = true; };
  events.onerror = () => { byId("away").hidden = false; };
  events.onmessage = (event) => {
    const change = JSON.parse(event.data);
    for (const [id, html] of Object.entries(change.parts)) showPart(id, html);
    for (const [name, list] of Object.entries(change.lists)) showList(name, list);
    arrange(Object.keys(change.lists).includes("jobs"));
    openTarget();
  };
}

// The table of jobs.

let sorted = null;

function arrange(changed) {
  const jobs = byId("jobs");
  if (!jobs || !changed) return;
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const phase = byId("phase").value;
  if (sorted) {
    const key = (row) => row.children[sorted.column].querySelector("time")?.dateTime ?? row.children[sorted.column].textContent;
    const rows = [...jobs.children].sort((one, other) =>
      sorted.sign * key(one).localeCompare(key(other), "en", { numeric: true }));
    rows.forEach((row, place) => { if (jobs.children[place] !== row) jobs.insertBefore(row, jobs.children[place]); });
  }
  for (const row of jobs.children) {
    const text = row.textContent.toLowerCase();
    const hidden = !words.every((word) => text.includes(word)) || (phase && !row.children[2].textContent.includes(phase));
    if (row.hidden !== hidden) row.hidden = hidden;
  }
  byId("none").hidden = jobs.children.length > 0;
}

function sortBy(button) {
  const column = [...button.closest("tr").children].indexOf(button.closest("th"));
  const sign = sorted?.column === column ? -sorted.sign : 1;
  for (const one of document.querySelectorAll("[aria-sort]")) one.removeAttribute("aria-sort");
  button.closest("th").setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  sorted = { column, sign };
  arrange(true);
}

// The map of nodes: one stop of the Tab key, and arrows within it.

function choose(cell) {
  for (const one of document.querySelectorAll('.cell[aria-pressed="true"]')) one.removeAttribute("aria-pressed");
  cell.setAttribute("aria-pressed", "true");
  const node = byId("node");
  node.textContent = `${cell.title} `;
  const link = document.createElement("a");
  link.href = `logs?node=${cell.dataset.node}&role=${encodeURIComponent(cell.dataset.role)}`;
  link.textContent = "its log";
  node.append(link);
}

function step(cell, key) {
  const cells = [...cell.parentElement.children];
  const top = cell.offsetTop;
  const perRow = cells.filter((one) => one.offsetTop === top).length;
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perRow, ArrowUp: -perRow }[key];
  const next = cells[cells.indexOf(cell) + by];
  if (!next) return;
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// The log: text only, so that no line becomes anything else.

const MOST_LINES = 5000;

function readLog(log) {
  const find = byId("find");
  const matches = (line) => line.textContent.toLowerCase().includes(find.value.toLowerCase());
  const events = new EventSource(log.dataset.stream);
  events.onopen = () => { byId("away").hidden = true; log.textContent = ""; };
  events.onerror = () => { if (events.readyState !== EventSource.CLOSED) byId("away").hidden = false; };
  events.addEventListener("end", (event) => {
    events.close();
    const problem = byId("log-problem");
    problem.textContent = JSON.parse(event.data);
    problem.hidden = !problem.textContent;
  });
  events.onmessage = (event) => {
    const fresh = document.createDocumentFragment();
    for (const text of JSON.parse(event.data)) {
      const line = document.createElement("div");
      line.textContent = text;
      line.hidden = !matches(line);
      fresh.append(line);
    }
    log.append(fresh);
    while (log.children.length > MOST_LINES) log.firstChild.remove();
    byId("count").textContent = `${log.children.length} line${log.children.length === 1 ? "" : "s"}`;
    if (byId("follow").checked) log.scrollTop = log.scrollHeight;
  };
  find.addEventListener("input", () => { for (const line of log.children) line.hidden = !matches(line); });
}

function openTarget() {
  const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
  if (target && target.matches("details") && target.dataset.opened !== location.hash) {
    target.open = true;
    target.dataset.opened = location.hash;
  }
}

addEventListener("hashchange", openTarget);

addEventListener("click", (event) => {
  const sort = event.target.closest(".sort");
  const cell = event.target.closest(".cell");
  if (sort) sortBy(sort);
  if (cell) choose(cell);
});

addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.matches("input, select") && byId("find")) {
    event.preventDefault();
    byId("find").focus();
  }
  if (event.key.startsWith("Arrow") && event.target.matches(".cell")) {
    event.preventDefault();
    step(event.target, event.key);
  }
});

for (const id of ["find", "phase"]) byId(id)?.addEventListener("input", () => arrange(true));
for (const map of document.querySelectorAll(".map")) if (map.firstElementChild) map.firstElementChild.tabIndex = 0;
openTarget();
if (byId("log")) readLog(byId("log"));
else follow(document.body.dataset.events);
