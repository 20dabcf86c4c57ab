"""Configs, tokenizers and models of transformers, for every command: the only module that asks transformers for a
config or a tokenizer (tests/test_structure.py). It switches off settings beside predictions, and turns errors of
transformers for a model's files into one sentence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ktconvert.layouts import patterns
from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints import hub
from ktconvert.layouts.checkpoints.archs import NUM_EXPERTS
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, KtconvertError, ResourceError, UnsupportedError
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.runtime.hot_mask import REMEDY
from ktconvert.pipeline.report.text import first_line

if TYPE_CHECKING:
    import torch

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# What a config.json may ask of a model beside its predictions, and how it is left out. Left over from training, router
# logits make transformers add up a loss, which fails for a prompt in parts, with padding and with beams.
PREDICTIONS_ONLY = dict.fromkeys(("output_router_logits", "output_attentions", "output_hidden_states"), False)
PREDICTIONS_ONLY["return_dict"] = True
BUILD, COMPUTE = "build the model that it describes", "compute with the model that it describes"
NO_NUMBERS = "with the numbers that it gives, or with damaged weights, the model computes NaN or infinity"
COMPARE = "compare it with the file that the model was released with"
# What torch's RuntimeError says where an allocation on the CPU fails.
NO_MEMORY = "DefaultCPUAllocator"
# What transformers says of a model type that it does not have.
UNKNOWN = ("does not recognize this architecture", "Unrecognized configuration class")
WHERE = ("revision", "trust_remote_code")  # what of from_pretrained says which files, and how they are read


@contextmanager
def explained(
    model: str, file: str, *, doing: str = "load it", passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise whatever transformers raises for a file of a model as one sentence, which names the file if the model is a
    directory: UnsupportedError for a model that it does not know, else InputError. Let pass errors of ktconvert, memory
    that runs out, and `passing`.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # an error in Rust, which is no Exception
        if isinstance(error, (KtconvertError, *passing)) or not (isinstance(error, Exception) or is_panic):
            raise
        if is_memory(error):
            raise
        kind: type[KtconvertError] = InputError
        said, remedy = str(error), COMPARE
        if any(text in said for text in UNKNOWN):
            kind, remedy = UnsupportedError, "use one whose type this version knows"
        elif "trust_remote_code" in said:
            remedy = "give --trust-remote-code if you trust the code that comes with the model"
        problem = f"transformers cannot {doing}: {first_line(error)}"
        raise kind(problem, remedy, path=_place(model, file)) from error


def is_memory(error: BaseException) -> bool:
    """Return whether memory ran out, in the system or on a GPU."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error)


@contextmanager
def memory_explained(model: str) -> Iterator[None]:
    """Raise ResourceError where memory runs out."""
    import torch

    try:
        yield
    except Exception as error:
        if not is_memory(error):
            raise
        what = "the system has too little memory; convert the experts with `ktconvert cpu`, or end other programs"
        if isinstance(error, torch.OutOfMemoryError):
            what = f"the GPU has too little memory for the hot experts and all that is no expert; {REMEDY}"
        raise ResourceError(f"{model}: {what}") from error


def _place(model: str, file: str) -> str:
    """Return the path of a file of a model where the model is a directory, else the model."""
    if not Path(model).is_dir():
        return model
    if file == GENERATION and not Path(model, file).is_file():
        file = CONFIG
    if file == TOKENIZER:
        import tokenizers

        with suppress(Exception):
            tokenizers.Tokenizer.from_file(str(Path(model, TOKENIZER)))
            file = TOKENIZER_CONFIG  # the other one is right by itself
    return str(Path(model, file))


def read_config(model: str, **where: Any) -> Any:
    """Return the config of a model, which asks for predictions only. where: as from_pretrained takes it. Raises the
    errors of explained and require_plausible.
    """
    import transformers

    from ktconvert.native_quant.runtime import hf_dtypes

    hf_dtypes.keep_routers()
    if Path(model).is_dir() and not Path(model, CONFIG).is_file():
        raise InputError(f"{model}: has no {CONFIG}; put the model's own there")
    with explained(model, CONFIG):
        config = transformers.AutoConfig.from_pretrained(model, **where)
        require_plausible(config, model, where.get("revision"))
    ask_for_predictions(config)
    return config


def ask_for_predictions(config: Any) -> None:
    """Have a model of this config, and of those within it, give its predictions and nothing else."""
    import transformers

    for name, value in PREDICTIONS_ONLY.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for part in vars(config).values():
        if isinstance(part, transformers.PreTrainedConfig):
            ask_for_predictions(part)


