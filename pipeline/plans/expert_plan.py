"""The plan of the commands that quantize experts, `cpu` and `gpu`: rounding or GPTQ, statistics, a method per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError
from ktconvert.layouts.files.facts import CalibrationFacts, OutputFacts
from ktconvert.layouts.outputs import Format, cards, configs, formats_by_option, loose, mixed
from ktconvert.layouts.outputs.numa import NUMA
from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.statistics.folder import (
    COUNTS,
    DOCUMENT,
    InputStatistics,
    open_model_imatrix,
    open_model_moments,
    read_related_statistics,
    require_folder,
)
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments
from ktconvert.layouts.tensors import format_ranges, name_layers
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

    Raises KTConvertError if GPTQ needs packages that are missing.
    """
    options = checkpoint.with_arch_row(options)
    if not options.calibrated:
        return options
    from ktconvert.pipeline.calibration import requirements
    from ktconvert.pipeline.plans import calibration_run

    requirements.require_libraries(options.CALIBRATED_BY)
    return calibration_run.record_machine(options, with_statistics=options.gptq.saves_statistics)


def limit_length(options: Q, config: Mapping[str, Any]) -> tuple[Q, tuple[str, ...]]:
    """Return the result of calibration_run.limit_length, if there is a calibration run."""
    if not options.calibrated:
        return options, ()
    from ktconvert.pipeline.plans import calibration_run

    return calibration_run.limit_length(options, config)


@dataclass(frozen=True)
class ExpertConversion:
    """Settings by which the experts of a plan are converted.

    fmt          their format, which may differ by layer
    layers       layers to convert
    quantizer    how codes are chosen
    numa         number of NUMA slices
    backward     whether to make the matrices for fine-tuning, too
    statistics   statistics of the experts' inputs, if the quantizer needs them
    loose_files  whether to write loose files instead of shards
    """

    fmt: Format
    layers: Sequence[int]
    quantizer: Quantizer = ABSMAX
    numa: int = 1
    backward: bool = False
    statistics: InputStatistics | None = None
    loose_files: bool = False


@dataclass(frozen=True)
class RestOfModel:
    """Content of an output beside converted experts.

    tensors        non-expert tensors to copy
    choice         the choice of --non-experts, for the model card
    ignore         patterns of modules that are not quantized
    dropped_files  companion files of the checkpoint that are not copied
    kept_layers    loose layers that the output already has and keeps; None without --resume-layer
    """

    tensors: Sequence[OutputTensor]
    choice: str = "keep"
    ignore: Sequence[str] = ()
    dropped_files: Sequence[str] = ()
    kept_layers: tuple[int, ...] | None = None


