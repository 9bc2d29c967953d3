"""Live runs as the core sees them: requests, results, and the log on disk."""
