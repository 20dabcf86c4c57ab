"""Whether transformers has a place for every tensor of an output, and the reverse: loading on the meta device."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from typing import Any

from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant.runtime import transformers_version
from ktconvert.pipeline.models import loading
from ktconvert.pipeline.verify.checks import Check

NEEDS = ("torch", "transformers", "accelerate", "compressed_tensors")
DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
EXPERTS = re.compile(r".*\.layers\.(?P<layer>\d+)\.(?:.+\.)?experts\.")


def absent() -> str | None:
    """What to install before transformers can load an output; None: nothing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: pip install 'ktconvert[gpu]'"
    return transformers_version.refusal()


def check_reload(output: Output) -> tuple[Check, bool]:
    """Load every tensor's name, type and shape as from_pretrained does, with no weights behind them.

    A key that is missing, unexpected or of another shape is a problem where it belongs to routed experts of a layer
    that has some here; elsewhere it is the source's own (names and shapes are copied), which is reported. So is a
    model that transformers cannot build. The second result: whether the model is whole, so that it can compute.
    """
    if (why := absent()) is not None:
        return _unchecked(why)
    try:
        kind, config = model_class(output.root)
        expected = _shapes(kind, config)
    except Exception as error:  # whatever transformers raises for a config that it does not know
        return _unchecked(f"transformers cannot build it: {first_line(error)}")
    try:
        shapes, keys = _load(kind, config, output)
    except Exception as error:  # also what goes wrong while experts are put together
        return Check("", (f"transformers cannot load its tensors: {first_line(error)}",)), False
    layers = {place.layer for place, _ in output.tensors}
    wrong = [(f"transformers finds no tensor for {key}", _layer_of(key) in layers) for key in keys["missing_keys"]]
    wrong += [(f"transformers has no place for {key}", _layer_of(key) in layers) for key in keys["unexpected_keys"]]
    wrong += [
        (f"{key} becomes {list(shape)}, config.json wants {list(expected[key])}", _layer_of(key) in layers)
        for key, shape in shapes.items()
        if key not in keys["missing_keys"] and shape != expected.get(key, shape)
    ]
    experts, others = (sorted(problem for problem, routed in wrong if routed == which) for which in (True, False))
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    notes = [f"{others[0]}{more}: none of these experts', so the same as of the source"] if others else []
    notes += [caution for caution in (transformers_version.newer(),) if caution is not None]
    result = f"{kind.__name__} has a place for every routed expert, and an expert for every place"
    return Check(result, tuple(experts), tuple(notes)), not experts and not keys["missing_keys"]


def model_class(root: Any) -> tuple[Any, Any]:
    """The class of transformers that loads a directory, and the config that it takes, as the auto classes choose them.

    Raises what transformers does, ValueError where it has no class.
    """
    loading.share_cores()
    import transformers

    with quiet():
        config = transformers.AutoConfig.from_pretrained(root, trust_remote_code=False, local_files_only=True)
    loading.ask_for_predictions(config)
    for table in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in table:
            kind: Any = table[type(config)]
            if kind.config_class is config.sub_configs.get("text_config"):
                about = getattr(config, "quantization_config", None)
                config = config.get_text_config()
                if about is not None:
                    config.quantization_config = about
            return kind, config
    raise ValueError(f"it has no text model for {type(config).__name__}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and compressed-tensors, which write to stderr whatever their settings."""
    import transformers

    before, bars = logging.root.manager.disable, transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
        if bars:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _shapes(kind: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """What the config alone makes of the model."""
    import copy

    import torch

    with quiet(), torch.device("meta"):
        return {name: tuple(p.shape) for name, p in kind(copy.deepcopy(config)).state_dict().items()}


def _load(kind: Any, config: Any, output: Output) -> tuple[dict[str, tuple[int, ...]], dict[str, Iterable[str]]]:
    """The shapes of the loaded model, and from_pretrained's account of the keys.

    weight_shape comes empty: its values are those of the packed tensor (seen by check_numbers), from which transformers
    then takes them."""
    import torch

    stored = [*output.tensors.values(), *output.others.values()]
    tensors = {
        s.name: torch.empty(
            [0] if s.name.endswith(".weight_shape") else s.shape, dtype=getattr(torch, DTYPES[s.dtype]), device="meta"
        )
        for s in stored
    }
    with quiet():
        model, keys = kind.from_pretrained(
            None, config=config, state_dict=tensors, device_map={"": "meta"}, output_loading_info=True
        )
    return {name: tuple(p.shape) for name, p in model.state_dict().items()}, keys


def _layer_of(key: str) -> int | None:
    """The layer whose routed expert a key belongs to; None for all else, and for the experts of MTP blocks."""
    match = EXPERTS.search(f".{key}.")
    return int(match["layer"]) if match is not None and ".mtp." not in match[0] else None


def _unchecked(why: str) -> tuple[Check, bool]:
    return Check("not checked", notes=(f"not loaded: {why}",)), False


def first_line(error: Exception) -> str:
    """What an exception of others says, cut to one line."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[0] or type(error).__name__)[:200]
