"""What manifest and shards of an output say of its experts, held against the bytes before these are used."""

from __future__ import annotations

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import AGAIN, Output
from ktconvert.native_quant.runtime.methods import LIMIT, METHODS
from ktconvert.native_quant.runtime.swiglu import Swiglu, in_config


def require_as_in_manifest(output: Output, measured: Measure) -> None:
    """Raises UnsupportedError where method or number of NUMA parts are not those of the bytes."""
    for name, actual in (("method", measured.method), ("numa", measured.numa)):
        recorded = output.facts.get(name, actual)
        if recorded != actual:
            raise UnsupportedError(
                f"{output.root / manifest.NAME}: says {name} {recorded}, the weights beside it have {actual}; {AGAIN}."
            )


def require_as_in_metadata(output: Output, layer: int, measured: Measure, swiglu: Swiglu) -> None:
    """Raises UnsupportedError where the metadata in our own shards are not what their byte counts say, and what the
    layer is to compute. Loose files have none: the manifest says what their experts compute.
    """
    count, hidden, intermediate = measured.shapes[layer]
    actual = {
        "method": measured.method,
        "numa": str(measured.numa),
        "num_experts": str(count),
        "hidden_size": str(hidden),
        "moe_intermediate_size": str(intermediate),
        "weights_on": "output",
        "activation": swiglu.activation,
    }
    of_layer = {shard: about for shard, about in output.metadata.items() if about.get("layer") == str(layer)}
    if output.loose:
        computed = {name: output.facts.get(name, "not recorded") for name in ("activation", "weights_on")}
        of_layer = {manifest.NAME: {name: said for name, said in computed.items() if said != "not recorded"}}
    for shard, metadata in of_layer.items():
        if "activation" in metadata and _is_in_config(output, layer, measured.method, metadata["activation"], swiglu):
            actual["activation"] = metadata["activation"]
        for name, value in actual.items():
            if name in metadata and metadata[name] != value:
                given = name == "activation" and _may_be_limited(measured.method)
                remedy = "give swiglu_limit and swiglu_alpha as config.json of the model has them" if given else AGAIN
                raise UnsupportedError(
                    f"{output.root / shard}: its {'model' if output.loose else 'header'} says {name} {metadata[name]}, "
                    f"its bytes and this runtime say {value}; {remedy}."
                )


def _is_in_config(output: Output, layer: int, method: str, activation: str, swiglu: Swiglu) -> bool:
    """Whether these are just the settings that config.json has for the layer, which may have none where others do.

    Raises UnsupportedError where the method could compute what config.json says and the settings are others.
    """
    configured = in_config(output.config, activation, layer)
    if configured in (None, swiglu) or not _may_be_limited(method):
        return configured == swiglu
    raise UnsupportedError(
        f"{output.root}: the experts of layer {layer} have {configured} by config.json, not "
        f"{swiglu}; give what config.json says."
    )


def _may_be_limited(method: str) -> bool:
    return method in METHODS and LIMIT in METHODS[method].swiglu
