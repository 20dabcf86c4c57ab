"""The plan of the commands that quantize experts, `cpu` and `gpu`: rounding or GPTQ, statistics, a method per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError
from ktconvert.layouts.files.facts import CalibrationFacts, OutputFacts
from ktconvert.layouts.outputs import Format, cards, configs, formats_by_option, loose, mixed
from ktconvert.layouts.outputs.numa import NUMA
from ktconvert.layouts.statistics.folder import (
    COUNTS,
    DOCUMENT,
    InputStatistics,
    open_model_imatrix,
    open_model_moments,
)
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments
from ktconvert.layouts.tensors import format_ranges
from ktconvert.pipeline.engine.plan import Hooks, KeptFolder, Needs, Plan, SideOutput, tool_version
from ktconvert.pipeline.engine.threads import WAITING
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.models.text_datasets import describe_dataset
from ktconvert.pipeline.options.conversion_options import CpuOptions, QuantizationOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.stages import copy_tensors, expert_files, quantize_experts
from ktconvert.pipeline.stages.quantize_experts import EQUALIZED, equalize_for_format
from ktconvert.quantizers.equalizing import THRESHOLD
from ktconvert.quantizers.quantizer import ABSMAX, Quantizer

MAP = "--method-map"
EQUALIZED_NOTE = (
    f"experts whose columns of down_proj differ by more than {THRESHOLD:g} (`inspect --columns`) are equalized; the "
    "manifest and the model card will list them"
)
Q = TypeVar("Q", bound=QuantizationOptions)


def prepare_options(options: Q) -> Q:
    """Return the options with everything that the first run records: the text of --arch-file, for GPTQ the machine.

    Raises KtconvertError if GPTQ needs packages that are missing.
    """
    options = checkpoint.with_arch_row(options)
    if not options.calibrated:
        return options
    from ktconvert.pipeline.calibration import requirements
    from ktconvert.pipeline.plans import calibration_run

    requirements.require_libraries(options.CALIBRATED_BY)
    return calibration_run.record_machine(options, with_statistics=options.gptq.saves_statistics)


def build_plan(
    options: QuantizationOptions,
    model: MoeModel,
    fmt: Format,
    layers: Sequence[int],
    others: Sequence[OutputTensor],
    facts: OutputFacts,
    metadata: Mapping[str, str],
    *,
    quantizer: Quantizer = ABSMAX,
    numa: int = 1,
    backward: bool = False,
    statistics: InputStatistics | None = None,
    card_notes: Sequence[str] = (),
    notes: Sequence[str] = (),
    ignore: Sequence[str] = (),
    left_out: Sequence[str] = (),
    non_experts: str = "keep",
    loose_files: bool = False,
    kept_layers: tuple[int, ...] | None = None,
) -> Plan:
    """Return the plan that quantizes experts, by rounding or in a calibration run, and copies other tensors.

    others      non-expert tensors to copy
    quantizer   how codes are chosen; statistics: of the experts' inputs, if it needs them
    numa        number of NUMA slices; backward: also make the matrices for fine-tuning
    card_notes  sentences for the plan and the model card; notes: only for the plan
    ignore      patterns of modules that are not quantized
    left_out    files of the checkpoint that are not copied
    """
    source, side_output, run = model.source, None, None
    if options.calibrated:
        from ktconvert.pipeline.calibration.gather_statistics import KEYS
        from ktconvert.pipeline.plans import calibration_run

        stage: Stage[Any] = calibration_run.gptq_stage(
            options, model, fmt, metadata, quantizer=quantizer, numa=numa, loose_files=loose_files
        )
        run = calibration_run.plan_gptq_run(options, model, fmt)
        if options.gptq.save_statistics is not None:
            side_output = SideOutput(options.gptq.save_statistics, KEYS)
    else:
        stage = quantize_experts.stage(
            model,
            fmt,
            layers,
            quantizer=quantizer,
            numa=numa,
            backward=backward,
            loose_files=loose_files,
            max_shard_size=options.max_shard_size,
            metadata=metadata,
            statistics=statistics,
            options=options.weights,
        )
    if model.equalized:
        facts = {**facts, EQUALIZED: []}
    stages = [stage]
    if others:
        stages.append(copy_tensors.stage(source, others, options.max_shard_size, metadata))
    entries = fmt.description.config_entries(fmt, facts, ignore, tool_version())
    config = (
        configs.config_json(source.config, entries, is_whole_model=fmt.arrangement.is_whole_model)
        if source.has_config
        else None
    )
    copied = [name for name in source.companions() if name not in left_out]
    copying = copy_tensors.peak_memory(others) if others else 0

    def peak_memory(threads: int) -> int:
        """Return the size of the buffers of all packing threads, which do not grow with the model."""
        packing, making = threads + WAITING, 0
        if not options.calibrated:
            reading = 0 if statistics is None else statistics.memory_bytes(packing)
            making = reading + expert_files.peak_memory(stage.units, packing)
        needed = checkpoint.BASE_MEMORY + max(making, copying)
        return needed if run is None else run.peak_memory(needed)

    def readme(stats: Sequence[Mapping[str, Any]]) -> bytes:
        all_facts: OutputFacts = {**facts, **facts_from_stats(stats)}
        base, card, version = checkpoint.base_model(source), fmt.description.card, tool_version()
        return cards.make_model_card(
            card, all_facts, base, card_notes, stats, version, loose=loose_files, non_experts=non_experts
        )

    return Plan(
        options=options,
        files=checkpoint.source_files(source),
        reads=(*source.paths(), *checkpoint.option_files(options), *_statistics_files(statistics)),
        stages=tuple(stages) if loose_files else checkpoint.number_shards(stages),
        facts={**facts, **({"kept_layers": list(kept_layers)} if kept_layers else {})},
        notes=(
            *card_notes,
            *((EQUALIZED_NOTE,) if model.equalized else ()),
            *notes,
            *(() if run is None else run.notes),
        ),
        companions=checkpoint.companions(source.companion_root, copied),
        config=config,
        has_index=not loose_files,
        kept_folders=None if kept_layers is None else tuple(map(_folder_pattern, kept_layers)),
        side_output=side_output,
        needs=Needs() if run is None else run.needs,
        hooks=Hooks(
            peak_memory=peak_memory,
            render_card=readme,
            measured_facts=facts_from_stats,
            require_ready=(lambda: None) if run is None else run.require_ready,
            check=partial(_check, calibrated=options.calibrated)
            if fmt.arrangement.is_whole_model
            else lambda assembled: None,
        ),
    )


def _folder_pattern(layer: int) -> KeptFolder:
    return KeptFolder(loose.layer_folder(layer), "_numa_*/*.kt")


def calibration_facts(options: QuantizationOptions) -> OutputFacts:
    """Return the data and the settings of GPTQ; nothing without it."""
    if not options.calibrated:
        return {}
    own = options.gptq
    calibration: CalibrationFacts = {
        **describe_dataset(options.samples),
        "dampening": own.dampening_frac,
        "calibrate": own.calibrate,
        "steps": own.gptq_steps,
        "engine": options.engine,
    }
    return {"calibration": calibration}


def facts_from_stats(stats: Sequence[Mapping[str, Any]]) -> OutputFacts:
    """Return facts that only finished units know: `equalized`, and `too_few_tokens`, the experts that GPTQ skipped."""
    few, equalized = (_list_experts(stats, name) for name in ("rounded_experts", "equalized_experts"))
    return {**({"too_few_tokens": few} if few else {}), **({EQUALIZED: equalized} if equalized else {})}


def _list_experts(stats: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return the experts in this entry of the layers' figures, as in "layer 3: 0-5, 7"."""
    experts: dict[int, list[int]] = {}
    for s in stats:
        if s.get(name):
            experts.setdefault(s["layer"], []).extend(s[name])
    return [f"layer {layer}: {format_ranges(experts[layer])}" for layer in sorted(experts)]


