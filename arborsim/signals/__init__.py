"""Per-token scores, computed from what a policy may observe."""
