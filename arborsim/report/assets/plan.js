// Fills the page of a plan.


function item(text) {
  const made = document.createElement("li");
  made.textContent = text;
  return made;
}

// --- plots of which one is chosen by buttons ---

if (section("pareto", DATA.pareto.plots.length)) {
  byId("pareto-efficient").replaceChildren(...DATA.pareto.efficient.map(item));
  buttons(byId("pareto-kind"), DATA.pareto.plots, ({ figure }) => draw("pareto", figure));
}
if (section("load", DATA.load.length)) {
  buttons(byId("load-kind"), DATA.load, ({ figure }) => draw("load", figure));
}

// --- single plots ---

for (const name of ["memory", "timeline", "time"]) {
  if (section(name, DATA[name])) draw(name, DATA[name]);
}

if (section("saturation", DATA.saturation.length)) {
  const cell = byId("saturation-cell");
  const show = () => {
    const { figure, text } = DATA.saturation.find((one) => one.cell === cell.value);
    byId("saturation-text").textContent = text;
    draw("saturation", figure);
  };
  fill(cell, DATA.saturation.map((one) => one.cell), false);
  cell.addEventListener("change", show);
  show();
}

// --- sliders: an assumption is chosen, and its number moved through a few stops ---

if (section("sensitivity", DATA.sliders.length)) {
  const slider = byId("slider");
  let chosen = null;
  const line = (cells, number) => {
    const row = document.createElement("tr");
    row.append(...cells.map((text, column) => {
      const cell = document.createElement(column ? "td" : "th");
      if (!column) {
        cell.scope = "row";
        const dot = document.createElement("i");
        dot.style.background = `var(--c${(number + 1) % 8})`;
        cell.append(dot);
      }
      cell.className = "text";
      cell.append(text);
      return cell;
    }));
    return row;
  };
  const show = () => {
    const stop = chosen.stops[Number(slider.value)];
    byId("slider-label").textContent = stop.label;
    slider.setAttribute("aria-valuetext", stop.label);
    byId("slider-verdict").textContent = stop.verdict;
    byId("slider-note").textContent = stop.note;
    byId("slider-table").tBodies[0].replaceChildren(...stop.rows.map(line));
    draw("moved", stop.figure);
  };
  slider.addEventListener("input", show);
  buttons(byId("slider-kind"), DATA.sliders, (one) => {
    chosen = one;
    slider.max = one.stops.length - 1;
    slider.value = one.start;
    show();
  });
  if (DATA.overview) draw("overview", DATA.overview);
}

// --- downloads ---

const FILES = {
  candidates: "All candidates (CSV)",
  curves: "Figures against load (CSV)",
  sensitivity: "Changed assumptions (CSV)",
};
byId("downloads").replaceChildren(
  ...Object.keys(FILES).filter((name) => name in DATA.csv).map((name) => {
    const button = document.createElement("button");
    button.type = "button";
    button.id = `download-${name}`;
    button.textContent = FILES[name];
    button.addEventListener("click", () => download(`arborsim-plan-${name}.csv`, DATA.csv[name]));
    return button;
  }),
);
