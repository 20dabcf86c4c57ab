"""What runs, in which order, and what is already done."""
