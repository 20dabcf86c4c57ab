"""The stages: what the units of a plan are, and how one is made."""
