"""Conversion of mixture-of-experts checkpoints into expert weights for the CPU and the GPU, and inference with them.

The names in `__all__` and those of `ktconvert.errors` are public, and a few for programs that use kt-kernel
(docs/reference/python.md). CHANGELOG.md lists changes, and before 1.0 only a new minor version removes names.

These examples run in a clone of the repository. Options of the command line are keyword arguments with underscores, and
have the same defaults:

>>> import ktconvert
>>> model = "examples/qwen3-moe-small"
>>> (plan,) = ktconvert.plan("cpu", model, "model-int8", quant_method="int8", numa=1)
>>> plan.facts["method"], len(plan.units)
('AMXINT8', 2)
>>> ktconvert.convert("cpu", model, "model-int8", quant_method="int8", numa=1)
[PosixPath('.../model-int8')]
>>> report = ktconvert.verify("model-int8", against=model)
>>> report.ok, [check.name for check in report.checks][-2:]
(True, ['hashes', 'source'])

Failures raise KTConvertError with the sentence and the exit code of the command line:

>>> try:
...     ktconvert.plan("cpu", "nowhere", "out")
... except ktconvert.KTConvertError as error:
...     print(error.exit_code, error)
5 nowhere: does not exist; check the path, or give a hub id such as org/name.

KTMoEWrapper computes one layer's experts with torch, as kt-kernel's class of the same name does:

>>> import torch
>>> experts = ktconvert.KTMoEWrapper(
...     layer_idx=0, num_experts=8, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=256,
...     gpu_experts_mask=None, cpuinfer_threads=1, threadpool_count=1, weight_path="model-int8",
...     chunked_prefill_size=512, method="AMXINT8",
... )
>>> experts.load_weights()
>>> hidden, ids = torch.ones(3, 256, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
>>> experts.forward(hidden, ids, torch.full((3, 2), 0.5)).shape
torch.Size([3, 256])

KTExperts computes the same with NumPy arrays of BF16 bits, and without torch:

>>> import numpy as np
>>> experts = ktconvert.KTExperts.load("model-int8", layer=0)
>>> ids, weights = np.array([[0, 1]] * 3), np.full((3, 2), 0.5, np.float32)
>>> experts.forward(np.zeros((3, experts.hidden), np.uint16), ids, weights).shape
(3, 256)

KTConvertConfig loads converted experts into a model of transformers:

>>> from transformers import AutoModelForCausalLM
>>> config = ktconvert.KTConvertConfig(cpu_weights="model-int8", threads=1)
>>> loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype="bfloat16")
>>> loaded(torch.tensor([[1, 2, 3]])).logits.shape[:2]
torch.Size([1, 3])
"""

# In the repository, this file is pipeline/api/__init__.py. Modules are imported when they are used, since converting
# needs no torch. __init__.pyi tells editors and type checkers the types.

from importlib import import_module as _import_module

_MODULES = {
    "KTCheck": "_results",
    "KTConvertConfig": "native_quant",
    "KTConvertError": "layouts.errors",
    "KTExperts": "native_quant",
    "KTMoEWrapper": "native_quant",
    "KTPlan": "_results",
    "KTProjectionError": "_results",
    "KTReport": "_results",
    "KTUnit": "_results",
    "__version__": "pipeline",
    "convert": "_functions",
    "plan": "_functions",
    "verify": "_functions",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(_import_module(f"ktconvert.{_MODULES[name]}"), name)
    if name == "errors":
        return _import_module("ktconvert.errors")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    has_packages_of = _import_module("ktconvert.native_quant.runtime.required_packages").has_packages_of
    return [name for name in __all__ if has_packages_of(name)]  # help() imports all of them
