"""One small file per published method."""
