"use strict";
// The page as the server made it, kept up to date. Everything that comes is put into text nodes; the drawing's numbers
// are attributes.

const SVG = "http://www.w3.org/2000/svg";
const AGAIN_MS = 2000; // after which to connect again where the browser does not do it by itself

const byId = (id) => document.getElementById(id);
const said = byId("status");

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function make(tag, className) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return node;
}

// --- tables

function columnsOf(body) {
  return Array.from(body.parentElement.tHead.rows[0].cells, (cell) => cell.textContent).filter(Boolean);
}

function newCell(row) {
  const cell = row.insertCell();
  cell.setAttribute("role", "cell");
  return cell;
}

function newRow(columns) {
  const row = make("tr");
  row.setAttribute("role", "row");
  for (const column of columns) newCell(row).dataset.column = column;
  return row;
}

function putButton(row, number) {
  const shown = row.querySelector("button");
  if (number === null) {
    if (shown) shown.parentElement.remove();
  } else if (!shown) {
    const button = make("button");
    button.type = "button";
    button.textContent = "Cancel";
    button.setAttribute("aria-label", `Cancel request ${number}`);
    button.addEventListener("click", () => cancel(number, button));
    newCell(row).append(button);
  }
}

function fill(id, rows) {
  const body = byId(id), columns = columnsOf(body);
  const before = new Map(Array.from(body.rows, (row) => [row.dataset.key, row]));
  const focused = body.contains(document.activeElement) ? document.activeElement.closest("tr") : null;
  rows.forEach(({ key, cells, cancel: number }, index) => {
    const row = before.get(key) || newRow(columns);
    before.delete(key);
    row.dataset.key = key;
    cells.forEach((text, column) => put(row.cells[column], text));
    putButton(row, number);
    // A node that is moved loses the focus: what stands right already stays.
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] || null);
  });
  for (const row of before.values()) row.remove();
  if (focused && !focused.isConnected) byId(`${id}-heading`).focus();
  headButtons(body, rows.some((row) => row.cancel !== null));
  body.parentElement.hidden = rows.length === 0;
  byId(`${id}-empty`).hidden = rows.length > 0;
}

function headButtons(body, wanted) {
  const head = body.parentElement.tHead.rows[0], shown = head.querySelector("td");
  if (wanted && !shown) newCell(head);
  if (!wanted && shown) shown.remove();
}

// --- the drawing

let drawn = "";

function draw(rectangles) {
  const now = JSON.stringify(rectangles);
  if (now === drawn) return;
  drawn = now;
  byId("chart").replaceChildren(...rectangles.map(([name, x, y, width, height]) => {
    const node = document.createElementNS(SVG, "rect");
    for (const [key, value] of Object.entries({ class: name, x, y, width, height })) node.setAttribute(key, value);
    return node;
  }));
}

function putLegend(entries) {
  byId("legend").replaceChildren(...entries.map(([name, text]) => {
    const item = make("li");
    item.append(make("span", name), text);
    return item;
  }));
}

// --- the feed

function show(view) {
  for (const id of ["summary", "turn", "hour", "scale"]) put(byId(id), view[id]);
  for (const [id, rows] of Object.entries(view.tables)) fill(id, rows);
  document.title = `${view.summary} – GPU queue`;
  draw(view.chart);
  putLegend(view.legend);
}

let lost = false;

function connect() {
  const feed = new EventSource("/-/events");
  feed.addEventListener("message", (event) => show(JSON.parse(event.data)));
  feed.addEventListener("open", () => {
    if (lost) put(said, "Connected again.");
    lost = false;
  });
  feed.addEventListener("error", () => {
    if (!lost) put(said, "The connection is lost; trying again.");
    lost = true;
    if (feed.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS);
  });
  addEventListener("pagehide", () => feed.close(), { once: true });
}

async function cancel(number, button) {
  button.setAttribute("aria-disabled", "true");
  put(said, `Cancelling request ${number}.`);
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch("/-/cancel", { method: "POST", headers, body: JSON.stringify({ id: number }) });
    const answer = await response.json();
    put(said, response.ok ? `Request ${number} was cancelled.` : answer.error.message);
  } catch {
    put(said, `Request ${number} could not be cancelled: no answer.`);
  }
  button.removeAttribute("aria-disabled");
}

byId("still").hidden = true;
addEventListener("pageshow", (event) => {
  if (event.persisted) connect(); // taken out of the browser's back-forward cache
});
connect();
