// Filters the claims by paper and verdict, opens rows, copies commands.  Without it the page shows every claim.

const claims = [...document.querySelectorAll("#claims tr.claim")];
const paper = byId("paper");
const verdict = byId("verdict");
const toggles = claims.map((row) => row.querySelector("details"));

function filter() {
  let shown = 0;
  for (const body of byId("claims").tBodies) {
    const own = !paper.value || body.dataset.paper === paper.value;
    let any = false;
    for (const row of body.querySelectorAll("tr.claim")) {
      const fits = own && (!verdict.value || row.dataset.verdict === verdict.value);
      row.hidden = row.nextElementSibling.hidden = !fits;
      any ||= fits;
      shown += fits;
    }
    body.hidden = !any;
  }
  byId("shown").textContent = `${shown} of ${claims.length} claims`;
  byId("none").hidden = shown > 0;
}

// A link to a claim opens it, whatever the filter.
function follow() {
  const row = claims.find((one) => one.id === decodeURIComponent(location.hash.slice(1)));
  if (!row) return;
  paper.value = verdict.value = "";
  filter();
  row.querySelector("details").open = true;
  row.scrollIntoView();
}

byId("filters").hidden = false;
for (const one of [paper, verdict]) one.addEventListener("change", filter);
byId("open-all").addEventListener("click", ({ target }) => {
  const open = target.getAttribute("aria-pressed") !== "true";
  target.setAttribute("aria-pressed", open);
  target.textContent = open ? "Close all" : "Open all";
  for (const one of toggles) one.open = open;
});
for (const button of document.querySelectorAll("#claims .copy")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
window.addEventListener("hashchange", follow);
filter();
follow();
