"""`ktconvert cpu` from Python, with any concurrent.futures.Executor: what with_ray.py and with_mpi.py share."""

from concurrent.futures import Executor
from pathlib import Path

from ktconvert.pipeline.engine.plan import Request
from ktconvert.pipeline.plans.commands import plan_request, run
from ktconvert.pipeline.ui.progress import Reporter


def convert(executor: Executor, source: str, output: str, method: str) -> None:
    """The same as `ktconvert cpu -i SOURCE -o OUTPUT --quant-method METHOD`; raises KtconvertError."""
    settings = {
        "quant_method": method,
        "threadpool_count": 2,
        "layers": "all",
        "kept_layers": None,
        "no_merge_safetensor": False,
        "save_backward_weights": False,
        "non_experts": "skip",
        "max_shard_size": None,
        "arch_file": None,
    }
    tuning = {"cpuinfer_threads": 1}  # of this process; each worker takes the CPUs that it may use
    here = str(Path(source).absolute())  # or the id of a model that is in the hub's cache on every host
    run(plan_request(Request("cpu", here, Path(output).absolute(), settings, tuning)), executor, Reporter())
