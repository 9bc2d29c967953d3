"use strict";
// What the pages share: table sorting, Plotly figures, downloads.  Text from files only ever becomes textContent here;
// Plotly labels were escaped when the data was written.
const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// On paper, layout comes after the scripts have run: the width of a page is fixed, not measured.
const PAPER = matchMedia("print");
const widthOf = (box) => (PAPER.matches ? 660 : box.clientWidth);

// --- theme: figures name their colours as CSS variables, which follow light, dark and print ---

function resolved(value, css) {
  if (typeof value === "string" && value.startsWith("var(--")) {
    return css.getPropertyValue(value.slice(4, -1)).trim();
  }
  if (Array.isArray(value)) return value.map((item) => resolved(item, css));
  if (value && typeof value === "object" && !ArrayBuffer.isView(value)) {
    const copy = {};
    for (const key of Object.keys(value)) copy[key] = resolved(value[key], css);
    return copy;
  }
  return value;
}

// A title in lines of at most `room` characters: Plotly cuts what is longer than its axis.
function folded(title, room) {
  const lines = [""];
  for (const word of title.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (longer.length > room && lines.at(-1)) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines.join("<br>");
}

function themed(figure, width) {
  const css = getComputedStyle(document.documentElement);
  const { data, layout } = resolved(figure, css);
  const narrow = width < 520;
  const axis = (own, room) => ({
    gridcolor: css.getPropertyValue("--line").trim(),
    zerolinecolor: css.getPropertyValue("--line").trim(),
    linecolor: css.getPropertyValue("--soft").trim(),
    automargin: true,
    ...own,
    ...(own?.title?.text ? { title: { ...own.title, text: folded(own.title.text, room) } } : {}),
  });
  return {
    data,
    layout: {
      ...layout,
      xaxis: axis(layout.xaxis, (width - 60) / 7),
      yaxis: axis(layout.yaxis, ((layout.height ?? 400) - 90) / 7),
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: {
        color: css.getPropertyValue("--ink").trim(),
        family: getComputedStyle(document.body).fontFamily,
        size: narrow ? 11 : 12.5,
      },
      hoverlabel: { bgcolor: css.getPropertyValue("--card").trim(), font: { color: css.getPropertyValue("--ink").trim() } },
      modebar: {
        bgcolor: "rgba(0,0,0,0)",
        color: css.getPropertyValue("--soft").trim(),
        activecolor: css.getPropertyValue("--accent").trim(),
      },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", traceorder: "normal" },
      margin: { l: narrow ? 44 : 60, r: 12, t: 10, b: 48 },
      width,
    },
  };
}

const drawn = new Map(); // element id -> figure, for redrawing in another theme or width

function draw(id, figure) {
  const box = byId(id);
  drawn.set(id, figure);
  if (!figure) {
    Plotly.purge(box);
    const empty = document.createElement("p");
    empty.className = "empty";
    empty.textContent = "Not measured, or not in the trace.";
    box.replaceChildren(empty);
    return;
  }
  if (box.querySelector(".empty")) box.replaceChildren();
  const { data, layout } = themed(figure, widthOf(box));
  Plotly.react(box, data, layout, {
    displaylogo: false,
    // A list of what is allowed: plotly.js 4 shows by default a button that uploads the chart.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    plotlyServerURL: "",
  });
}

function redraw() {
  for (const [id, figure] of drawn) draw(id, figure);
}

// --- pickers: first the search, then the policy; items carry the labels `search` and `cell` ---

function fill(select, names, keep) {
  const before = keep ? select.value : null;
  select.replaceChildren(
    ...names.map((name) => {
      const option = document.createElement("option");
      option.value = option.textContent = name;
      return option;
    }),
  );
  if (names.includes(before)) select.value = before;
}

function picker(name, items, show) {
  const search = byId(`${name}-search`);
  const cell = byId(`${name}-cell`);
  const update = () => {
    const found = items.find((item) => item.search === search.value && item.cell === cell.value);
    if (found) show(found);
  };
  const cells = () => {
    fill(cell, items.filter((i) => i.search === search.value).map((i) => i.cell), true);
    update();
  };
  fill(search, [...new Set(items.map((item) => item.search))], false);
  search.addEventListener("change", cells);
  cell.addEventListener("change", update);
  cells();
  // Begin with the policy that the answer names: under full retention nothing moves.
  if ([...cell.options].some((option) => option.value === DATA.start)) {
    cell.value = DATA.start;
    update();
  }
}

// --- figures of a report: pickers show one of its choices, and a line of it can be highlighted ---

const NONE = "none";

function chooser(name, choices) {
  const selects = [...document.querySelectorAll(`#${name}-picker .of-choices select`)];
  const line = byId(`${name}-highlight`);
  const fits = (one, depth) => selects.slice(0, depth).every((select, i) => one.labels[i] === select.value);
  const show = () => {
    const { figure, lines, fades } = shown;
    const above = lines[line?.value] ?? [];
    const data = above.length && fades ? figure.data.map((one) => ({ ...one, opacity: 0.25 })) : figure.data;
    draw(name, { data: [...data, ...above], layout: figure.layout });
  };
  let shown = null;
  const choose = (first = 0) => {
    for (let i = first; i < selects.length; i += 1) {
      const labels = new Set(choices.filter((one) => fits(one, i)).map((one) => one.labels[i]));
      fill(selects[i], [...labels], true);
      selects[i].parentElement.hidden = new Set(choices.map((one) => one.labels[i])).size < 2;
    }
    shown = choices.find((one) => fits(one, selects.length));
    if (line) {
      fill(line, [NONE, ...Object.keys(shown.lines)], true);
      line.parentElement.hidden = line.options.length < 3;
    }
    byId(`${name}-note`).textContent = shown.note;
    byId(`${name}-texts`).replaceChildren(...shown.texts.map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
    show();
  };
  selects.forEach((select, i) => select.addEventListener("change", () => choose(i + 1)));
  line?.addEventListener("change", show);
  choose();
  // Begin with the policy that the answer names: under full retention nothing moves.
  const first = choices.find((one) => one.labels.includes(DATA.start));
  if (first && DATA.start) {
    first.labels.forEach((label, i) => { selects[i].value = label; choose(i + 1); });
  }
}

for (const [name, choices] of Object.entries(DATA.figures ?? {})) chooser(name, choices);

// --- buttons, sections, wide tables ---

// Buttons of which one is pressed; tells `show` the chosen item, which has a `title`.
function buttons(box, items, show) {
  const before = box.querySelector("[aria-pressed=true]")?.textContent;
  const press = (item) => {
    for (const one of box.children) one.setAttribute("aria-pressed", one.textContent === item.title);
    show(item);
  };
  box.replaceChildren(
    ...items.map((item) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = item.title;
      button.addEventListener("click", () => press(item));
      return button;
    }),
  );
  if (items.length) press(items.find((item) => item.title === before) ?? items[0]);
}

// A section without anything to show goes, and its line in the list of contents.
function section(name, there) {
  byId(`${name}-section`).hidden = !there;
  document.querySelector(`.contents a[href="#${name}-section"]`).hidden = !there;
  return there;
}

// A long table of settings is filtered: rows stay that have every word that is typed.
for (const table of document.querySelectorAll("table.comparison")) {
  const rows = [...table.querySelectorAll("tbody tr:not(.group)")];
  if (rows.length < 9 || table.closest("#answer-section")) continue;
  const label = document.createElement("label");
  const input = document.createElement("input");
  const count = document.createElement("output");
  input.type = "search";
  input.placeholder = "a policy, a budget, ...";
  label.append("Filter rows ", input);
  const line = document.createElement("p");
  line.className = "picker filter";
  line.append(label, count);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = [...row.cells].slice(0, 2).map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  });
  table.parentElement.before(line);
}

