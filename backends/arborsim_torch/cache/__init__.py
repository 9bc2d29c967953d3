"""The live KV cache: tokens in tiers, every tree node's stored once, in transformers' interface."""
