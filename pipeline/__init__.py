"""What runs, in which order, and what is already done."""

__version__ = "0.1.0"
