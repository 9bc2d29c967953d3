"""Hardware profiles, model geometries, and the cost model that turns both into seconds."""
