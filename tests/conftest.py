"""Settings for all tests."""

from hypothesis import HealthCheck, settings

from arborsim.report import progress

# Machines are shared and slow at times: how long an example takes says nothing about the code.
settings.register_profile("arborsim", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("arborsim")
# Errors are one line, also where loading a model takes long enough for a line of progress.
progress.LINE_S = 3600.0
