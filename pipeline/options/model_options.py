"""Options of the commands that run a model: eval, run, serve and train."""

from __future__ import annotations

from pathlib import Path

import click

from ktconvert.pipeline.options.declare import (
    REQUIRED,
    Group,
    Option,
    Options,
    declare,
    files_option,
    option,
    tuning_option,
)
from ktconvert.pipeline.options.option_groups import (
    ACTIVATIONS,
    AS_JSON,
    AUTO,
    DATASET,
    INT8,
    MODEL,
    PLOT,
    PORT,
    THREADS_ALIASES,
    TRUST_REMOTE_CODE,
    Execution,
    ExistingOutput,
    GpuExperts,
    Hub,
    OutputOptions,
    Reporting,
    input_option,
    output_option,
)
from ktconvert.pipeline.options.types import FilePath, FiniteFloat, Integer, NamedPath, PathOrHubId, Text

ADAPTER = Option("LoRA adapter for MODEL, from `train` or PEFT.", FilePath(), group=Group.ADAPTER)
CPU_WEIGHTS = "Converted experts (or a checkpoint of MODEL) that the runtime computes."
THREADS = "Number of threads for the experts and torch."
STORED = "stored"  # linears outside the experts, as the checkpoint has them; or INT8


class ModelOptions(Options):
    """Options that `run`, `serve` and `eval` share."""

    model: str = option(MODEL, PathOrHubId(), argument="model", default=REQUIRED, group=Group.INPUT)
    cpu_weights: Path | None = option(CPU_WEIGHTS, FilePath(), unset="MODEL", group=Group.EXPERTS)
    threads: int | None = option(
        THREADS, Integer(min=1), unset="physical cores", group=Group.RESOURCES, aliases=THREADS_ALIASES
    )
    memory: str = option(
        "Memory of converted experts: copy, map (pages of their files), or auto (copy if they fit).",
        click.Choice(["auto", "map", "copy"]),
        default="auto",
        group=Group.RESOURCES,
    )
    non_experts: str = option(
        "Weights of the linears outside the experts: stored, or int8 (half the memory; faster decoding).",
        click.Choice([STORED, INT8]),
        default=STORED,
        group=Group.EXPERTS,
    )
    activations: str = declare(ACTIVATIONS, default=AUTO)
    exact: bool = option("Round as kt-kernel does, bit for bit.", default=False, group=Group.ADVANCED)
    trust_remote_code: bool = option(TRUST_REMOTE_CODE, default=False, group=Group.ADVANCED)


class EvalOptions(ModelOptions):
    cpu_weights: Path | None = option(
        "Experts converted for the CPU, or a checkpoint of MODEL (or use --gpu-weights).",
        FilePath(),
        group=Group.EXPERTS,
    )
    gpu_weights: Path | None = option(
        "Model converted for the GPU (or use --cpu-weights).", FilePath(), group=Group.EXPERTS
    )
    adapter: Path | None = declare(ADAPTER)
    text: Path = option("UTF-8 text file that both models read.", FilePath(), default=REQUIRED, aliases=("--dataset",))
    sequence_length: int = option("Number of tokens per sequence.", Integer(min=2), default=512)
    skip_sequences: int = option("Number of sequences to skip at the beginning.", Integer(min=0), default=0)
    max_sequences: int | None = option("Maximum number of sequences to read.", Integer(min=1), unset="all")
    hub: Hub = Hub()
    as_json: bool = declare(AS_JSON, default=False)
    plot: Path | None = declare(PLOT)


class RunOptions(ModelOptions):
    torch_experts: bool = option(
        "Let transformers compute the experts, for comparison.",
        default=False,
        excludes="cpu_weights",
        group=Group.EXPERTS,
    )
    gpu_experts: GpuExperts = GpuExperts()
    adapter: Path | None = declare(ADAPTER)
    prompt: str | None = option("Text to continue (or use --chat).")
    chat: bool = option("Chat with the model, one message per line; Ctrl-D ends.", default=False)
    system: str | None = option("System message of the chat.", Text())
    max_new_tokens: int = option("Maximum number of tokens per answer.", Integer(min=1), default=256)
    temperature: float = option(
        "Sampling temperature; 0 always chooses the most likely token.", FiniteFloat(min=0), default=0.0
    )
    top_p: float | None = option(
        "Sample only from the likeliest tokens whose probabilities add up to X.",
        FiniteFloat(0, 1, min_open=True),
        unset="the model's own",
    )
    seed: int | None = option("Seed of the sampling.", Integer(min=0), unset="random")
    hub: Hub = Hub()


