"""How a file appears, is mapped, and is laid out before it is written."""
