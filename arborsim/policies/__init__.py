"""KV-cache policies: the contract, the building blocks, and one small file per published method."""
