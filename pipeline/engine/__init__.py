"""A plan's units are run, recorded and assembled, and finished whenever they were cut off."""