def equalize_model(options: QuantizationOptions, model: MoeModel, fmt: Format) -> MoeModel:
    """Return the model, equalized with --equalize. Raises if experts would compute something else, or none gains."""
    if not options.equalize:
        return model
    if not all(function.can_scale_up for function in model.functions.values()):
        raise UnsupportedError(
            f"--equalize: the experts of {model.arch.name} compute {model.function_names}, which changes if up_proj is "
            "scaled; leave out --equalize."
        )
    if options.calibrated and options.engine == "oneshot":
        raise UsageError("--equalize: --engine oneshot reads the original checkpoint; leave out one of them.")
    if options.gptq.save_statistics is not None and options.calibrated:
        remedy = "leave out one of them, or gather statistics with `ktconvert calibrate`"
        raise UsageError(f"--equalize: --save-statistics would describe the equalized experts; {remedy}.")
    model = equalize_for_format(model, fmt)
    if not model.equalized:
        why = (
            f"{fmt.name} keeps every number of these experts, or scales rows and columns together; leave out --equalize"
        )
        raise UsageError(f"--equalize requires experts that are rounded to integers or MXFP4: {why}.")
    return model


def _check(assembled: Path, calibrated: bool) -> None:
    """Check a whole model as its loaders do, and with transformers if that is loaded already."""
    from ktconvert.pipeline.verify.verify import require_sound

    require_sound(assembled, load=calibrated)


def open_input_statistics(quantizer: Quantizer, options: CpuOptions, model: MoeModel) -> InputStatistics | None:
    """Open the importance matrix or the second moments that the options name; None if they name none.

    Raises UsageError if they are needed and missing or the reverse, and InputError for those of a different model or
    than those of the first run.
    """
    given = options.importance
    path = given.file
    reads_file = quantizer.requires_importance or (quantizer.uses_moments and given.imatrix is None)
    if path is not None and not reads_file:
        flag = "--statistics" if given.imatrix is None else "--imatrix"
        raise UsageError(f"{flag} is not for --scale {quantizer.name}; leave it out.")
    if path is None:
        if quantizer.requires_importance:
            raise UsageError(
                f"--scale {quantizer.name} needs the importance of inputs; give --imatrix FILE or --statistics DIR."
            )
        return None
    statistics = (
        open_model_imatrix(path, model) if quantizer.requires_importance else open_model_moments(path.parent, model)
    )
    first_sha256 = getattr(options, f"{statistics.manifest_key}_sha256")
    if first_sha256 not in (None, statistics.sha256):
        raise InputError(
            f"{statistics.path}: differs from the file at the start of this conversion (its sha256 was "
            f"{first_sha256[:12]}, is {statistics.sha256[:12]}); restore the old file and resume."
        )
    return statistics


