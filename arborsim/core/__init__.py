"""What everything shares: errors, events, the tree, tiers, budgets, records, workers."""
