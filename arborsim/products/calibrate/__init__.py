"""Calibration: hyper-parameters that the papers found by measuring, measured on other models.

`arborsim calibrate` makes small TOML files, ``arborsim replay --calibration FILE`` uses them.  The
statistics live here and need no framework. What has to be asked of a live model is asked through
`arborsim.products.calibrate.backend`.
"""
