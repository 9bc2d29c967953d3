"""Attention, where the keys are, in whatever format they are stored.

Unless a function says otherwise:

*  Queries are ``[seqs, heads, queries, head_dim]``, keys and values ``[kv_heads, n, head_dim]``.
   Query head ``h`` reads KV head ``h // (heads // kv_heads)``, and `scale` is the factor of the
   inner products.
*  Masks are bool, True where a key may be read.  Keys and values must be finite also where they
   are masked (0 x NaN is NaN).
*  Outputs have the type of the queries.  A log-sum-exp is natural, float32, and float64 where the
   queries are.  A query that reads nothing has output 0 and log-sum-exp -inf.
*  Kernels in Triton run on CUDA, or on CPU tensors in Triton's interpreter
   (``TRITON_INTERPRET=1``).
"""
