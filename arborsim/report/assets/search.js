// The trees of a search page: what was opened, kept and given up, and where its KV lives.

(() => {
  if (!DATA.trees.films.length) return;
  const FINISHED = 1;
  const SMALL = 6; // below this height of a row there is no room for marks and edges of bars
  const WORDS = 19; // from this height of a bar on there is room for words
  // In the order of the codes of `arborsim.products.search.trees`.
  const FATES = ["", "repeats another thought", "cannot be continued", "no more continuations were recorded"];
  const view = { colour: "memory", which: "opened", size: "fit" };

  // Where each thought of the layout is in the film: -1 if the search never opened it.
  function places(film, place) {
    if (!film.at) {
      film.at = new Int32Array(place.parent.length).fill(-1);
      film.nodes.forEach((node, k) => { film.at[node] = k; });
    }
    return film.at;
  }

  function stateOf(film, k, moment) {
    if (k < 0 || film.opened[k] > moment) return "never";
    if (film.dropped[k] >= 0 && film.dropped[k] <= moment) return "dropped";
    if (film.closed[k] < 0 || film.closed[k] > moment) return "running";
    return "kept";
  }

  TREE.arrange = (film, place) => {
    const at = places(film, place);
    if (view.which === "all") return place;
    const row = place.parent.map((_, i) => (at[i] < 0 ? null : film.row[at[i]]));
    return { ...place, row, rows: film.rows };
  };

  TREE.margin = 14; // for the marks of the last thoughts
  TREE.pitch = (rows) => {
    const even = Math.min(34, 640 / rows);
    const fit = even > 15 ? Math.max(23, even) : even; // a little more, where that makes room for words
    return view.size === "fit" ? Math.max(2, fit) : Math.max(26, fit);
  };

  // On bars that are high enough the beginning of the thought stands above its tiers.
  TREE.band = (height) => (height < WORDS ? height : height - 15);

  // Rewards from the lowest of the problem's to the highest: 0 to 1.
  function shades(place) {
    if (!place.shades) {
      const known = place.reward.filter((value) => value !== null);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      place.shades = place.reward.map((value) => (value === null ? null : high > low ? (value - low) / (high - low) : 1));
      place.span = known.length ? [low, high] : null;
    }
    return place.shades;
  }

  function write(node, text, x, y, kind) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "text");
    made.setAttribute("x", x);
    made.setAttribute("y", y);
    made.setAttribute("class", kind);
    made.textContent = text;
    node.group.append(made);
  }

  // The beginning of a thought on its bar, as far as there is room.
  function begin(node, text) {
    const room = Math.floor((node.size.width - 6) / 6.3);
    if (!text || room < 4 || node.size.height < WORDS) return;
    const plain = text.slice(0, room + 1).replace(/\s+/g, " ");
    const shown = plain.length > room ? `${plain.slice(0, room - 1)}…` : plain;
    write(node, shown, node.size.x + 4, node.size.y + 11.5, "said");
  }

  function prepare(node, i, place, shade, small) {
    if (shade !== null) node.frame.style.setProperty("--shade", shade.toFixed(3));
    else node.group.classList.add("unvalued");
    begin(node, i === 0 ? "prompt" : place.text[i]);
    if (small || i === 0 || place.end[i] !== FINISHED || place.verdict[i] === null) return;
    const [text, kind] = place.verdict[i] ? ["✓", "mark right"] : ["✗", "mark wrong"];
    write(node, text, node.size.x + node.size.width + 3, node.size.y + node.size.height / 2 + 4, kind);
  }

  TREE.dress = (film, place, moment, nodes, svg) => {
    const at = places(film, place);
    const shade = shades(place);
    const small = TREE.pitch(place.rows) < SMALL;
    const fresh = !svg.classList.contains("search");
    svg.classList.add("search");
    svg.classList.toggle("by-reward", view.colour === "reward");
    svg.classList.toggle("small", small);
    const counts = { never: 0, dropped: 0, running: 0, kept: 0, new: 0 };
    const last = moment === film.frames.length - 1;
    at.forEach((k, i) => {
      const state = stateOf(film, k, moment);
      const isNew = k >= 0 && film.opened[k] === moment && i > 0;
      counts[state] += 1;
      counts.new += isNew;
      const node = nodes[i];
      if (!node) return;
      if (fresh) prepare(node, i, place, shade[i], small);
      const classes = node.group.classList;
      for (const name of ["never", "dropped", "running", "kept"]) classes.toggle(name, name === state);
      classes.toggle("new", isNew);
      classes.toggle("handed", last && i === film.handed);
      if (node.edge) node.edge.classList.toggle("never", state === "never");
    });
    legend(film, place, counts, last);
    const box = svg.parentNode;
    if (fresh) box.scrollTop = nodes[0].size.y - box.clientHeight / 2; // begin at the prompt
  };

  // --- legend ---

  function entry(kind, text) {
    const item = document.createElement("li");
    if (kind) {
      const swatch = document.createElement("i");
      swatch.className = kind;
      item.append(swatch);
    }
    item.append(text);
    return item;
  }

  function legend(film, place, counts, last) {
    const thoughts = (count) => count.toLocaleString("en");
    const marks = [
      entry("s-new", `opened in this step: ${thoughts(counts.new)}`),
      entry("s-kept", `kept: ${thoughts(counts.kept + counts.running)}`),
      entry("s-dropped", `given up: ${thoughts(counts.dropped)}`),
      entry("s-never", `not computed: ${thoughts(counts.never)}`),
      entry("", "✓ right answer, ✗ wrong"),
    ];
    if (film.unseen) marks.push(entry("", `opened, but not drawn: ${thoughts(film.unseen)}`));
    if (last) {
      const verdict = film.correct === null ? "not judged" : film.correct ? "right" : "wrong";
      marks.push(entry("s-handed", `handed in: ${verdict}`));
    }
    byId("tree-marks").replaceChildren(...marks);
    if (view.colour !== "reward") return;
    const [low, high] = place.span ?? [NaN, NaN];
    const scale = document.createElement("li");
    const bar = document.createElement("i");
    bar.className = "ramp";
    scale.append(`reward ${low.toFixed(2)} `, bar, ` ${high.toFixed(2)}`);
    byId("tree-legend").replaceChildren(place.span ? scale : entry("", "no thought has a reward"));
  }

  // --- what is said about a thought ---

  function status(film, place, i, moment) {
    const k = film.at[i];
    if (k < 0) return "recorded, but this search never opens it";
    const state = stateOf(film, k, moment);
    if (state === "never") return "not opened yet";
    if (state === "dropped") return film.dropped[k] === moment ? "given up in this step" : "given up";
    if (state === "running") return "still running";
    const fate = FATES[film.fate[k]];
    if (i > 0 && place.end[i] === FINISHED) return `finished: ${fate || "holds an answer"}`;
    return moment === film.frames.length - 1 && fate ? `kept; ${fate}` : "kept";
  }

  TREE.tell = (film, place, i, moment) => {
    const lines = [i === 0 ? "prompt" : `thought ${place.number[i]}, depth ${place.depth[i]}`];
    if (place.text[i]) lines.push(place.text[i]);
    const facts = [`${place.tokens[i].toLocaleString("en")} tokens`];
    if (place.reward[i] !== null) facts.unshift(`reward ${place.reward[i].toFixed(3)}`);
    lines.push(facts.join(", "), status(film, place, i, moment));
    if (place.answer[i]) {
      const verdict = place.verdict[i] === null ? "not judged" : place.verdict[i] ? "right" : "wrong";
      lines.push(`answer ${place.answer[i]}: ${verdict}`);
    }
    if (moment === film.frames.length - 1 && i === film.handed) lines.push("handed in as the answer");
    return lines;
  };

  // --- choices ---

  function choice(id, key, items) {
    buttons(byId(id), items, (item) => {
      if (view[key] === item.key) return;
      view[key] = item.key;
      TREE.again();
    });
  }

  choice("tree-colour", "colour", [{ title: "Memory", key: "memory" }, { title: "Reward", key: "reward" }]);
  choice("tree-which", "which", [{ title: "Opened", key: "opened" }, { title: "All recorded", key: "all" }]);
  choice("tree-size", "size", [{ title: "Fit", key: "fit" }, { title: "Large", key: "large" }]);
})();
