"""Where tokens live: tiers, pages and the ledger that accounts for every byte."""
