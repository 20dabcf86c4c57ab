"""The server that all tests of a process share for commands that load models: its imports take ten seconds."""

import atexit
import contextlib
import functools
import importlib.util
import tempfile
from pathlib import Path

from rig import forks, killpoint, shims
from rig.conversion import ENVIRONMENT

OURS = (
    "cli.conversion",
    "plans.cpu",
    "plans.gpu",
    "calibration.layered_model",
    "models.fine_tuning",
    "models.evaluate",
)
MODULES = (
    *("accelerate", "datasets", "compressed_tensors.compressors", "llmcompressor.modifiers.gptq.gptq_quantize"),
    *("transformers.modeling_utils", "transformers.trainer", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
    *(f"ktconvert.pipeline.{name}" for name in OURS),
    "rig.documents",
)


@functools.cache
def model_server() -> forks.Forks:
    """Return the server, with the shims of killpoint.c and full.c, which do nothing unless a run's environment asks."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    full = shims.build(folder, "full", Path(shims.__file__).with_name("full.c").read_text())
    modules = [
        name for name in MODULES if importlib.util.find_spec(name.partition(".")[0])
    ]  # not all with `make compat`
    return stack.enter_context(forks.Forks([killpoint.build(folder), full], modules=modules, env=ENVIRONMENT))
