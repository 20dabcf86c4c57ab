"""What hypothesis draws: the same everywhere, whatever the machine, and whichever tests a process has run before."""

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers


def same_everywhere() -> None:
    """Neither a slow machine nor another draw may fail a run."""
    settings.register_profile(
        "same everywhere", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("same everywhere")
    # It also draws constants that it finds in this project's modules, in those that are loaded: they depend on the
    # tests that ran before in the same process. No setting says otherwise.
    providers._get_local_constants = lambda: providers._local_constants  # empty: what fills it was this function
