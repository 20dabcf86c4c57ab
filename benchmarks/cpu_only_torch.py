"""Makes kt-kernel 0.7.2 run with a CPU-only torch; import it before kt_kernel."""

import os

os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"  # there may be no CUDA stream

import torch

for _name in ("zeros", "empty", "full"):  # kt-kernel asks for pinned memory, which a CPU-only torch does not have

    def _unpinned(*args, _real=getattr(torch, _name), **options):  # noqa: B008
        options.pop("pin_memory", None)
        return _real(*args, **options)

    setattr(torch, _name, _unpinned)