class ServeOptions(ModelOptions):
    gpu_experts: GpuExperts = GpuExperts()
    adapters: tuple[tuple[str, Path], ...] = option(
        "LoRA adapter to serve as a model of its own: PATH or NAME=PATH; may be repeated.",
        NamedPath(),
        flags=("--adapter",),
        default=(),
    )
    host: str = option("Address to listen on.", default="127.0.0.1")
    port: int = declare(PORT, default=8000)
    model_name: str | None = option("Model name for clients.", unset="MODEL")
    api_key_file: Path | None = option(
        "File with the API key that clients must send.", FilePath(), unset="KTCONVERT_API_KEY, else none"
    )
    cors_origins: tuple[str, ...] = option(
        "Origin of web pages that may send requests, or * for all; may be repeated.",
        Text(),
        flags=("--cors-origin",),
        default=(),
    )


class LoraOptions(Options):
    rank: int = files_option("Rank r of LoRA.", Integer(min=1), default=16, group=Group.ADAPTER)
    alpha: float = files_option(
        "Alpha of LoRA; updates are scaled by alpha / r.", FiniteFloat(min=0), default=32.0, group=Group.ADAPTER
    )
    dropout: float = files_option(
        "Dropout of LoRA's inputs during training.", FiniteFloat(0, 0.99), default=0.0, group=Group.ADVANCED
    )
    target_modules: str | None = files_option(
        "Names of modules to train, separated by commas, as in PEFT; experts: the routed experts.",
        Text(),
        unset="the linear layers of attention, and experts",
        group=Group.ADAPTER,
    )


class Schedule(Options):
    epochs: float | None = files_option(
        "Number of epochs.", FiniteFloat(min=0.001), unset="1, without --max-steps", group=Group.TRAINING
    )
    max_steps: int | None = files_option(
        "Number of steps (instead of --epochs).", Integer(min=1), excludes="epochs", group=Group.TRAINING
    )
    sequence_length: int = files_option(
        "Number of tokens per sequence; texts are packed into sequences.",
        Integer(min=2),
        default=512,
        group=Group.TRAINING,
    )
    batch_size: int = files_option("Number of sequences per batch.", Integer(min=1), default=4, group=Group.TRAINING)
    gradient_accumulation: int = files_option(
        "Number of batches per step.", Integer(min=1), default=1, group=Group.ADVANCED
    )
    learning_rate: float = files_option(
        "Highest learning rate.", FiniteFloat(min=0, min_open=True), default=2e-4, group=Group.TRAINING
    )
    schedule: str = files_option(
        "Learning-rate schedule: cosine, linear or constant.",
        click.Choice(["cosine", "linear", "constant"], case_sensitive=False),
        default="cosine",
        group=Group.ADVANCED,
    )
    warmup: float = files_option(
        "Fraction of the steps used for warm-up.", FiniteFloat(0, 1), default=0.03, group=Group.ADVANCED
    )
    weight_decay: float = files_option("Weight decay of AdamW.", FiniteFloat(min=0), default=0.0, group=Group.ADVANCED)
    max_grad_norm: float = files_option(
        "Norm to which gradients are clipped.", FiniteFloat(min=0), default=1.0, group=Group.ADVANCED
    )
    seed: int = files_option(
        "Seed of initial weights, order of texts, and dropout.",
        Integer(0, (1 << 32) - 1),
        default=42,
        group=Group.ADVANCED,
    )
    gradient_checkpointing: bool = files_option(
        "Keep only one layer's activations, and compute the others twice.", default=False, group=Group.ADVANCED
    )


class TrainOptions(OutputOptions, command="train"):
    input: str = input_option("model", help=MODEL)
    output: Path = output_option("out", help="Directory of the adapter.")
    cpu_weights: Path | None = files_option(CPU_WEIGHTS, FilePath(absolute=True), unset="MODEL", group=Group.INPUT)
    dataset: str = files_option(
        f"Training texts: {DATASET}.", PathOrHubId(absolute=True), default=REQUIRED, group=Group.INPUT
    )
    dataset_split: str = files_option("Split of a data set from the hub.", default="train", group=Group.ADVANCED)
    eval_dataset: str | None = files_option(
        "Evaluation texts; their loss is measured at the start, every checkpoint and the end.",
        PathOrHubId(absolute=True),
        group=Group.INPUT,
    )
    lora: LoraOptions = LoraOptions()
    schedule_options: Schedule = Schedule()
    save_steps: int = files_option(
        "Number of steps between checkpoints, from which `resume` continues.",
        Integer(min=1),
        default=100,
        group=Group.ADVANCED,
    )
    threads: int | None = tuning_option(
        THREADS, Integer(min=1), unset="physical cores", group=Group.RESOURCES, aliases=THREADS_ALIASES
    )
    plot: bool = files_option("Add a plot of the losses to the adapter's card.", default=False, group=Group.OUTPUT)
    hub: Hub = Hub()
    trust_remote_code: bool = tuning_option(TRUST_REMOTE_CODE, default=False, group=Group.ADVANCED)
    dry_run: bool = option(
        "Print the plan, and the memory that training needs; write nothing.", default=False, group=Group.OUTPUT
    )
    existing: ExistingOutput = ExistingOutput()
    reporting: Reporting = Reporting()

    @property
    def execution(self) -> Execution:
        return Execution(threads=self.threads)
