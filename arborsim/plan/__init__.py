"""From a workload to the loads that a GPU can serve: what is asked, and what it is asked of.

A workload (`arborsim.plan.workload`) names a mix of searches, how they arrive, a model, the
candidates, a target and prices.  The searches of the mix are recorded traces, or drawn from stated
distributions (`arborsim.plan.generate`); which of them arrives next (`arborsim.plan.arrivals`)
and when (`arborsim.plan.arrivals`) depends on the seed alone, so every candidate serves the
same searches at the same moments.
"""
