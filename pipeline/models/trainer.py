"""Data, model and Trainer of a LoRA training, and the memory that it needs."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError, KTConvertError, ResourceError, UnsupportedError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import explain_full_disk
from ktconvert.layouts.sources.config import find_experts_per_token
from ktconvert.layouts.tensors import list_projections
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.experts import open_experts
from ktconvert.native_quant.runtime.transformers_version import hide_renamings
from ktconvert.pipeline.models import loading, pretrained
from ktconvert.pipeline.options.model_options import TrainOptions
from ktconvert.pipeline.report.text import first_line

NO_LIMIT = 1 << 40  # numbers of samples, and of tokens of a sample
EXPERTS = "experts"  # PEFT's target module for the routed experts
ALL_LINEAR = "all-linear"
LORA_MEMORY = "LoRA with gradients and AdamW"
PROBE_BYTES = 1 << 20
RUST_ERRNO = re.compile(r"\(os error (\d+)\)")

Rows = list[dict[str, Any]]  # a data set for Trainer


def read_sequences(options: TrainOptions, tokenizer: Any, dataset: str, note: Callable[[str], None]) -> Rows:
    """Return a data set as sequences (int64 [sequence_length]), each with itself as labels.

    The texts follow each other, separated by the end-of-text token, and are cut into sequences; the tokens after the
    last sequence are dropped. Raises InputError for less than one sequence.
    """
    import numpy as np
    import torch

    from ktconvert.pipeline.models.text_datasets import read_samples
    from ktconvert.pipeline.options.option_groups import Samples

    seed = options.schedule_options.seed
    length = options.schedule_options.sequence_length
    settings = Samples(
        dataset=dataset,
        dataset_split=options.dataset_split,
        num_calibration_samples=NO_LIMIT,
        sequence_length=NO_LIMIT,
        seed=seed,
    )
    samples = read_samples(settings, tokenizer, note)
    separator = [] if tokenizer.eos_token_id is None else [np.array([tokenizer.eos_token_id], np.int64)]
    ids = np.concatenate([array for sample in samples for array in (sample, *separator)])
    if len(ids) < length:
        raise InputError(
            f"{dataset}: has {len(ids)} tokens, less than one sequence of {length}; give more text, "
            "or a smaller --sequence-length"
        )
    count = len(ids) // length
    rows = torch.from_numpy(ids[: count * length].reshape(count, length))
    return [{"input_ids": row, "labels": row} for row in rows]


def list_target_modules(options: TrainOptions, model: Any) -> list[str]:
    """Return PEFT's target modules: those of the options, or the linear layers of attention, and experts.

    ALL_LINEAR stands for all linear layers but the output layer, and experts, as in PEFT.
    """
    import torch

    given = options.lora.target_modules
    head = model.get_output_embeddings()
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if given == ALL_LINEAR:
        return [*dict.fromkeys(name.split(".")[-1] for name, module in modules if module is not head), EXPERTS]
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
        if not names:
            raise UsageError(f"--target-modules: it names no module; give names, or {ALL_LINEAR}")
        return names
    linears = (name.rpartition(".") for name, _ in modules)
    # Nemotron-H's attention is named "mixer"; only its class tells.
    blocks = ((f"{block} {type(model.get_submodule(block)).__name__}".lower(), name) for block, _, name in linears)
    return [*dict.fromkeys(name for block, name in blocks if "attn" in block or "attention" in block), EXPERTS]


def _require_known_targets(
    options: TrainOptions, names: Iterable[str], model: Any, prefixes: tuple[str, ...], projections: Iterable[str]
) -> None:
    """Raise UnsupportedError, which lists the possible names, for a target module that the model lacks.

    model        as transformers builds it, without RoutedExperts
    prefixes     begin the names of modules in routed experts
    projections  names of the projections of routed experts
    """
    import torch

    modules = {name: module for name, module in model.named_modules() if not name.startswith(prefixes)}
    linears = {name.split(".")[-1] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    known = {EXPERTS, *projections, *(name.split(".")[-1] for name in modules)}
    if unknown := [name for name in names if name.split(".")[-1] not in known]:
        possible = ", ".join(sorted({EXPERTS, *projections, *linears}))
        raise UnsupportedError(
            f"--target-modules {unknown[0]}: {options.input} has no such module; choose from {possible}"
        )


def add_adapter(options: TrainOptions, model: Any) -> Any:
    """Return the model with a new adapter.

    Raises UnsupportedError for target modules that the model lacks or PEFT cannot adapt.
    """
    import peft

    lora = options.lora
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list_target_modules(options, model),
        task_type="CAUSAL_LM",
    )
    try:
        with hide_renamings():
            return peft.get_peft_model(model, config)
    except ValueError as error:
        if match := re.match(r"Target module (\w+)\(", str(error)):  # PEFT prints the whole module
            remedy = "give converted experts as --cpu-weights, or --target-modules without experts"
            raise UnsupportedError(f"PEFT cannot adapt its {match[1]}", remedy, path=options.input) from error
        raise UnsupportedError(f"{options.input}: {first_line(error)}") from error


def describe_trained_parameters(model: Any) -> str:
    """Return a sentence with the number of parameters that a model with a new adapter trains, experts apart."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    def count(module: Any) -> int:
        return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)

    experts = sum(count(module) for module in model.modules() if isinstance(module, RoutedExperts))
    return f"trained parameters: {experts} of routed experts, {count(model) - experts} of other modules"


