"""The ktconvert command as `python -m ktconvert`."""

from ktconvert.pipeline.cli import main

if __name__ == "__main__":  # processes of multiprocessing import this module, too
    main()
