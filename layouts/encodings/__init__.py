"""How one matrix is stored as bytes: a file per family of encodings."""
