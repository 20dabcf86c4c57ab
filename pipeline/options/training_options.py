"""Options of train."""

from __future__ import annotations

from pathlib import Path

import click

from ktconvert.pipeline.options.declare import NONE, Options, files, option, tuning
from ktconvert.pipeline.options.option_groups import Execution, Existing, Hub, OutputOptions, Reporting
from ktconvert.pipeline.options.types import FilePath, Number, OutputPath, PathOrHubId, Real, Text

DATA = "a file or folder (.txt, .jsonl, .json, .parquet), or a hub id"


class LoraOptions(Options, title="Adapter"):
    rank: int = files("LoRA's rank r.", Number(min=1), default=16)
    alpha: float = files("LoRA's alpha; what is added is scaled by alpha / r.", Real(min=0), default=32.0)
    dropout: float = files("Dropout of LoRA's inputs, while training.", Real(0, 0.99), default=0.0)
    target_modules: str | None = files(
        "Which modules, by names with commas between them, as in PEFT; experts: the routed experts.",
        Text(),
        unset="the linear layers of attention, and experts",
    )


class Schedule(Options, title="Training"):
    epochs: float = files("Times that all of --dataset is seen.", Real(min=0.001), default=1.0)
    max_steps: int | None = files("Instead of --epochs: this many steps.", Number(min=1))
    sequence_length: int = files("Tokens of a sequence; texts are packed into them.", Number(min=2), default=512)
    batch_size: int = files("Sequences that go through the model at once.", Number(min=1), default=4)
    gradient_accumulation: int = files("Batches of a step.", Number(min=1), default=1)
    learning_rate: float = files("The highest learning rate.", Real(min=0), default=2e-4)
    schedule: str = files(
        "How it falls: by a cosine, linear, or not at all (constant).",
        click.Choice(["cosine", "linear", "constant"], case_sensitive=False),
        default="cosine",
    )
    warmup: float = files("Part of the steps in which it rises.", Real(0, 1), default=0.03)
    weight_decay: float = files("AdamW's weight decay.", Real(min=0), default=0.0)
    max_grad_norm: float = files("Length to which gradients are clipped.", Real(min=0), default=1.0)
    seed: int = files("Seed of initial weights, order and dropout.", Number(0, (1 << 32) - 1), default=42)
    gradient_checkpointing: bool = files(
        "Keep one layer's activations only, and compute the others twice.", default=False
    )


class TrainOptions(OutputOptions):
    input: str = option(
        "A directory or a hub id (org/name).", PathOrHubId(absolute=True), argument="model", default=NONE
    )
    output: Path = option(
        "Directory of the adapter.", OutputPath(absolute=True), flags=("-o", "--output"), default=NONE
    )
    cpu_weights: Path | None = files(
        "What MODEL was converted into, or a checkpoint of it: the experts are computed from it.",
        FilePath(absolute=True),
        unset="MODEL",
    )
    dataset: str = files(f"Texts to train on: {DATA}.", PathOrHubId(absolute=True), default=NONE)
    dataset_split: str = files("Split of a hub's data set.", default="train")
    eval_dataset: str | None = files(
        "Texts whose loss is measured at the beginning, with every checkpoint, and at the end.",
        PathOrHubId(absolute=True),
    )
    lora: LoraOptions = LoraOptions()
    schedule_options: Schedule = Schedule()
    save_steps: int = files("Steps between two checkpoints, from which `resume` goes on.", Number(min=1), default=100)
    threads: int | None = tuning("Threads of the experts and of torch.", Number(min=1), unset="physical cores")
    plot: bool = files("Also draw the losses, into the adapter's card.", default=False)
    hub: Hub = Hub()
    trust_remote_code: bool = tuning("Let transformers run Python code that comes with MODEL.", default=False)
    dry_run: bool = option("Print what it takes, and stop.", default=False)
    existing: Existing = Existing()
    reporting: Reporting = Reporting()

    @property
    def execution(self) -> Execution:
        return Execution(cpuinfer_threads=self.threads)
