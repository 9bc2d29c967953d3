// Fills the page of a replay.

function showTime() {
  const times = DATA.time[byId("trace").value];
  const chosen = times.find((item) => item.budget === byId("time-budget").value) ?? times[0];
  draw("time", chosen.figure);
}

function showTrace() {
  const trace = byId("trace").value;
  const budgets = DATA.time[trace].map((item) => item.budget);
  fill(byId("time-budget"), budgets, true);
  byId("time-picker").hidden = budgets.length < 2;
  showTime();
  document.dispatchEvent(new CustomEvent("trace", { detail: trace }));
}

fill(byId("trace"), DATA.traces, false);
byId("trace-picker").hidden = DATA.traces.length < 2;
byId("trace").addEventListener("change", showTrace);
byId("time-budget").addEventListener("change", showTime);
if (DATA.memory.length) picker("memory", DATA.memory, (item) => draw("memory", item.figure));
else section("memory", false);

// The other scripts listen for the trace: it is announced when all of them are there.
addEventListener("load", showTrace);

// Memory against what it buys, and policies by budgets: two views of the chosen trace.
(() => {
  function element(kind, text, name) {
    const made = document.createElement(kind);
    made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  // --- memory against what it buys ---

  const NONE = "none";
  let shown = null;

  function showPareto() {
    const name = byId("pareto-policy").value;
    const own = shown.policies[name];
    const { data, layout } = shown.figure;
    const marked = own && {
      type: "scatter", mode: "lines+markers", name: own.customdata[0].split(", budget ")[0], ...own,
      line: { color: "var(--c2)", width: 1.5, dash: "dot" },
      marker: { color: "var(--c2)", size: 13, symbol: "circle-open", line: { width: 3, color: "var(--c2)" } },
    };
    draw("pareto", { data: marked ? [...data, marked] : data, layout });
    byId("pareto-efficient").replaceChildren(...shown.efficient.map((text) => element("li", text)));
  }

  byId("pareto-policy").addEventListener("change", showPareto);

  // --- answers by budget ---

  let counted = null;

  function showCliff() {
    counted = cliffs.find((item) => item.title === byId("cliff-problems").value) ?? cliffs[0];
    fill(byId("cliff-policy"), [NONE, ...Object.keys(counted.lines)], true);
    const marked = counted.lines[byId("cliff-policy").value];
    const { data, layout } = counted.figure;
    byId("cliff-note").textContent = counted.note;
    draw("cliff", { data: marked ? [...data, marked] : data, layout });
  }

  let cliffs = [];
  byId("cliff-problems").addEventListener("change", showCliff);
  byId("cliff-policy").addEventListener("change", showCliff);

  // --- policies by budgets ---

  function showHeat(map, budgets) {
    const head = document.createElement("thead");
    head.append(document.createElement("tr"));
    head.rows[0].append(element("th", "Policy", "text"), ...budgets.map((budget) => element("th", budget)));
    const body = document.createElement("tbody");
    for (const policy of map.policies) {
      const row = body.insertRow();
      if (policy.name === "oracle") row.className = "bound";
      const name = element("th", policy.name);
      name.scope = "row";
      row.append(name);
      policy.text.forEach((text, i) => {
        const cell = element("td", text, policy.shade[i] === null ? "none" : "");
        if (policy.shade[i] !== null) cell.style.setProperty("--shade", policy.shade[i]);
        row.append(cell);
      });
    }
    byId("heat").replaceChildren(head, body);
    byId("heat-note").textContent =
      `${map.title} (${map.unit}) by budget; ${map.higher ? "more" : "less"} is better, and blue. ` +
      "Sorted by the first budget. Hatched: left out.";
  }

  document.addEventListener("trace", ({ detail: trace }) => {
    cliffs = DATA.cliff[trace];
    section("cliff", cliffs.length);
    if (cliffs.length) {
      fill(byId("cliff-problems"), cliffs.map((item) => item.title), true);
      showCliff();
    }
    section("pareto", DATA.pareto[trace].length);
    buttons(byId("pareto-metric"), DATA.pareto[trace], (item) => {
      shown = item;
      fill(byId("pareto-policy"), [NONE, ...Object.keys(item.policies)], true);
      showPareto();
    });
    const { budgets, metrics } = DATA.heat[trace];
    buttons(byId("heat-metric"), metrics, (map) => showHeat(map, budgets));
    section("heat", metrics.length);
  });
})();

// Every token's life as a column of colours: one search under one policy.
(() => {
  const NAMES = ["HBM", "HBM, quantised", "HBM, coarse", "DDR", "DDR, quantised", "DDR, coarse", "evicted", "not born yet"];
  const COLOURS = ["hbm", "quantised", "coarse", "ddr", "ddr-quantised", "ddr-coarse", "evicted", "card"].map((name) => `var(--${name})`);
  const { axes, items } = DATA.maps;
  if (!items.length) {
    section("map", false);
    return;
  }

  // Columns come as runs: 8 times the length, plus the tier.
  function unpack({ bdata }, rows, columns) {
    const bytes = Uint8Array.from(atob(bdata), (character) => character.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const cells = Array.from({ length: rows }, () => new Uint8Array(columns));
    let at = 0;
    for (let i = 0; i < bytes.length; i += 2) {
      const run = view.getUint16(i, true);
      for (let left = run >> 3; left > 0; left -= 1, at += 1) cells[at % rows][Math.floor(at / rows)] = run & 7;
    }
    return cells;
  }

  function figure(item) {
    const { tokens, iterations } = axes[item.axes];
    const z = unpack(item.runs, iterations.length, tokens.length);
    return {
      data: [{
        type: "heatmap", x: tokens, y: iterations, z, zmin: -0.5, zmax: NAMES.length - 0.5, showscale: false,
        colorscale: COLOURS.flatMap((colour, i) => [[i / NAMES.length, colour], [(i + 1) / NAMES.length, colour]]),
        text: z.map((row) => Array.from(row, (cell) => NAMES[cell])),
        hovertemplate: "token %{x}, iteration %{y}: %{text}<extra></extra>",
      }],
      layout: {
        xaxis: { title: { text: "token, in order of birth" }, showgrid: false, zeroline: false },
        yaxis: { title: { text: "decode iteration" }, autorange: "reversed", showgrid: false, zeroline: false },
        height: 460,
      },
    };
  }

  function legend(z) {
    const there = new Set(z.flatMap((row) => [...new Set(row)]));
    byId("map-legend").replaceChildren(
      ...NAMES.flatMap((name, tier) => {
        if (!there.has(tier)) return [];
        const item = document.createElement("li");
        const swatch = document.createElement("i");
        swatch.className = `tier${tier}`;
        item.append(swatch, name);
        return [item];
      }),
    );
  }

  picker("map", items, (item) => {
    const made = figure(item);
    legend(made.data[0].z);
    draw("map", made);
  });
})();
