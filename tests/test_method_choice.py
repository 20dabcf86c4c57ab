"""`cpu --method-map auto`: the choice within a budget, the measured losses, and real conversions with the chosen map."""

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scale_imatrix import COUNTS
from test_scale_imatrix import statistics as write_imatrix

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import ResourceError, UsageError
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.format import output_bytes
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.statistics.folder import open_model_imatrix
from ktconvert.pipeline.fit.model_shape import read_shape
from ktconvert.pipeline.options.types import Size
from ktconvert.pipeline.plans.method_choice import CELLS, choose_methods, measure_losses
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.quantizers.quantizer import ABSMAX, MSE
from rig import conversion, killpoint
from rig.conversion import KTCONVERT, run_in_process
from rig.safetensors import read_folder, write_file
from rig.statistics import describe

LAYERS, EXPERTS, SIZE = 3, 3, 128  # all rows of experts of this size are measured
SHAPES = dict.fromkeys(range(LAYERS), (EXPERTS, SIZE, SIZE))
INT4, INT8 = FORMATS["AMXINT4"], FORMATS["AMXINT8"]
SILENT = Reporter(verbosity=-2)
MIXABLE = {name: FORMATS[name] for name in ("AMXINT4", "AMXINT8", "MXFP4", "FP8", "BF16")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice") / "source"
    return conversion.checkpoint(folder, layers=LAYERS, experts=EXPERTS, hidden=SIZE, width=SIZE)


@pytest.fixture(scope="module")
def sensitive(source: Path) -> Path:
    """Write statistics of a model whose layer 1 is the most sensitive."""
    folder = write_imatrix(source.with_name("sensitive") / "imatrix.gguf", SHAPES).parent
    counts = np.tile(COUNTS, (LAYERS, 1)).astype("<i8")
    write_file(folder / "counts.safetensors", {"counts": ("I64", counts)}, {"format": "pt"})
    return describe(folder, SHAPES, sensitivity=(1e-3, 1e-1, 1e-3))


@pytest.fixture(scope="module")
def budget(source: Path) -> int:
    """Return the bytes of one layer in INT8 and the others in INT4."""
    model = recognize(open_checkpoint(source))
    return output_bytes(model, INT8, 1, [0]) + output_bytes(model, INT4, 1, [1, 2])


def options_for(source: Path, output: Path, budget: int | str, *more: object) -> list[str]:
    """Return the command line of a conversion with a chosen map."""
    options = ("cpu", "-i", source, "-o", output, "--method-map", "auto", "--ram", budget, "--numa", 1, *more)
    return [*map(str, options)]


def convert(*options: object) -> str:
    """Convert in this process; return the note on the chosen map, "" without one."""
    done = run_in_process(*options)
    assert done.exception is None, done.exception
    return next((line for line in done.stderr.splitlines() if "--method-map auto" in line), "")


# ---- the choice -----------------------------------------------------------------------------------------------------


@st.composite
def choices(draw: st.DrawFn, most: int) -> tuple[Any, Any, int]:
    """Draw sizes and losses [layers, methods], and a budget."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    numbers = st.lists(st.integers(1, most), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    sizes = np.reshape(draw(numbers), shape).astype(np.int64)
    losses = np.reshape(draw(numbers), shape) / most
    return sizes, losses, int(sizes.min(axis=1).sum()) + draw(st.integers(0, 2 * most))


def sum_of(values: Any, chosen: Any) -> Any:
    return values[np.arange(len(chosen)), list(chosen)].sum()


@given(choices(most=50))
def test_choice_has_the_least_loss_and_then_the_fewest_bytes(choice):
    sizes, losses, budget = choice
    every = itertools.product(range(sizes.shape[1]), repeat=len(sizes))
    fitting = [chosen for chosen in every if sum_of(sizes, chosen) <= budget]
    least = min(sum_of(losses, chosen) for chosen in fitting)
    best = min(sum_of(sizes, chosen) for chosen in fitting if np.isclose(sum_of(losses, chosen), least, rtol=1e-12))
    chosen = choose_methods(sizes, losses, budget)
    assert np.isclose(sum_of(losses, chosen), least, rtol=1e-12)
    assert sum_of(sizes, chosen) <= budget and sum_of(sizes, chosen) >= best


@given(choices(most=1 << 50))
def test_choice_of_sizes_without_a_common_divisor_is_within_the_budget_and_nearly_as_good(choice):
    """No change of one layer, which leaves the room that rounding may waste, has a smaller loss."""
    sizes, losses, budget = choice
    chosen = choose_methods(sizes, losses, budget)
    assert sum_of(sizes, chosen) <= budget
    waste = len(sizes) * (2 * (budget - int(sizes.min(axis=1).sum())) // CELLS + 1)
    for layer, method in itertools.product(*map(range, sizes.shape)):
        changed = [*chosen[:layer], method, *chosen[layer + 1 :]]
        if sum_of(sizes, changed) <= budget - waste:
            assert sum_of(losses, chosen) <= sum_of(losses, changed) * (1 + 1e-12)


def test_choice_for_many_equal_layers_is_exact():
    """For 94 layers as large as Qwen3-235B's, the budget is spent down to the smallest difference of two methods."""
    elements = 3 * 128 * 4096 * 1536
    sizes = np.tile(np.array([elements // 2, elements * 17 // 32, elements, 2 * elements]), (94, 1))
    losses = np.linspace(1, 2, 94)[:, None] * [100.0, 70.0, 1.0, 0.0]
    chosen = choose_methods(sizes, losses, 94 * elements * 3 // 4)
    assert sum_of(sizes, chosen) == 94 * elements * 3 // 4
    assert chosen == sorted(chosen) and set(chosen) == {0, 1, 2}


# ---- losses ---------------------------------------------------------------------------------------------------------


def read_linears(source: Path, output: Path, layer: int, expert: int, projection: str) -> Iterator[tuple[Any, Any]]:
    """Yield each of two NUMA slices of a linear, as the checkpoint has it and as an output of INT8 stores it."""
    bits = read_folder(source)[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"].bits
    weight = (bits.astype(np.uint32) << 16).view(np.float32)
    opened = open_output(output)
    for node, values in enumerate(np.split(weight, 2, axis=1 if projection == "down" else 0)):
        slice_id = SliceId(layer, expert, projection, False, node)
        stored = [opened.read(opened.tensors[slice_id, suffix]) for suffix in ("weight", "scale")]
        yield values, INT8.encoding.decode(stored, *values.shape, slice(None))


def test_losses_follow_the_definition(source, sensitive, tmp_path):
    """Errors of real outputs, weighted by inputs and tokens; relative without the folder's sensitivity."""
    model = recognize(open_checkpoint(source))
    convert("cpu", "-i", source, "-o", tmp_path / "int8", "--quant-method", "int8", "--numa", 2)
    imatrix = open_model_imatrix(sensitive / "imatrix.gguf", model)
    errors, energies, tokens = np.zeros(LAYERS), np.zeros(LAYERS), {0: 9, 2: 400}
    for layer, expert in itertools.product(range(LAYERS), tokens):
        ratios = 0.0
        for projection in ("gate", "up", "down"):
            weights = imatrix.read_importance(layer, expert, projection)
            columns = np.split(weights, 2) if projection == "down" else [weights] * 2
            error = energy = 0.0
            linears = read_linears(source, tmp_path / "int8", layer, expert, projection)
            for (values, stored), h in zip(linears, columns, strict=True):
                error += float((((values - stored).astype(np.float64) ** 2) @ h).sum())
                energy += float(((values.astype(np.float64) ** 2) @ h).sum())
            ratios += error / energy
        errors[layer] += tokens[expert] * energy * ratios / 409
        energies[layer] += tokens[expert] * energy / 409
    measured = measure_losses(model, range(LAYERS), [INT8], 2, ABSMAX, imatrix, 2, SILENT)
    np.testing.assert_allclose(measured[:, 0], errors * [1e-3, 1e-1, 1e-3], rtol=1e-5)
    alone = write_imatrix(tmp_path / "alone.gguf", SHAPES)
    alone_imatrix = open_model_imatrix(alone, model)
    measured = measure_losses(model, range(LAYERS), [INT8], 2, ABSMAX, alone_imatrix, 2, SILENT)
    np.testing.assert_allclose(measured[:, 0], errors / energies, rtol=1e-5)


def test_losses_do_not_depend_on_threads_and_know_exact_formats(source, sensitive):
    model = recognize(open_checkpoint(source))
    imatrix = open_model_imatrix(sensitive / "imatrix.gguf", model)
    one, four = (
        measure_losses(model, range(LAYERS), [*MIXABLE.values()], 1, MSE, imatrix, threads, SILENT)
        for threads in (1, 4)
    )
    np.testing.assert_array_equal(one, four)
    int4, int8, mxfp4, fp8, bf16 = one.T
    assert (bf16 == 0).all() and (int8 > 0).all() and (int8 < fp8).all()
    assert (fp8 < np.minimum(int4, mxfp4)).all()


def test_sizes_are_those_that_fit_predicts_in_memory(source):
    model = recognize(open_checkpoint(source))
    forms = {form.method: form for form in read_shape(model, 1, "ktconvert").forms if form.option}
    for name, fmt in MIXABLE.items():
        assert output_bytes(model, fmt, 1) == EXPERTS * sum(forms[name].expert)


# ---- conversions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chosen(source: Path, sensitive: Path, budget: int) -> tuple[Path, str]:
    """Convert with a chosen map; return the output and the note."""
    output = source.with_name("chosen")
    return output, convert(*options_for(source, output, budget, "--statistics", sensitive))


def test_printed_map_gives_the_same_bytes(chosen, source, budget, tmp_path):
    """The most sensitive layer has 8 bits. Plan and manifest contain the map, as if it had been given."""
    output, note = chosen
    words = shlex.split(note.rpartition("the same choice: ")[2])
    assert words == ["--quant-method", "int4", "--method-map", "1=int8", "--numa", "1"]
    convert("cpu", "-i", source, "-o", tmp_path / "given", *words)
    shards = [
        {path.name: path.read_bytes() for path in each.glob("*.safetensors")} for each in (output, tmp_path / "given")
    ]
    assert shards[0] == shards[1] and len(shards[0]) == LAYERS
    manifest = json.loads((output / "manifest.json").read_bytes())
    assert manifest["settings"]["method_map"] == ["1=int8"] and manifest["settings"]["quant_method"] == "int4"
    assert manifest["settings"]["map_choice"]["ram"] == budget
    assert manifest["model"]["methods"] == {"AMXINT4": "0, 2", "AMXINT8": "1"}
    assert sum(path.stat().st_size for path in output.glob("*.safetensors")) - budget < LAYERS * 8192  # headers


def test_a_budget_for_one_method_gives_an_output_of_that_method(source, tmp_path):
    note = convert(*options_for(source, tmp_path / "out", 1 << 40))
    assert "--quant-method bf16 --numa 1" in note and "without --statistics" in note
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["model"]["method"] == "BF16"


def test_progress_is_shown_while_layers_are_measured(source, budget, tmp_path, monkeypatch):
    """A dry run measures, too. The events count the bytes of the sampled experts: here all."""
    monkeypatch.setattr("ktconvert.pipeline.report.progress.LINE_EVERY", 0)
    done = run_in_process(*options_for(source, tmp_path / "out", budget), "--dry-run", "--json")
    events = conversion.parse_events(done.stdout)
    begun, *progress, planned = (event for event in events if event["event"] in ("begin", "progress", "plan"))
    assert begun["event"] == "begin" and begun["total_bytes"] == planned["bytes_in"] and planned["event"] == "plan"
    assert progress and all(event["unit"] == "measure" and event["units"] == LAYERS for event in progress)


def test_resume_uses_the_map_of_the_plan(source, sensitive, budget, tmp_path):
    """A killed conversion ends with the same bytes, by the same command or by resume.

    Neither measures again: resume does not even read the statistics.
    """

    def start(output: Path) -> list[str]:
        return [*KTCONVERT, *options_for(source, output, budget, "--statistics", sensitive, "--threads", "1")]

    def resume(output: Path) -> None:
        if output.name == "killed0":
            sensitive.rename(hidden := sensitive.with_name("hidden"))
            convert("resume", output)
            hidden.rename(sensitive)
        else:
            assert "as chosen before" in convert(*start(output)[len(KTCONVERT) :])

    killpoint.check_resume(start, resume, tmp_path, 0.6, 0.7)


def test_repeating_the_command_on_a_finished_output_does_nothing(chosen, source, sensitive, budget):
    output, _ = chosen
    before = conversion.identity(output)
    done = run_in_process(*options_for(source, output, budget, "--statistics", sensitive))
    assert "as chosen before" in done.stderr and "nothing to do" in done.output
    assert conversion.identity(output) == before
    different = run_in_process(*options_for(source, output, 1 << 30, "--statistics", sensitive))
    assert "--method-map auto: ram was" in str(different.exception)


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "no budget": (("--method-map", "auto"), "needs the memory for the experts; give --ram"),
    "two maps": (("--method-map", "auto", "--method-map", "0=int8", "--ram", "1GB"), "leave out the other values"),
    "loose files": (("--method-map", "auto", "--ram", "1GB", "--no-merge-safetensor"), "--no-merge-safetensor"),
    "several outputs": (
        ("--method-map", "auto", "--ram", "1GB", "--quant-method", "int4,int8"),
        "chooses the methods of one output; leave out --quant-method",
    ),
    "no size": (("--method-map", "auto", "--ram", "much"), "much"),
    "a method that cannot be mixed": (
        ("--method-map", "auto", "--ram", "1GB", "--quant-method", "rawint4"),
        "RAWINT4 cannot be the method of single layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_are_refused(case, source, tmp_path):
    options, words = REFUSED[case]
    done = run_in_process("cpu", "-i", source, "-o", tmp_path / "out", *options)
    assert done.exit_code == 2 or isinstance(done.exception, UsageError), done.exception
    assert words in f"{done.exception} {done.output}" and not (tmp_path / "out").exists()


def test_budget_below_the_smallest_choice_names_the_size_that_fits(source, tmp_path):
    done = run_in_process(*options_for(source, tmp_path / "out", "1KB"))
    least = output_bytes(recognize(open_checkpoint(source)), INT4, 1)
    assert isinstance(done.exception, ResourceError)
    (fits,) = re.findall(r"give --ram (\S+B) or more", str(done.exception))
    assert least <= Size().convert(fits, None, None) < least * 1.1
    note = convert(*options_for(source, tmp_path / "out", fits))
    assert "--quant-method int4 --numa 1" in note


def test_ram_without_a_choice_is_noted(source, tmp_path):
    done = run_in_process("cpu", "-i", source, "-o", tmp_path / "out", "--numa", 1, "--ram", "1GB", "--dry-run")
    assert "--ram is only for --method-map auto and has no effect" in done.stderr, done.stderr


def test_weight_that_is_not_finite_is_named(source, tmp_path):
    tensors = {name: ("BF16", tensor.bits.copy()) for name, tensor in read_folder(source).items()}
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name][1][3, 5] = 0x7F80
    folder = tmp_path / "broken"
    folder.mkdir()
    write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    done = run_in_process(*options_for(folder, tmp_path / "out", 1 << 30))
    assert f"tensor {name}" in str(done.exception) and "row 3, column 5" in str(done.exception), done.exception