def make_trainer_arguments(options: TrainOptions, folder: Path, evaluates: bool) -> Any:
    """Return transformers' TrainingArguments.

    evaluates  whether there is an evaluation data set
    """
    import torch
    import transformers

    schedule = options.schedule_options
    with hide_renamings():
        return transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=schedule.epochs or 1,
            max_steps=schedule.max_steps or -1,
            per_device_train_batch_size=schedule.batch_size,
            per_device_eval_batch_size=schedule.batch_size,
            gradient_accumulation_steps=schedule.gradient_accumulation,
            learning_rate=schedule.learning_rate,
            lr_scheduler_type=schedule.schedule,
            warmup_steps=schedule.warmup,  # below 1: a fraction of all steps
            weight_decay=schedule.weight_decay,
            max_grad_norm=schedule.max_grad_norm,
            seed=schedule.seed,
            gradient_checkpointing=schedule.gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            save_steps=options.save_steps,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=options.save_steps if evaluates else None,
            eval_on_start=evaluates,
            prediction_loss_only=True,
            logging_steps=1,
            logging_nan_inf_filter=False,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )


def build_trainer(
    options: TrainOptions,
    model: Any,
    folder: Path,
    rows: Rows,
    eval_rows: Rows | None,
    on_checkpoint: Callable[[int, Path], None],
    report_logs: Callable[[Any, Any], None],
    is_stopping: Callable[[], bool],
) -> Any:
    """Return a transformers Trainer.

    folder         directory for checkpoints
    rows           sequences to train on
    eval_rows      sequences to evaluate; None for no evaluation
    on_checkpoint  is called with (step, directory) of each complete checkpoint
    report_logs    is called with (state, logs) for each loss
    is_stopping    is called after each step: whether to make a checkpoint and end
    """
    import transformers

    class Trainer(transformers.Trainer):
        def _save_checkpoint(self, *model_and_trial: Any) -> None:
            with explain_failed_writes(folder):
                super()._save_checkpoint(*model_and_trial)
            on_checkpoint(self.state.global_step, folder / f"checkpoint-{self.state.global_step}")

    class Callbacks(transformers.TrainerCallback):
        def report(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            report_logs(state, logs)

        def end_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if is_stopping():
                control.should_save = control.should_training_stop = True

        on_log, on_step_end = report, end_step

    trainer = Trainer(
        model=model,
        args=make_trainer_arguments(options, folder, eval_rows is not None),
        train_dataset=rows,
        eval_dataset=eval_rows,
        callbacks=[Callbacks()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# --- failed writes --------------------------------------------------------------------------------


@contextmanager
def explain_failed_writes(folder: Path) -> Iterator[None]:
    """Raise OSError or ResourceError with the reason of a failed write below a folder.

    torch and safetensors do not always give it: a full disk, a quota, a file-size limit.
    """
    from safetensors import SafetensorError

    try:
        with explain_full_disk(folder):
            yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = _find_errno(error) or _probe_errno(folder)
        if number is None:
            remedy = "check the disk, then run the command again"
            raise KTConvertError(f"{folder}: cannot be written ({first_line(error)}); {remedy}.") from error
        with explain_full_disk(folder):
            raise OSError(number, os.strerror(number), str(folder)) from error


def _find_errno(error: BaseException | None) -> int | None:
    """Return the errno of a failed write; None if the error and its causes have none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if match := RUST_ERRNO.search(str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return None


def _probe_errno(folder: Path) -> int | None:
    """Return the errno of writing a small file, or EFBIG if a file reached the size limit; else None."""
    limit = machine.file_size_limit()
    if limit is not None and any(path.stat().st_size >= limit for path in folder.rglob("*")):
        return errno.EFBIG
    try:
        publish.write_file(folder / "probe", bytes(PROBE_BYTES))
    except ResourceError as error:
        return _find_errno(error)
    except OSError as error:
        return error.errno
    finally:
        with suppress(OSError):
            (folder / "probe").unlink(missing_ok=True)
    return None


# --- memory ---------------------------------------------------------------------------------------


def estimate_memory(options: TrainOptions, choice: loading.ModelChoice) -> dict[str, int]:
    """Return the bytes that a step needs in addition to the converted experts, from the model's config."""
    config = loading.prepare_config(choice)
    import torch

    from ktconvert.native_quant.runtime.adapters import projection_names
    from ktconvert.native_quant.runtime.hf_modules import find_experts

    with (
        pretrained.explain_errors(choice.model, pretrained.CONFIG, action=pretrained.BUILD),
        torch.device("meta"),
    ):
        model = pretrained.auto_class(config).from_config(config)
    experts = find_experts(model, open_experts((choice.cpu_weights or Path(choice.model)).expanduser()).function)
    schedule = options.schedule_options
    rank = options.lora.rank
    names = list_target_modules(options, model)
    prefixes = tuple(f"{module.name}." for module in experts)
    projections = projection_names(model, experts[0].gated)
    _require_known_targets(options, names, model, prefixes, projections)
    non_expert_parameters = sum(
        weight.numel() for name, weight in model.named_parameters() if not name.startswith(prefixes)
    )
    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in names
    ]
    lora_parameters = sum(rank * (linear.in_features + linear.out_features) for linear in linears)
    of_experts = [name for name in projections if {EXPERTS, name} & {target.split(".")[-1] for target in names}]
    lora_parameters += sum(
        len(of_experts) * rank * module.num_experts * (module.hidden + module.intermediate) for module in experts
    )
    text_config = config.get_text_config(decoder=True)
    tokens = schedule.batch_size * schedule.sequence_length
    hidden = experts[0].hidden
    layers = text_config.num_hidden_layers
    topk = find_experts_per_token(text_config.to_dict(), experts[0].layer, experts[0].num_experts)[0]
    # For each route, in BF16: gate, up, the activation and down's output (training.SavedForward).
    columns = max(len(list_projections(module.gated)) * module.intermediate + module.hidden for module in experts)
    route_bytes = 2 * tokens * topk * columns
    # Tensors that torch keeps for a layer's other modules, counted in Qwen3-MoE: float32 copies of LoRA's inputs,
    # outputs of linear layers in BF16 and float32, and the norms' inputs.
    linear_bytes = sum(4 * linear.in_features + 6 * linear.out_features for linear in linears) // layers
    layer_bytes = route_bytes + tokens * (linear_bytes + 12 * hidden)
    activations = layer_bytes * layers
    if schedule.gradient_checkpointing:
        activations = 2 * tokens * hidden * layers + layer_bytes
    needs = {
        "model without experts": 2 * non_expert_parameters,
        "activations of a step": activations,
        "gradients of one layer": 2 * route_bytes,
        # In BF16 and float32, and of log_softmax.
        "logits and their gradient": 16 * tokens * text_config.vocab_size,
        LORA_MEMORY: 16 * lora_parameters,
    }
    return {**needs, "together": sum(needs.values())}
