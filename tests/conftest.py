"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# Machines are shared and slow at times: how long an example takes says nothing about the code.
settings.register_profile("arborsim", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("arborsim")
