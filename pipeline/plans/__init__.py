"""One module per command that makes an output: from options and headers to a plan."""
