"""Sweeps: thousands of replays and live runs, each a cell that is computed once.

::

    grid.toml --grid.py--> jobs: a cell each, named by what it depends on
                             |
                  run.py: those that are missing, here or on Ray
                             v
          DIR/cells/ab/ab12....parquet --cells.py--> rows, to filter, group and show
"""
