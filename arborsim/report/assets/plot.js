// Draws the figures of a page of plots.

DATA.plots.forEach((figure, number) => draw(`plot-${number}`, figure));
