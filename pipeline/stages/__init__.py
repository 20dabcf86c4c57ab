"""The stages: how a plan's work is cut into units, and how each unit writes its file."""
