"""Settings that make hypothesis draw the same examples on each machine, whichever tests ran before."""

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers


def fix_draws() -> None:
    """Load a profile in which neither a slow machine nor a new draw can fail a run."""
    settings.register_profile(
        "same everywhere", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("same everywhere")
    # Hypothesis also draws constants from those modules of this project that are loaded, which depend on the tests
    # that ran before in the process. No setting switches this off.
    # Empty, since only the replaced function fills it
    providers._get_local_constants = lambda: providers._local_constants
