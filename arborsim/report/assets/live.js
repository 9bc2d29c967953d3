// Fills the page of a live run.

section("accuracy", DATA.accuracy);
if (DATA.accuracy) draw("accuracy", DATA.accuracy);

function showTime() {
  const chosen = DATA.time.find((item) => item.budget === byId("time-budget").value);
  draw("time", chosen?.figure);
}

fill(byId("time-budget"), DATA.time.map((item) => item.budget), false);
byId("time-picker").hidden = DATA.time.length < 2;
byId("time-budget").addEventListener("change", showTime);
showTime();

if (DATA.memory.length) {
  picker("memory", DATA.memory, (item) => draw("memory", item.figure));
  const searches = new Set(DATA.memory.map((item) => item.search));
  if (searches.size === 1) {
    byId("memory-search").parentElement.style.display = "none";
    byId("memory-note").textContent = `One search: ${[...searches][0]}.`;
  }
} else {
  section("memory", false);
}
