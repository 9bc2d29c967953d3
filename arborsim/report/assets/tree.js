// The search tree as a film: one SVG bar per thought, coloured by where its KV lives.

// What another script on the page may change; `again` draws the tree anew.
const TREE = {
  arrange: (film, place) => place, // where the thoughts stand; those whose row is null are not drawn
  margin: 0, // pixels kept free to the right of the last bars
  pitch: (rows) => Math.max(11, Math.min(34, 620 / rows)), // height of a row, in pixels
  band: (height) => height, // how much of a bar's height shows the tiers, from below
  dress: () => {}, // (film, place, moment, nodes, svg): called when a moment is shown
  tell: null, // (film, place, i, moment): lines about a thought, in place of the usual ones
  again: () => {},
};

(() => {
  const TIERS = ["HBM", "HBM, quantised", "HBM, coarse", "DDR", "DDR, quantised", "DDR, coarse", "evicted"];
  const SELDOM = [2, 5]; // tiers that the legend leaves out where they are empty
  const SVG = "http://www.w3.org/2000/svg";
  const films = DATA.trees.films;
  const box = byId("tree-box");
  const slider = byId("tree-slider");
  if (!films.length) return;

  let film = null; // the chosen one, with `place` and `moments` filled in
  let place = null; // of its thoughts
  let nodes = []; // per node: its group, its tier rectangles, its edge; null if it is not drawn
  let cursor = -1; // the node that the arrow keys are at
  let timer = 0;

  function make(kind, attributes, parent) {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (parent) parent.appendChild(element);
    return element;
  }

  // Frames list only what changed: unroll them once into one table per moment.
  function unroll(frames, count) {
    let table = new Int32Array(TIERS.length * count);
    return frames.map((frame) => {
      table = table.slice();
      for (let i = 0; i < frame.changed.length; i += TIERS.length + 1) {
        table.set(frame.changed.slice(i + 1, i + 1 + TIERS.length), TIERS.length * frame.changed[i]);
      }
      return table;
    });
  }

  function geometry(place) {
    const room = Math.max(widthOf(box) - 4 - TREE.margin, 200);
    const scale = Math.max(0.45, Math.min(room / (place.width + 8), 2.6));
    const pitch = TREE.pitch(place.rows);
    const height = Math.min(26, Math.max(pitch - 4, 0.7 * pitch));
    return {
      width: place.width * scale + 8 + TREE.margin,
      height: place.rows * pitch + 10,
      x: (i) => 4 + place.x[i] * scale,
      y: (i) => 5 + place.row[i] * pitch + (pitch - height) / 2,
      w: (i) => place.w[i] * scale,
      h: height,
    };
  }

  function build() {
    place = TREE.arrange(film, DATA.trees.layouts[film.layout]);
    const at = geometry(place);
    const svg = make("svg", {
      width: at.width, height: at.height, viewBox: `0 0 ${at.width} ${at.height}`, role: "img",
      "aria-label": `Search tree of ${place.row.filter((row) => row !== null).length} thought blocks`,
    });
    const hatch = make("pattern", { id: "evicted", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, make("defs", {}, svg));
    make("rect", { width: 5, height: 5, class: "hatch-ground" }, hatch);
    make("line", { x1: 0, y1: 0, x2: 0, y2: 5, class: "hatch" }, hatch);
    const edges = make("g", {}, svg);
    nodes = place.parent.map((parent, i) => {
      if (place.row[i] === null) return null;
      let edge = null;
      if (parent >= 0) {
        const [x0, y0] = [at.x(parent) + at.w(parent), at.y(parent) + at.h / 2];
        const [x1, y1] = [at.x(i), at.y(i) + at.h / 2];
        const middle = x1 - Math.min(9, (x1 - x0) / 2);
        edge = make("path", { class: "edge", d: `M${x0},${y0}H${middle - 4}C${middle},${y0} ${middle - 4},${y1} ${x1},${y1}` }, edges);
      }
      const group = make("g", { class: "node", "data-node": i }, svg);
      const size = { x: at.x(i), y: at.y(i), width: at.w(i), height: at.h };
      const high = TREE.band(at.h);
      const band = { ...size, y: size.y + size.height - high, height: high };
      make("rect", { ...size, fill: "transparent" }, group); // so that an empty bar can be pointed at
      const frame = make("rect", { ...size, rx: 2, class: "frame" }, group);
      return { group, tiers: [], frame, edge, size, band };
    });
    // Scaled down where that leaves it readable, else it scrolls.
    if (at.width <= 2 * widthOf(box)) Object.assign(svg.style, { maxWidth: "100%", height: "auto" });
    box.replaceChildren(svg);
    cursor = -1;
  }

  // Made when there is something to show: a tree of thousands of thoughts has few in most tiers.
  function tierOf(node, t) {
    if (!node.tiers[t]) {
      node.tiers[t] = make("rect", { ...node.band, width: 0, class: `tier${t}` });
      node.group.insertBefore(node.tiers[t], node.frame);
    }
    return node.tiers[t];
  }

  function fillTiers(node, tokens, whole) {
    let x = node.size.x;
    tokens.forEach((count, t) => {
      if (!count && !node.tiers[t]) return;
      const width = (node.size.width * count) / whole;
      tierOf(node, t).setAttribute("x", x);
      tierOf(node, t).setAttribute("width", width);
      x += width;
    });
  }

  function activePath(leaves, parent) {
    const on = new Set();
    for (let node of leaves) {
      while (node >= 0 && !on.has(node)) {
        on.add(node);
        node = parent[node];
      }
    }
    return on;
  }

  function show(moment) {
    const frame = film.frames[moment];
    const table = film.moments[moment];
    const on = activePath(frame.active, place.parent);
    const totals = [...(frame.hidden ?? TIERS.map(() => 0))]; // of thoughts that are not drawn
    nodes.forEach((node, i) => {
      const tokens = table.subarray(TIERS.length * i, TIERS.length * (i + 1));
      const present = tokens.reduce((a, b) => a + b, 0);
      tokens.forEach((count, t) => { totals[t] += count; });
      if (!node) return;
      fillTiers(node, tokens, Math.max(place.tokens[i], 1));
      node.group.classList.toggle("on", on.has(i));
      node.group.classList.toggle("unborn", present === 0 && !on.has(i));
      if (!node.edge) return;
      node.edge.classList.toggle("on", on.has(i));
      if (on.has(i)) node.edge.parentNode.appendChild(node.edge); // above the edges it runs along
    });
    byId("tree-moment").textContent =
      `${moment + 1}/${film.frames.length} · ${frame.time_s.toPrecision(3)} s · ${frame.label}`;
    legend(totals);
    TREE.dress(film, place, moment, nodes, box.firstElementChild);
  }

  function legend(totals) {
    byId("tree-legend").replaceChildren(
      ...TIERS.flatMap((name, t) => {
        if (SELDOM.includes(t) && !totals[t]) return [];
        const item = document.createElement("li");
        const swatch = document.createElement("i");
        swatch.className = `tier${t}`;
        item.append(swatch, `${name}: ${totals[t].toLocaleString("en")} tokens`);
        return [item];
      }),
    );
  }

  // --- pointing at a node, or going there with the arrow keys ---

  function usual(i) {
    const status = place.pruned[i] ? "pruned in the end" : place.closed[i] ? "complete in the end" : "never completed";
    const lines = [i === 0 ? "prompt" : `thought block ${i}`, `${place.tokens[i].toLocaleString("en")} tokens, ${status}`];
    if (place.reward[i] !== null) lines.push(`reward ${place.reward[i].toFixed(3)}`);
    return lines;
  }

  function describe(i) {
    const moment = Number(slider.value);
    const table = film.moments[moment];
    const lines = TREE.tell ? TREE.tell(film, place, i, moment) : usual(i);
    const held = TIERS.map((name, t) => [name, table[5 * i + t]]).filter(([, tokens]) => tokens);
    if (!held.length && !TREE.tell) lines.push("not opened yet");
    for (const [name, tokens] of held) lines.push(`${name}: ${tokens.toLocaleString("en")}`);
    return lines.join("\n");
  }

  const tip = byId("tip");

  function tellAt(i, x, y) {
    tip.hidden = false;
    tip.textContent = describe(i);
    const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
    const top = y + 16 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${Math.max(top, 4)}px`;
  }

  function pointed(event) {
    const group = event.target.closest(".node");
    if (group) tellAt(Number(group.dataset.node), event.clientX, event.clientY);
    else tip.hidden = true;
  }

  function goTo(i) {
    nodes[cursor]?.group.classList.remove("cursor");
    cursor = i;
    nodes[i].group.classList.add("cursor");
    nodes[i].frame.scrollIntoView({ block: "nearest", inline: "nearest" });
    const at = nodes[i].frame.getBoundingClientRect();
    tellAt(i, at.left, at.bottom - 8);
  }

  // Left: the parent.  Right: the first child.  Up and down: the next thought of the same depth.
  function neighbour(key) {
    if (cursor < 0) return 0;
    const drawn = nodes.flatMap((node, i) => (node ? [i] : []));
    if (key === "ArrowLeft") return place.parent[cursor];
    if (key === "ArrowRight") return drawn.find((i) => place.parent[i] === cursor) ?? -1;
    const level = drawn.filter((i) => place.x[i] === place.x[cursor]).sort((a, b) => place.row[a] - place.row[b]);
    return level[level.indexOf(cursor) + (key === "ArrowDown" ? 1 : -1)] ?? -1;
  }

  box.addEventListener("pointermove", pointed);
  box.addEventListener("click", pointed);
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  box.addEventListener("blur", () => { tip.hidden = true; });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hidden = true;
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    const next = neighbour(event.key);
    if (next >= 0) goTo(next);
  });

  // --- the film ---

  function stop() {
    clearInterval(timer);
    timer = 0;
    byId("tree-play").textContent = "Play";
  }

  byId("tree-play").addEventListener("click", () => {
    if (timer) return stop();
    if (slider.value === slider.max) slider.value = 0;
    byId("tree-play").textContent = "Pause";
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      show(Number(slider.value));
      if (slider.value === slider.max) stop();
    }, 450);
  });
  slider.addEventListener("input", () => show(Number(slider.value)));

  const choose = (chosen) => {
    // The same search under another policy keeps the moment, so that policies can be compared.
    const same = film && film.search === chosen.search && film.frames.length === chosen.frames.length;
    film = chosen;
    film.moments ??= unroll(film.frames, DATA.trees.layouts[film.layout].parent.length);
    slider.max = film.frames.length - 1;
    if (!same) slider.value = Math.floor(0.7 * (film.frames.length - 1));
    build();
    show(Number(slider.value));
  };

  let resizing = 0;
  const rebuild = () => { build(); show(Number(slider.value)); };
  window.addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(rebuild);
  });
  PAPER.addEventListener("change", rebuild);

  TREE.again = () => film && rebuild();
  addEventListener("load", () => picker("tree", films, choose)); // when all scripts are there
})();
