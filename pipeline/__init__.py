"""The order of work: commands, plans, units, resuming, and what people see."""

__version__ = "0.1.0"
