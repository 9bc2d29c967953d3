// Memory against what it buys, and policies by budgets: two views of the chosen trace.
(() => {
  function element(kind, text, name) {
    const made = document.createElement(kind);
    made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  // --- memory against what it buys ---

  const NOBODY = "nobody";
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
    buttons(byId("pareto-metric"), DATA.pareto[trace], (item) => {
      shown = item;
      fill(byId("pareto-policy"), [NOBODY, ...Object.keys(item.policies)], true);
      showPareto();
    });
    const { budgets, metrics } = DATA.heat[trace];
    buttons(byId("heat-metric"), metrics, (map) => showHeat(map, budgets));
    byId("heat").closest("section").hidden = !metrics.length;
  });
})();
