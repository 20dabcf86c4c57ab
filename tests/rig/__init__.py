"""Helpers that several test files share.

pyproject.toml adds tests/ to pytest's path, hence `from rig import killpoint`. Files that are started as programs
(forks, oneshot, native_peer, layers) get `python -P`, which leaves this folder out of sys.path: its safetensors.py must
not replace the library.
"""
