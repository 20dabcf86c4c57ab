"""The engine: a plan's units are run, recorded and assembled, and finished whenever they were cut off. Knows no command
and no format.
"""