def build_expert_plan(
    options: QuantizationOptions,
    model: MoeModel,
    conversion: ExpertConversion,
    rest: RestOfModel,
    facts: OutputFacts,
    metadata: Mapping[str, str],
    card_notes: Sequence[str],
    notes: Sequence[str],
) -> Plan:
    """Return the plan that quantizes experts, by rounding or in a calibration run, and copies other tensors.

    facts       facts for the manifest that are known before the run
    metadata    metadata of all shards
    card_notes  sentences for the plan and the model card
    notes       sentences only for the plan
    """
    fmt = conversion.fmt
    statistics = conversion.statistics
    loose_files = conversion.loose_files
    kept_layers = rest.kept_layers
    source = model.source
    side_output = None
    run = None
    if options.calibrated:
        from ktconvert.pipeline.calibration.gather_statistics import KEYS
        from ktconvert.pipeline.plans import calibration_run

        stage: Stage[Any] = calibration_run.make_gptq_stage(
            options,
            model,
            fmt,
            metadata,
            quantizer=conversion.quantizer,
            numa=conversion.numa,
            loose_files=loose_files,
        )
        run = calibration_run.plan_gptq_run(options, model, fmt)
        if options.gptq.save_statistics is not None:
            side_output = SideOutput(options.gptq.save_statistics, KEYS)
    else:
        stage = quantize_experts.make_stage(
            model,
            fmt,
            conversion.layers,
            quantizer=conversion.quantizer,
            numa=conversion.numa,
            backward=conversion.backward,
            loose_files=loose_files,
            max_shard_size=options.max_shard_size,
            metadata=metadata,
            statistics=statistics,
            options=options.weights,
        )
    if model.equalized:
        facts = {**facts, EQUALIZED: []}
    stages = [stage]
    if rest.tensors:
        stages.append(copy_tensors.make_stage(source, rest.tensors, options.max_shard_size, metadata))
    stages = stages if loose_files else [*checkpoint.number_shards(stages)]
    entries = fmt.description.config_entries(fmt, facts, rest.ignore, tool_version())
    config = (
        configs.config_json(source.config, entries, is_whole_model=fmt.arrangement.is_whole_model)
        if source.has_config
        else None
    )
    related_statistics = read_related_statistics(statistics)
    known_counts = None if related_statistics is None else related_statistics.counts
    dropped_files = {*rest.dropped_files}
    if known_counts is not None or (options.calibrated and options.engine == "stream"):
        dropped_files.add(expert_counts.NAME)  # a new file replaces that of the source
    copied = [name for name in source.companions() if name not in dropped_files]
    copying_bytes = copy_tensors.peak_memory(rest.tensors) if rest.tensors else 0

    def peak_memory(threads: int) -> int:
        """Return the size of the buffers of all packing threads, which do not grow with the model."""
        packing_threads = threads + WAITING
        making_bytes = 0
        if not options.calibrated:
            reading_bytes = 0 if statistics is None else statistics.memory_bytes(packing_threads)
            making_bytes = reading_bytes + expert_files.peak_memory(stage.units, packing_threads)
        needed = checkpoint.BASE_MEMORY + max(making_bytes, copying_bytes)
        return needed if run is None else run.peak_memory(needed)

    def make_extra_files(stats: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """Return the file with the tokens of each expert, if a calibration run has counted them."""
        rows = {figures["layer"]: figures["expert_tokens"] for figures in stats if "expert_tokens" in figures}
        counts = known_counts
        if rows.keys() == {*model.layers}:  # a version of ktconvert that did not report them may have begun the run
            counts = expert_counts.arrange_counts(model.decoder_layers, rows)
        return {} if counts is None else {expert_counts.NAME: expert_counts.encode_counts(counts)}

    def render_card(stats: Sequence[Mapping[str, Any]]) -> bytes:
        all_facts: OutputFacts = {**facts, **make_measured_facts(stats)}
        return cards.make_model_card(
            fmt.description.card,
            all_facts,
            checkpoint.base_model(source),
            card_notes,
            stats,
            tool_version(),
            loose=loose_files,
            non_experts=rest.choice,
            has_counts=expert_counts.NAME in (*copied, *make_extra_files(stats)),
        )

    return Plan(
        options=options,
        files=checkpoint.source_files(source),
        reads=(*source.paths(), *checkpoint.option_files(options), *_list_statistics_files(statistics)),
        stages=tuple(stages),
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
        download=checkpoint.plan_download(options, source, stages),
        hooks=Hooks(
            peak_memory=peak_memory,
            render_card=render_card,
            measured_facts=make_measured_facts,
            extra_files=make_extra_files,
            require_ready=(lambda: None) if run is None else run.require_ready,
            check=(
                partial(_check_whole_model, calibrated=options.calibrated)
                if fmt.arrangement.is_whole_model
                else lambda assembled: None
            ),
        ),
    )


def _folder_pattern(layer: int) -> KeptFolder:
    return KeptFolder(loose.layer_folder(layer), "_numa_*/*.kt")


def calibration_facts(options: QuantizationOptions) -> OutputFacts:
    """Return the data and the settings of GPTQ; nothing without it."""
    if not options.calibrated:
        return {}
    gptq = options.gptq
    calibration: CalibrationFacts = {
        **describe_dataset(options.samples),
        "dampening": gptq.dampening_frac,
        "calibrate": gptq.calibrate,
        "steps": gptq.gptq_steps,
        "engine": options.engine,
    }
    return {"calibration": calibration}


def make_measured_facts(stats: Sequence[Mapping[str, Any]]) -> OutputFacts:
    """Return facts that only finished units know: `equalized`, and `too_few_tokens`, the experts that GPTQ skipped."""
    skipped = _list_experts(stats, "rounded_experts")
    equalized = _list_experts(stats, "equalized_experts")
    return {**({"too_few_tokens": skipped} if skipped else {}), **({EQUALIZED: equalized} if equalized else {})}


def _list_experts(stats: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return the experts in this entry of the layers' figures, as in "layer 3: 0-5, 7"."""
    experts: dict[int, list[int]] = {}
    for figures in stats:
        if figures.get(name):
            experts.setdefault(figures["layer"], []).extend(figures[name])
    return [f"layer {layer}: {format_ranges(experts[layer])}" for layer in sorted(experts)]


def equalize_model(options: QuantizationOptions, model: MoeModel, fmt: Format) -> MoeModel:
    """Return the model, equalized with --equalize.

    Raises UnsupportedError if experts would compute something else, UsageError if none gains.
    """
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
        reason = (
            f"{fmt.name} keeps every number of these experts, or scales rows and columns together; leave out --equalize"
        )
        raise UsageError(f"--equalize requires experts that are rounded to integers or MXFP4: {reason}.")
    return model


def _check_whole_model(assembled: Path, calibrated: bool) -> None:
    """Check a whole model as its loaders do, and with transformers if that is loaded already."""
    from ktconvert.pipeline.verify.verify import require_sound

    require_sound(assembled, load=calibrated)


def open_input_statistics(quantizer: Quantizer, options: CpuOptions, model: MoeModel) -> InputStatistics | None:
    """Open the importance matrix or the second moments that the options name; None if they name none.

    Raises UsageError if they are needed and missing, or given and not needed. Raises InputError if they belong to a
    different model, or differ from those of the first run.
    """
    importance = options.importance
    path = importance.file
    reads_file = quantizer.requires_importance or (quantizer.uses_moments and importance.imatrix is None)
    if path is not None and not reads_file:
        if options.map_choice is not None:
            return None
        flag, scales = ("--statistics", "imatrix or mse") if importance.imatrix is None else ("--imatrix", "imatrix")
        problem = f"{flag} is not for --scale {quantizer.name}"
        raise UsageError(f"{problem}; give --scale {scales}, which uses it, or leave it out.")
    if path is None:
        if quantizer.requires_importance:
            raise UsageError(
                f"--scale {quantizer.name} needs the importance of inputs; give --imatrix FILE or --statistics DIR."
            )
        return None
    if importance.statistics is not None and importance.statistics.is_dir():
        require_folder(importance.statistics)
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


def _list_statistics_files(inputs: InputStatistics | None) -> tuple[Path, ...]:
    """Return the files of the input statistics, and the files next to them that describe them."""
    if inputs is None:
        return ()
    files = [file.path for file in inputs.layers.values()] if isinstance(inputs, SecondMoments) else [inputs.path]
    return (*files, *(inputs.path.with_name(name) for name in (DOCUMENT, COUNTS)))


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


def find_mixable(options: CpuOptions, fmt: Format) -> dict[str, Format]:
    """Return the formats that a mix may have, by their options.

    fmt  format of --quant-method

    Raises UsageError if it is none of them, and for options that a mix does not support.
    """
    mixable = {
        name: candidate
        for name, candidate in formats_by_option("cpu", NUMA.layout).items()
        if mixed.can_be_mixed(candidate)
    }
    if fmt not in mixable.values():
        raise UsageError(f"--quant-method {options.quant_method}: {_explain_not_mixable(fmt.name, mixable)}.")
    unsupported = (
        (options.no_merge_safetensor, "--no-merge-safetensor", "is only in safetensors"),
        (options.save_backward_weights, "--save-backward-weights", "has no matrices for fine-tuning"),
        (options.resume_layer > 0, "--resume-layer", "is resumed without a number"),
    )
    for is_given, flag, reason in unsupported:
        if is_given:
            raise UsageError(f"{MAP}: an output with a method per layer {reason}; leave out {flag}.")
    return mixable


def apply_method_map(options: CpuOptions, fmt: Format, model: MoeModel) -> Format:
    """Return the format of --quant-method, or with --method-map a mix of formats.

    Raises UsageError if --method-map names a method that cannot be mixed, gives all layers one method, or is
    not of the form LAYERS=METHOD; and as find_mixable does.
    """
    if not options.method_map:
        return fmt
    mixable = find_mixable(options, fmt)
    by_layer = dict.fromkeys(checkpoint.parse_layers(options.layers, model.layers), mixed.rename_for_mixed_output(fmt))
    for text in options.method_map:
        layers, sign, method = text.rpartition("=")
        if not sign:
            raise UsageError(f"{MAP} {text}: give layers and their method, like 0-5=int8.")
        if "=" in layers:
            raise UsageError(f"{MAP} {text}: repeat {MAP} for each method, like {MAP} 0=int8 {MAP} 1=bf16.")
        name = method.strip().lower()
        if name not in mixable:
            raise UsageError(f"{MAP} {text}: {_explain_not_mixable(method.strip(), mixable)}.")
        for layer in checkpoint.parse_layers(layers, model.layers, MAP):
            if layer in by_layer:  # otherwise --layers excludes it
                by_layer[layer] = mixed.rename_for_mixed_output(mixable[name])
    if len(set(by_layer.values())) == 1:
        only = next(name for name in mixable if mixed.rename_for_mixed_output(mixable[name]) in by_layer.values())
        raise UsageError(f"{MAP}: every layer would have {only}; give --quant-method {only}, and leave out {MAP}.")
    return mixed.combine_formats(by_layer)


def hold_function(fmt: Format, model: MoeModel, backward: bool = False) -> Format:
    """Return the format, with biases if experts have them.

    backward  whether there will be matrices for fine-tuning

    Raises UnsupportedError for matrices for fine-tuning if experts have biases or no gate.
    """
    if backward and (model.has_biases or not model.is_gated):
        problem = "there are no matrices for fine-tuning experts with biases or without a gate"
        raise UnsupportedError(f"{model.source.root}: {problem}; leave out --save-backward-weights.")
    return fmt.with_biases() if model.has_biases else fmt


def _explain_not_mixable(name: str, mixable: dict[str, Format]) -> str:
    *first, last = mixable
    return f"{name} cannot be the method of single layers; {', '.join(first)} and {last} can"


def notes_by_format(fmt: Format, make_notes: Callable[[Format], Iterable[str]]) -> Iterator[str]:
    """Yield notes on each format of the layers, in a mix with its name."""
    for layer_fmt in fmt.layer_formats:
        yield from (f"{layer_fmt.name}: {note}" if fmt.by_layer else note for note in make_notes(layer_fmt))


def mix_notes(fmt: Format, layers: Sequence[int], quantizer: Quantizer) -> Iterator[str]:
    """Yield the notes of the plan and the model card on a mix of formats; none for other formats."""
    if methods := mixed.manifest_methods(fmt, layers).get("methods"):
        layers_by_method = "; ".join(f"{name}: {name_layers(numbers)}" for name, numbers in methods.items())
        yield f"a method per layer, for the runtime of ktconvert: kt-kernel cannot load it ({layers_by_method})"
    unsupported = [layer_fmt.name for layer_fmt in fmt.layer_formats if not quantizer.supports(layer_fmt.encoding.grid)]
    if unsupported:
        yield f"--scale {quantizer.name} has no effect in layers of {' and '.join(unsupported)}"
