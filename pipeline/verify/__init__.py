"""Checks of `ktconvert verify` (structure, hashes, source, second output), and their report."""
