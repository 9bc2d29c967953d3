"""One small file per published method, and the baselines."""
