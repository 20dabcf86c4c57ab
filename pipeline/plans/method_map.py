"""`cpu --method-map`: which layers have another method than --quant-method says, and what that rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.outputs import Format, formats_of, mixed
from ktconvert.layouts.outputs.numa import NUMA
from ktconvert.pipeline.options.quantization import CpuOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.quantizers.choice import Quantizer

FLAG = "--method-map"


def of_model(options: CpuOptions, fmt: Format, model: MoeModel) -> Format:
    """The format of --quant-method, or with --method-map the mix of it and others. Raises UsageError for a map that
    cannot be read or leaves nothing to mix, for methods that cannot be mixed, and for options that a mix does not have.
    """
    if not options.method_map:
        return fmt
    can = {name: one for name, one in formats_of("cpu", NUMA.layout).items() if mixed.can_be_mixed(one)}
    if fmt not in can.values():
        raise UsageError(f"--quant-method {options.quant_method}: {_not_mixed(fmt.name, can)}.")
    given = (
        (options.no_merge_safetensor, "--no-merge-safetensor", "is in safetensors alone"),
        (options.save_backward_weights, "--save-backward-weights", "has no matrices for fine-tuning"),
        (options.resume_layer > 0, "--resume-layer", "is resumed without a number"),
    )
    for is_given, flag, why in given:
        if is_given:
            raise UsageError(f"{FLAG}: an output with a method per layer {why}; leave out {flag}.")
    by_layer = dict.fromkeys(checkpoint.parse_layers(options.layers, model.layers), mixed.in_a_mix(fmt))
    for text in options.method_map:
        layers, sign, method = text.rpartition("=")
        if not sign:
            raise UsageError(f"{FLAG} {text}: give layers and their method, like 0-5=int8.")
        name = method.strip().lower()
        if name not in can:
            raise UsageError(f"{FLAG} {text}: {_not_mixed(method.strip(), can)}.")
        for layer in checkpoint.parse_layers(layers, model.layers, FLAG):
            if layer in by_layer:  # else --layers leaves it out
                by_layer[layer] = mixed.in_a_mix(can[name])
    if len(set(by_layer.values())) == 1:
        only = next(name for name in can if mixed.in_a_mix(can[name]) in by_layer.values())
        raise UsageError(f"{FLAG}: every layer would have {only}; give --quant-method {only}, and leave out {FLAG}.")
    return mixed.of_layers(by_layer)


def _not_mixed(name: str, can: dict[str, Format]) -> str:
    *first, last = can
    return f"{name} is no method that layers can be given; these are {', '.join(first)} and {last}"


def of_each(fmt: Format, notes_of: Callable[[Format], Iterable[str]]) -> Iterator[str]:
    """Notes on each format that layers have; those of a mix say on which."""
    for own in fmt.formats:
        yield from (f"{own.name}: {note}" if fmt.by_layer else note for note in notes_of(own))


def notes(fmt: Format, layers: Sequence[int], choice: Quantizer) -> Iterator[str]:
    """What the plan and the model card say of a mix; nothing of any other format."""
    for methods in mixed.methods_of(fmt, layers).values():
        listed = "; ".join(f"{name}: layers {numbers}" for name, numbers in methods.items())
        yield f"a method per layer, for the runtime of ktconvert: kt-kernel loads none of it ({listed})"
    if others := [own.name for own in fmt.formats if not choice.serves(own.encoding.grid)]:
        yield f"--scale {choice.name} changes nothing in layers of {' and '.join(others)}"
