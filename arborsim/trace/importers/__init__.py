"""Recordings that others made, turned into traces: logs of requests, and logs of tree searches.

What a source lacks stays absent: token ids and times that were not recorded are null and 0, and the
metadata of the trace says so.  What a source has and is wrong is never guessed at: `Damage`.
"""
