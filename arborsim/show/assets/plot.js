// Draws the figures of a page of plots.

DATA.forEach((figure, number) => draw(`plot-${number}`, figure));