def _statistics_files(inputs: InputStatistics | None) -> tuple[Path, ...]:
    """Return the files of the input statistics, and the files next to them that describe them."""
    if inputs is None:
        return ()
    own = (file.path for file in inputs.layers.values()) if isinstance(inputs, SecondMoments) else (inputs.path,)
    return (*own, *(inputs.path.with_name(name) for name in (DOCUMENT, COUNTS)))


def input_statistics_facts(inputs: InputStatistics | None, layers: Sequence[int]) -> OutputFacts:
    """Return the sha256 of the input statistics, and `without_counts`, the experts of these layers without any."""
    if inputs is None:
        return {}
    unreached = {layer: inputs.experts_without_tokens(layer) for layer in layers}
    listed = [f"layer {layer}: {format_ranges(experts)}" for layer, experts in unreached.items() if experts]
    facts: OutputFacts
    facts = {"imatrix": inputs.sha256} if isinstance(inputs, Imatrix) else {"second_moments": inputs.sha256}
    return {**facts, **({"without_counts": listed} if listed else {})}


def notes_on_unreached(facts: OutputFacts) -> Iterator[str]:
    """Yield a note on experts that no token reached."""
    if listed := facts.get("without_counts"):
        yield f"no token reached these experts, whose scales are those of --scale mse: {'; '.join(listed)}"


def apply_method_map(options: CpuOptions, fmt: Format, model: MoeModel) -> Format:
    """Return the format of --quant-method, or with --method-map a mix of formats. Raises UsageError for a wrong map."""
    if not options.method_map:
        return fmt
    can = {name: one for name, one in formats_by_option("cpu", NUMA.layout).items() if mixed.can_be_mixed(one)}
    if fmt not in can.values():
        raise UsageError(f"--quant-method {options.quant_method}: {_not_mixed(fmt.name, can)}.")
    given = (
        (options.no_merge_safetensor, "--no-merge-safetensor", "is only in safetensors"),
        (options.save_backward_weights, "--save-backward-weights", "has no matrices for fine-tuning"),
        (options.resume_layer > 0, "--resume-layer", "is resumed without a number"),
    )
    for is_given, flag, why in given:
        if is_given:
            raise UsageError(f"{MAP}: an output with a method per layer {why}; leave out {flag}.")
    by_layer = dict.fromkeys(checkpoint.parse_layers(options.layers, model.layers), mixed.rename_for_mixed_output(fmt))
    for text in options.method_map:
        layers, sign, method = text.rpartition("=")
        if not sign:
            raise UsageError(f"{MAP} {text}: give layers and their method, like 0-5=int8.")
        name = method.strip().lower()
        if name not in can:
            raise UsageError(f"{MAP} {text}: {_not_mixed(method.strip(), can)}.")
        for layer in checkpoint.parse_layers(layers, model.layers, MAP):
            if layer in by_layer:  # otherwise --layers excludes it
                by_layer[layer] = mixed.rename_for_mixed_output(can[name])
    if len(set(by_layer.values())) == 1:
        only = next(name for name in can if mixed.rename_for_mixed_output(can[name]) in by_layer.values())
        raise UsageError(f"{MAP}: every layer would have {only}; give --quant-method {only}, and leave out {MAP}.")
    return mixed.combine_formats(by_layer)


def _not_mixed(name: str, can: dict[str, Format]) -> str:
    *first, last = can
    return f"{name} cannot be the method of single layers; {', '.join(first)} and {last} can"


def notes_by_format(fmt: Format, notes_of: Callable[[Format], Iterable[str]]) -> Iterator[str]:
    """Yield notes on each format of the layers, in a mix with its name."""
    for own in fmt.layer_formats:
        yield from (f"{own.name}: {note}" if fmt.by_layer else note for note in notes_of(own))


def mix_notes(fmt: Format, layers: Sequence[int], quantizer: Quantizer) -> Iterator[str]:
    """Yield the notes of the plan and the model card on a mix of formats; none for other formats."""
    if methods := mixed.manifest_methods(fmt, layers).get("methods"):
        listed = "; ".join(f"{name}: layers {numbers}" for name, numbers in methods.items())
        yield f"a method per layer, for the runtime of ktconvert: kt-kernel cannot load it ({listed})"
    if others := [own.name for own in fmt.layer_formats if not quantizer.supports(own.encoding.grid)]:
        yield f"--scale {quantizer.name} has no effect in layers of {' and '.join(others)}"
