"use strict";
const settings = JSON.parse(document.getElementById("settings").textContent);
const form = document.getElementById("filters");
const hide = (element, hidden) => element.toggleAttribute("hidden", hidden);

function apply() {
  const chosen = new FormData(form);
  const methods = new Set(chosen.getAll("method"));
  const fits = (name, value) => !chosen.get(name) || chosen.get(name) === value;
  const shown = settings.map((s) => fits("model", s.model) && fits("protocol", s.protocol) && fits("details", "=" + s.details));
  const task = chosen.get("task");
  const budget = chosen.get("budget");
  for (const element of document.querySelectorAll("[data-s], [data-t], [data-m], [data-b]")) {
    const { s, t, m, b } = element.dataset;
    hide(
      element,
      (s !== undefined && !shown[s]) ||
        (task !== "" && t !== undefined && t !== task) ||
        (m !== undefined && m !== "full" && !methods.has(m)) ||
        (budget !== "" && b !== undefined && b !== budget),
    );
  }
  document.body.classList.toggle("no-intervals", !chosen.has("intervals"));
  if (task !== "") {
    for (const cell of document.querySelectorAll(`table.wide td[data-t="${task}"]:empty`)) hide(cell.parentElement, true);
  }
  for (const table of document.querySelectorAll("table.paper")) {
    const lacking = task !== "" && !table.querySelector(`th[data-t="${task}"]`);
    const box = table.parentElement;
    for (const each of [box, box.previousElementSibling]) if (lacking) hide(each, true);
  }
  for (const table of document.querySelectorAll("table.wide")) hideEmptyColumns(table);
  for (const block of document.querySelectorAll(".paper tbody")) {
    if (block.dataset.b === undefined || !block.hidden) hide(block, !block.querySelector("tr:not(.block):not([hidden])"));
  }
  for (const policy of document.querySelectorAll("#rows > div")) {
    if (!policy.hidden) hide(policy, !policy.querySelector("details:not([hidden])"));
  }
  for (const grid of document.querySelectorAll("#maps .grid")) {
    const empty = grid.hidden || !grid.querySelector(":scope > :not([hidden])");
    hide(grid, empty);
    hide(grid.previousElementSibling, empty);
  }
  const lines = document.querySelectorAll("#leaderboard tbody tr:not([hidden])").length;
  document.getElementById("status").textContent = `${lines} lines in the leaderboard`;
}

function hideEmptyColumns(table) {
  const rows = [...table.querySelectorAll("tbody tr:not(.block):not([hidden])")];
  table.querySelectorAll("thead th[data-t]").forEach((head) => {
    if (head.hidden || rows.length === 0) return;
    const cells = rows.map((row) => row.cells[head.cellIndex]);
    if (cells.some((cell) => cell.textContent !== "")) return;
    for (const cell of [head, ...cells]) hide(cell, true);
  });
}

function sortable(table) {
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? NaN : Number(cell.dataset.v);
  };
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const first = head.matches(":first-child") ? "ascending" : "descending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const none = (x) => x === "" || Number.isNaN(x); // always last
      const rows = [...body.rows].map((row) => [key(row, head.cellIndex), row]);
      rows.sort(([a], [b]) => none(a) - none(b) || sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
      body.append(...rows.map(([, row]) => row));
    });
  }
}

function openTarget() {
  const target = location.hash ? document.getElementById(location.hash.slice(1)) : null;
  if (target instanceof HTMLDetailsElement) {
    for (const each of [target, target.parentElement]) hide(each, false); // whatever is filtered out
    target.open = true;
    target.scrollIntoView();
  }
}

function light(event) {
  const found = event.target.closest?.(".plot [data-m], .methods .tick");
  const method = found?.dataset.m ?? found?.querySelector("[name=method]")?.value;
  document.body.classList.toggle("lit", method !== undefined);
  for (const each of document.querySelectorAll(".plot .on")) each.classList.remove("on");
  if (method === undefined) return;
  for (const each of document.querySelectorAll(`.plot [data-m="${method}"]`)) each.classList.add("on");
}

if (form) {
  for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, light);
  form.addEventListener("change", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  const tick = (on) => {
    for (const box of form.querySelectorAll("[name=method]")) box.checked = on;
    apply();
  };
  document.getElementById("no-methods")?.addEventListener("click", () => tick(false));
  document.getElementById("all-methods")?.addEventListener("click", () => tick(true));
  document.querySelectorAll("table.sortable").forEach(sortable);
  if (window.matchMedia("(max-width: 40rem)").matches) form.querySelector(".methods")?.removeAttribute("open");
  apply();
}
window.addEventListener("hashchange", openTarget);
openTarget();
