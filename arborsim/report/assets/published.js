// Fills the page about published serving runs.

for (const [id, figure] of Object.entries(DATA.figures)) draw(id, figure);
