"""What a policy may observe, and the per-token scores computed from it."""
