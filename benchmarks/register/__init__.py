"""The register of claims: what papers say, our numbers for it, and the verdicts."""
