"""Lets kt-kernel 0.7.2 run with a torch for the CPU alone: import it before kt_kernel."""

import os

os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"  # there may be no CUDA stream

import torch

for _name in ("zeros", "empty", "full"):  # a CPU-only torch cannot pin memory, and kt-kernel asks for it

    def _unpinned(*args, _real=getattr(torch, _name), **options):  # noqa: B008
        options.pop("pin_memory", None)
        return _real(*args, **options)

    setattr(torch, _name, _unpinned)
