"""arborsim: what a KV-cache policy costs, and what it breaks, when a language model searches.

A trace-driven discrete-event simulator that replays recorded searches (attention, hidden
states, tree events) against KV-cache policies.  The policies are plain NumPy objects that know no
simulator; the backend in ``arborsim_torch`` records live models.
"""

__version__ = "0.1.0"
