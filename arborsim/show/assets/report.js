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

sortable(byId("comparison"));
byId("download").addEventListener("click", () => download("arborsim-searches.csv", DATA.csv));
fill(byId("trace"), DATA.traces, false);
byId("trace-picker").hidden = DATA.traces.length < 2;
byId("trace").addEventListener("change", showTrace);
byId("time-budget").addEventListener("change", showTime);
if (DATA.memory.length) picker("memory", DATA.memory, (item) => draw("memory", item.figure));
else draw("memory", null);

// The other scripts listen for the trace: it is announced when all of them are there.
addEventListener("load", showTrace);
