"""Searches replayed on recorded thoughts: which would have been right, and at what cost.

A `bank` is walked by each of the `arms` (`walk`), a walked search becomes an episode (`visited`),
and is replayed under each policy and budget (`job`); `results` compares them.
"""
