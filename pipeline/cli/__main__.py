"""python -m ktconvert.pipeline.cli is the ktconvert command."""

from ktconvert.pipeline.cli import main

main()
