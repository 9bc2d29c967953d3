"""Search algorithms replayed on recorded banks of thoughts."""
