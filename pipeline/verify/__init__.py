"""`ktconvert verify`: what is checked (structure, hashes, source, another output), and how it is reported."""