def require_plausible(config: Any, model: str, revision: str | None = None) -> None:
    """Raise InputError for a number of experts per token that the model does not have, and for sizes with which it
    would take forever to build the model.
    """
    text, place = config.get_text_config(decoder=True).to_dict(), _place(model, CONFIG)
    experts = cfg.number(text, NUM_EXPERTS)
    if experts is not None and (why := cfg.wrong_experts_per_token(text, experts[1])) is not None:
        raise InputError(f"{place}: {why}")
    root = Path(model) if Path(model).is_dir() else hub.snapshot(model, revision)
    if root is not None and (large := cfg.large_sizes(config.to_dict())):
        tensors: dict[str, TensorInfo] = {}
        with suppress(KtconvertError):  # of weights; whoever reads them raises it
            tensors = open_checkpoint(root).tensors
        if why := cfg.wrong_size(large, tensors):
            raise InputError(f"{place}: {why}; {COMPARE}")


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers for a model of this config that writes text."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def read_tokenizer(model: str, kind: str = "AutoTokenizer", **where: Any) -> Any:
    """Return the tokenizer, or what another auto class makes of its files. Raises InputError where it is unusable."""
    import transformers

    with explained(model, TOKENIZER):
        made = getattr(transformers, kind).from_pretrained(model, **where)
        tokenizer = getattr(made, "tokenizer", made)
        # Where files are missing, it is no tokenizer, or it makes no token of a text.
        if (
            not isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
            or not tokenizer("a", add_special_tokens=False)["input_ids"]
        ):
            raise InputError(f"{model}: has no tokenizer; put its files ({TOKENIZER}) beside {CONFIG}")
        tokenizer.decode(tokenizer("a b")["input_ids"])
    return made


def read_generation_config(model: str, **where: Any) -> Any:
    """Return the generation config; None for a model without one. Raises InputError for one that cannot be used, which
    from_pretrained would leave out in silence.
    """
    import transformers

    if not Path(model, GENERATION).is_file():
        return None
    with explained(model, GENERATION):
        return transformers.GenerationConfig.from_pretrained(model, **where)


def load_weights(kind: Any, model: str, config: Any, weights: dict[str, torch.Tensor] | None, **options: Any) -> Any:
    """Return the model with its weights: what from_pretrained of an auto class gives, with these weights if there are
    any. Raises InputError for tensors that are missing or have other shapes than the config says, and for a model that
    cannot compute.
    """
    where = {name: options[name] for name in WHERE}
    generation = read_generation_config(model, **where)
    with memory_explained(model), explained(model, CONFIG, doing=BUILD), without_report(), limit_patterns(model):
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        if weights is None:
            made, loading = kind.from_pretrained(model, config=config, **options)
        else:
            options = {name: value for name, value in options.items() if name not in WHERE} | {"state_dict": weights}
            made, loading = kind._model_mapping[type(config)].from_pretrained(None, config=config, **options)
            made.config.name_or_path = made.name_or_path = model
            made.generation_config = generation or made.generation_config
    if mismatched := sorted(loading["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        what = f"makes {name} {list(expected)}, and the stored tensor is {list(stored)}{more}"
        raise InputError(f"{_place(model, CONFIG)}: {what}; {COMPARE}")
    if missing := sorted(loading["missing_keys"]):
        what = f"lacks {len(missing)} tensors of the model that {CONFIG} describes, such as {missing[0]}"
        raise InputError(f"{model}: {what}; compare both with the release")
    require_computing(made, model)
    return made


@contextmanager
def limit_patterns(model: str) -> Iterator[None]:
    """Have compressed-tensors match the regular expressions of config.json with a limit of time: `re` has none."""
    try:
        from compressed_tensors.utils import match
    except ImportError:  # transformers says what to install where it is needed
        yield
        return
    expression = functools.cache(lambda text: patterns.compile(text, _place(model, CONFIG)))
    original = match.re
    match.re = SimpleNamespace(match=lambda text, name: expression(text).match(name))
    try:
        yield
    finally:
        match.re = original


@contextmanager
def without_report() -> Iterator[None]:
    """Silence transformers' table of missing and other tensors: one sentence says it."""
    import transformers

    logging: Any = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def require_computing(made: Any, model: str) -> None:
    """Raise InputError for a model that cannot compute two tokens, or computes no numbers."""
    import torch

    with memory_explained(model), explained(model, CONFIG, doing=COMPUTE), torch.no_grad():
        logits = made(input_ids=torch.zeros((1, 2), dtype=torch.long, device=made.device)).logits
    if not bool(logits.isfinite().any(-1).all()):
        raise InputError(f"{_place(model, CONFIG)}: {NO_NUMBERS}; {COMPARE}")
