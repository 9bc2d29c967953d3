"""From a workload to the loads that a GPU can serve, and which GPU, policy and budget to take.

::

    workload_file -> workload (generate, arrivals)     what is asked, checked down to every name
                        |
                     demands                           each search replayed under each policy, once
                        |
                     runs -> evaluate                  a load and a seed; the largest load
                        |
                     plan -> recommend -> results      all candidates, one of them in words
                        |
                     sensitivity, timeline, files      what reports and files show beyond that

Which searches arrive, and when, depends on the seed alone: every candidate serves the same searches
at the same moments.
"""
