"""The options of every command: each is declared once, as a field of a typed settings object."""
