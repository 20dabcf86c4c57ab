"""KTMoEWrapper with the bundled model's experts, and inputs for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ktconvert.native_quant import KTMoEWrapper

EXPERTS, HIDDEN, TOPK = 8, 256, 2
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def clear_state() -> Iterator[None]:
    """Remove buffers and deferred experts, so that tests do not affect each other.

    Used by modules that import it.
    """
    KTMoEWrapper.clear_buffer_cache()
    yield
    KTMoEWrapper.set_capture_batch_sizes([])
    KTMoEWrapper.clear_buffer_cache()
    KTMoEWrapper.exact = False


def make(weight_path: Path | str = "", **changed: Any) -> KTMoEWrapper:
    """Make a wrapper for layer 0 with two threads. changed: other arguments."""
    arguments: dict[str, Any] = {"layer_idx": 0, "num_experts": EXPERTS, "num_experts_per_tok": TOPK}
    arguments |= {"hidden_size": HIDDEN, "moe_intermediate_size": 256, "gpu_experts_mask": None, "cpuinfer_threads": 2}
    arguments |= {"threadpool_count": 1, "weight_path": weight_path, "chunked_prefill_size": 512}
    return KTMoEWrapper(**(arguments | {"method": "AMXINT8"} | changed))


def load(weight_path: Path, **changed: Any) -> KTMoEWrapper:
    """Make a wrapper and load its weights."""
    wrapper = make(weight_path, **changed)
    wrapper.load_weights(torch.arange(EXPERTS))
    return wrapper


def make_inputs(tokens: int, seed: int = 7, topk: int = TOPK) -> Batch:
    """Draw hidden states, ids of experts and routing weights."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :topk].contiguous()
    return torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16), ids, torch.rand(tokens, topk, generator=g)


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype and bits."""
    return left.dtype == right.dtype and torch.equal(left.cpu().view(torch.int16), right.cpu().view(torch.int16))
