"""Files: their layout before they are written, direct writing, atomic publishing, and memory maps."""
