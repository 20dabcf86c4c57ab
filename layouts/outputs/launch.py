"""The command that starts SGLang with an output: upstream SGLang with ktconvert in place of kt-kernel, or sglang-kt."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs.linear_names import explain_not_rawint4

PROGRAM = "python -m sglang.launch_server"
FOLDER = "/path/to/this/folder"
ORIGINAL = "/path/to/the/original/checkpoint"
CPU_EXPERTS = "/path/to/the/cpu/experts"
NUMA_NODES = "NUMA_NODES"
CORES = "PHYSICAL_CORES"
PER_LAYER = "--kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU"


def make_options(
    model: str,
    weights: str,
    method: str,
    numa: int | str = NUMA_NODES,
    placement: Sequence[str] = (PER_LAYER,),
    cores: int | str = CORES,
    *,
    shared_experts: bool = True,
) -> tuple[str, ...]:
    """Return the options of SGLang, each with its value; they are the same for upstream and for sglang-kt.

    model           the checkpoint that has everything but the CPU's experts
    weights         the CPU's experts, in a format of this method
    numa            their number of NUMA slices; a format without slices suits any number of nodes
    placement       options that choose the GPU's experts
    cores           physical cores of the server
    shared_experts  whether the model has them, or may have them
    """
    return (
        f"--model {shlex.quote(model)}",
        f"--kt-weight-path {shlex.quote(weights)}",
        f"--kt-method {method}",
        f"--kt-cpuinfer {cores}",
        f"--kt-threadpool-count {numa}",
        *placement,
        # The default of sglang-kt. Upstream would route tokens to a shared expert that the CPU's half does not have.
        *(("--disable-shared-experts-fusion",) if shared_experts else ()),
    )


def serve_cpu_experts(
    facts: OutputFacts, folder: str, model: str, *, sliced: bool, placement: Sequence[str] = (PER_LAYER,)
) -> tuple[str, ...]:
    """Return the options for an output of `ktconvert cpu` with these facts; `sliced`: whether it has NUMA slices."""
    numa = facts["numa"] if sliced else NUMA_NODES
    # kt-kernel's names of methods do not have our prefix.
    method = facts["method"].removeprefix("KT_")
    return make_options(model, folder, method, numa, placement, shared_experts=facts.get("shared_experts", True))


def serve_whole_model(
    facts: OutputFacts, folder: str, weights: str = CPU_EXPERTS, placement: Sequence[str] = (PER_LAYER,)
) -> tuple[str, ...]:
    """Return the options for an output of `ktconvert gpu`, which also has the CPU's experts if RAWINT4 reads them."""
    weights, method = (folder, "RAWINT4") if explain_not_rawint4(facts) is None else (weights, "AMXINT4")
    shared = facts.get("shared_experts", True)
    return make_options(folder, weights, method, placement=placement, shared_experts=shared)


def place_experts(path: Path, experts: str, *, by_counts: bool) -> tuple[str, ...]:
    """Return the options for a file of `ktconvert experts`.

    experts    the option with the number of experts on the GPU
    by_counts  whether the file has counts, from which sglang-kt chooses, rather than the order of experts for upstream
    """
    strategy = ("--kt-expert-placement-strategy frequency",) if by_counts else ()
    return experts, *strategy, f"--init-expert-location {shlex.quote(str(path))}"


def join_command(options: Sequence[str]) -> str:
    """Return the command in one line."""
    return " ".join((PROGRAM, *options))


def fence_command(options: Sequence[str]) -> tuple[str, ...]:
    """Return the command as a block of Markdown."""
    *first, last = (PROGRAM, *(f"  {option}" for option in options))
    return "```bash", *(f"{line} \\" for line in first), last, "```"
