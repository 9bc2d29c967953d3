"""Attention over pools of keys and values: pure functions on tensors, nothing about trees.

Shapes throughout: queries ``[seqs, heads, queries, head_dim]``, keys and values
``[kv_heads, n, head_dim]`` shared by all sequences, in any order (rotary positions are applied).
Query head ``h`` reads KV head ``h // (heads // kv_heads)``; the heads of a group become rows of one
matrix, so keys and values are never repeated.  Whatever attends returns its output together with
the natural logarithm of its softmax's denominator, so that parts can be merged.
"""
