"""Many searches on one machine: demands recorded once, then played together by a serving engine.

A policy knows no clock, so what a search asks of a machine does not depend on who else is served.
`record.record_demands` replays episodes under a policy and reduces each to a `demand.SearchDemand`:
phases in order, in bytes and tokens, with decode iterations as pieces in which everything grows by
the same amount per iteration.  `engine.serve` plays any number of demands on one machine, and
`report.ServingReport` says what came of it::

    machine = Machine(profile, geometry, recall="stream")
    demands = list(record_demands(trace, policy, Budget.parse("0.5"), machine))
    arrivals = Timed(((0.0, 0), (1.5, 1)))            # seconds, number of a demand
    report = serve(demands, profile, geometry, arrivals, ServingOptions(preemption="recompute"))

Who plays the same demands often makes a `engine.ServingEngine` once and calls its `run` with other
arrivals.  Demands are saved and loaded as small ``.npz`` files.

What is exact and what is not:

- A demand alone on an idle machine of the profile it was recorded on takes the seconds and the peak
  bytes of the replay itself.  On another profile, or beside others, its transfers take another time
  than when it was recorded, but what they carry stays: tokens that were read from HBM because their
  copy had not finished, and tokens that were not fetched because their branch had ended.
- `arborsim.simulator.serving` plays the same rules event by event; both agree to rounding.
- The rules are those of `server`; the options, `options.ServingOptions`.
"""