// A table that is wider than its place says so, until its end is in sight.
for (const box of document.querySelectorAll(".scroll:has(table)")) {
  const hint = document.createElement("p");
  hint.className = "scroll-hint";
  hint.textContent = "More columns to the right: scroll →";
  hint.hidden = true;
  box.before(hint);
  const look = () => {
    hint.hidden = box.scrollWidth <= box.clientWidth + 1;
    box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.classList.toggle("more", box.scrollTop + box.clientHeight < box.scrollHeight - 1);
  };
  box.addEventListener("scroll", look);
  new ResizeObserver(look).observe(box);
  if (box.firstElementChild) new ResizeObserver(look).observe(box.firstElementChild);
}

// --- table ---

// Each trace has its own body: rows move within it, under its heading.
function sortable(table) {
  const bodies = [...table.tBodies].map((body) => {
    const rows = [...body.rows];
    return { body, head: rows.filter((row) => row.className === "group"), rows: rows.filter((row) => row.className !== "group") };
  });
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.addEventListener("click", () => {
      const order = ["ascending", "descending", null];
      const now = order[(order.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (now) head.setAttribute("aria-sort", now);
      const compare = comparison(column, now === "descending" ? -1 : 1, head.classList.contains("text"));
      for (const { body, head, rows } of bodies) {
        body.replaceChildren(...head, ...(now ? [...rows].sort(compare) : rows));
      }
    });
  });
}

function comparison(column, sign, text) {
  const key = (row) => row.cells[column]?.dataset.value ?? ""; // a reason spans the columns of figures
  if (text) return (a, b) => sign * key(a).localeCompare(key(b), "en", { numeric: true });
  return (a, b) => {
    if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === ""); // unknown last
    return sign * (Number(key(a)) - Number(key(b)));
  };
}

// Each comparison sorts by the heads of its columns.
for (const table of document.querySelectorAll("table:has(thead button)")) sortable(table);

// --- download ---

function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const button of document.querySelectorAll(".downloads button")) {
  button.addEventListener("click", () => download(button.dataset.file, DATA.csv[button.dataset.file]));
}

// --- redrawing: in another width, another theme, and on paper ---

let pending = 0;
function later() {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(redraw);
}
window.addEventListener("resize", later);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
// On paper the light theme holds (see the style sheet), so figures are drawn again in it.
PAPER.addEventListener("change", redraw);
window.addEventListener("afterprint", later);
