"""python -m ktconvert.pipeline.cli is the ktconvert command."""

from ktconvert.pipeline.cli import main

if __name__ == "__main__":  # processes that multiprocessing starts import this, too
    main()
