// Every token's life as a column of colours: one search under one policy.
(() => {
  const NAMES = ["HBM", "HBM, quantised", "HBM, coarse", "DDR", "DDR, quantised", "DDR, coarse", "evicted", "not born yet"];
  const COLOURS = ["hbm", "quantised", "coarse", "ddr", "ddr-quantised", "ddr-coarse", "evicted", "card"].map((name) => `var(--${name})`);
  const { axes, items } = DATA.maps;
  if (!items.length) return;

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

  // Token by token: a cell for each token, or for the few that share one, at a moment that the address names.
  const [slider, find, moment, cells] = ["step", "find", "moment", "cells"].map((name) => byId(`map-${name}`));
  let shown = null; // tokens, iterations and cells of what is drawn
  const asked = new URLSearchParams(location.hash.startsWith("#map-section?") ? location.hash.slice(13) : "");

  function place() {
    const { tokens, iterations, z } = shown;
    const row = z[slider.value];
    const wanted = find.value === "" ? -1 : tokens.findLastIndex((first) => first <= Number(find.value));
    cells.replaceChildren(...tokens.flatMap((first, i) => {
      if (row[i] === 7 && i !== wanted) return [];
      const cell = document.createElement("i");
      const last = (tokens[i + 1] ?? first + 1) - 1;
      cell.className = `tier${row[i]}${i === wanted ? " found" : ""}`;
      cell.title = `${first === last ? `token ${first}` : `tokens ${first} to ${last}, mostly`}: ${NAMES[row[i]]}`;
      return [cell];
    }));
    const link = document.createElement("a");
    const [search, cell] = [byId("map-search").value, byId("map-cell").value];
    link.href = `#map-section?${new URLSearchParams({ search, cell, step: slider.value, token: find.value })}`;
    link.textContent = "link to this moment";
    const found = wanted < 0 ? "" : `, token ${find.value}: ${NAMES[row[wanted]]}`;
    moment.replaceChildren(`after iteration ${iterations[slider.value]}${found}, `, link);
  }
  slider.addEventListener("input", place);
  find.addEventListener("input", place);

  picker("map", items, (item) => {
    const made = figure(item);
    const { tokens, iterations } = axes[item.axes];
    shown = { tokens, iterations, z: made.data[0].z };
    slider.max = iterations.length - 1;
    if (!slider.dataset.begun) slider.value = slider.max;
    slider.dataset.begun = "yes";
    legend(made.data[0].z);
    draw("map", made);
    place();
  });
  if (asked.has("step")) {
    for (const name of ["search", "cell"]) {
      const select = byId(`map-${name}`);
      if (![...select.options].some((one) => one.value === asked.get(name))) continue;
      select.value = asked.get(name);
      select.dispatchEvent(new Event("change"));
    }
    [slider.value, find.value] = [asked.get("step"), asked.get("token") ?? ""];
    place();
    byId("map-section").scrollIntoView();
  }
})();
