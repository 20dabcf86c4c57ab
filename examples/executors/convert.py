"""`ktconvert cpu` from Python, with any concurrent.futures.Executor: what with_ray.py and with_mpi.py share."""

from concurrent.futures import Executor

import ktconvert


def convert(executor: Executor, source: str, output: str, method: str) -> None:
    """The same as `ktconvert cpu -i SOURCE -o OUTPUT --quant-method METHOD`; raises KTConvertError."""
    # A source may also be the id of a model that is in the hub's cache on every host. Threads are those of this
    # process; each worker takes the CPUs that it may use.
    ktconvert.convert("cpu", executor=executor, input=source, output=output, quant_method=method, threads=1)
