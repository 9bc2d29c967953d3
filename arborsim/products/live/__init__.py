"""Live runs: a policy on a real model, tokens really removed."""
