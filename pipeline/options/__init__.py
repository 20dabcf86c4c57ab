"""The options of every command: each declared once, as a field of a typed settings object."""
