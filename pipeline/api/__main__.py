"""The ktconvert command as `python -m ktconvert`."""

import runpy

if __name__ == "__main__":  # processes of multiprocessing import this module, too
    runpy.run_module("ktconvert.pipeline.cli", run_name="__main__", alter_sys=True)
