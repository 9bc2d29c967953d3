"""Live runs as the core sees them: what to run, what came of it, and the log on disk."""
