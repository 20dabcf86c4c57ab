"""Configs, tokenizers and models from transformers, for every command.

This is the only module that asks transformers for a config or a tokenizer (tests/test_structure.py). It disables
settings that would add more than predictions, and reports errors of transformers in one sentence that names the file.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from ktconvert.layouts import patterns
from ktconvert.layouts.checkpoints.archs import NUM_EXPERTS
from ktconvert.layouts.errors import InputError, KTConvertError, ResourceError, UnsupportedError
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.source import open_checkpoint, read_json_object
from ktconvert.layouts.tensors import TensorInfo, format_ranges, name_layers
from ktconvert.native_quant.runtime.hot_experts import REMEDY
from ktconvert.pipeline.report.text import first_line, plural

if TYPE_CHECKING:
    import torch

    from ktconvert.native_quant.runtime.stored_tensors import StoredTensor

MOST_TOKENS = 1 << 24
LIBRARIES = 3 << 28  # bytes of the interpreter with torch, transformers and llmcompressor or PEFT: 0.6 GiB measured
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# Files without which no tokenizer can be loaded.
TOKENIZER_FILES = ("*token*", "*.model", "vocab*", "*.tiktoken", "*.py")
NO_BACKEND = "Couldn't instantiate the backend tokenizer"  # transformers, if only tokenizer_config.json exists
# Values of a config for a model that returns only its predictions. With router logits (a setting for training),
# transformers computes a loss, which fails for a prompt in chunks, with padding and with beams.
PREDICTIONS_ONLY = dict.fromkeys(("output_router_logits", "output_attentions", "output_hidden_states"), False)
PREDICTIONS_ONLY["return_dict"] = True
BUILD, COMPUTE = "build the model that it describes", "compute with the model that it describes"
# Numbers of a generation config, with which transformers fails only when it generates: type, lowest and highest value.
SAMPLING: dict[str, tuple[type[int | float], float, float]] = {
    "temperature": (float, 0, 1e6),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "top_k": (int, -1, 1e9),  # -1 and 0: off
    "repetition_penalty": (float, 0.1, 10),
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")  # of text, not of a vision tower
COMPARE = "compare it with the file of the model's release"
COMPARE_FILES = "compare the model's files with its release (`ktconvert models --check`)"
GIVE_EXPERTS = "give converted experts as --cpu-weights"
CHECKED_TOKENS = 16  # with fewer, torch's attention on a CPU ignores queries and keys that are NaN
TORCH_OUT_OF_MEMORY = "DefaultCPUAllocator"  # in torch's RuntimeError if an allocation on the CPU fails
# In transformers' error for an unknown model type.
UNKNOWN_TYPE = ("does not recognize this architecture", "Unrecognized configuration class")
# Options of from_pretrained that select the files and how to read them.
HUB_OPTIONS = ("revision", "trust_remote_code", "local_files_only")


@contextmanager
def explain_errors(
    model: str, file: str, *, action: str = "load it", unchanged: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert the errors of transformers for a file of a model into a KTConvertError of one sentence.

    The sentence names the file if the model is a directory. The error is UnsupportedError for a model type that
    transformers does not know, else InputError. Errors of ktconvert, out-of-memory errors and those in `unchanged` pass
    as they are.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # an error in Rust, which is not an Exception
        if isinstance(error, (KTConvertError, *unchanged)) or not (isinstance(error, Exception) or is_panic):
            raise
        if is_out_of_memory(error):
            raise
        error_type: type[KTConvertError] = InputError
        message = str(error)
        remedy = COMPARE
        if any(text in message for text in UNKNOWN_TYPE):
            error_type = UnsupportedError
            remedy = "use a model with a type that this version supports"
        elif "trust_remote_code" in message:
            remedy = "give --trust-remote-code if you trust the code that comes with the model"
        problem = f"transformers cannot {action}: {first_line(error)}"
        raise error_type(problem, remedy, path=_locate(model, file)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system or a GPU ran out of memory."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or TORCH_OUT_OF_MEMORY in str(error)


@contextmanager
def explain_memory_errors(model: str) -> Iterator[None]:
    """Raise ResourceError where the system or a GPU runs out of memory."""
    import torch

    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = "the system has too little memory; convert the experts with `ktconvert cpu`, or close other programs"
        if isinstance(error, torch.OutOfMemoryError):
            problem = f"the GPU has too little memory for the hot experts and the non-expert tensors; {REMEDY}"
        raise ResourceError(f"{model}: {problem}") from error


def _locate(model: str, file: str) -> str:
    """Return the path of the file to name in a message; the model itself if it is no directory."""
    if not Path(model).is_dir():
        return model
    if file == GENERATION and not Path(model, file).is_file():
        file = CONFIG
    if file == TOKENIZER:
        import tokenizers

        with suppress(Exception):
            tokenizers.Tokenizer.from_file(str(Path(model, TOKENIZER)))
            file = TOKENIZER_CONFIG  # tokenizer.json by itself is valid
    return str(Path(model, file))


def read_config(model: str, **options: Any) -> Any:
    """Return the config of a model, set to give only predictions.

    options  options of from_pretrained

    Raises the errors of explain_errors and require_plausible, and UnsupportedError for a model with an encoder.
    """
    import transformers

    from ktconvert.native_quant.runtime import hf_non_experts

    hf_non_experts.keep_router_dtypes()
    if Path(model).is_dir() and not Path(model, CONFIG).is_file():
        raise InputError(f"{model}: has no {CONFIG}; copy the model's file into the directory")
    _require_object(model, CONFIG)
    with explain_errors(model, CONFIG):
        config = transformers.AutoConfig.from_pretrained(model, **options)
        require_plausible(config, model, options.get("revision"))
    if config.is_encoder_decoder:
        remedy = "load it with from_pretrained and KTConvertConfig"
        raise UnsupportedError(f"{model}: has an encoder, and this command takes only decoders; {remedy}")
    disable_other_outputs(config)
    return config


def disable_other_outputs(config: Any) -> None:
    """Change a config, and the configs within it, so that the model gives its predictions and nothing else."""
    import transformers

    for name, value in PREDICTIONS_ONLY.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for nested in vars(config).values():
        if isinstance(nested, transformers.PreTrainedConfig):
            disable_other_outputs(nested)


def require_plausible(config: Any, model: str, revision: str | None = None) -> None:
    """Raise InputError for a config whose numbers cannot be right.

    That is more experts per token than the model has, a dropout that is no fraction, a context without tokens, or sizes
    with which building the model would take forever.
    """
    text_config = config.get_text_config(decoder=True).to_dict()
    config_path = _locate(model, CONFIG)
    experts = cfg.find_number(text_config, NUM_EXPERTS)
    if experts is not None and (problem := cfg.explain_experts_per_token(text_config, experts[1])) is not None:
        raise InputError(f"{config_path}: {problem}")
    dropout = text_config.get("attention_dropout")
    if isinstance(dropout, (int, float)) and not 0 <= dropout < 1:
        raise InputError(f"{config_path}: attention_dropout must be at least 0 and below 1, not {dropout}; {COMPARE}")
    context = cfg.find_number(text_config, (cfg.CONTEXT_LENGTH,))
    if context is not None and context[1] < 1:
        raise InputError(f"{config_path}: {cfg.CONTEXT_LENGTH} must be at least 1, not {context[1]}; {COMPARE}")
    root = Path(model) if Path(model).is_dir() else hub.find_snapshot(model, revision)
    if root is not None and (large := cfg.find_large_sizes(config.to_dict())):
        tensors: dict[str, TensorInfo] = {}
        with suppress(KTConvertError):  # damaged weights: reported when they are loaded
            tensors = open_checkpoint(root).tensors
        if problem := cfg.explain_large_size(large, tensors):
            raise InputError(f"{config_path}: {problem}; {COMPARE}")


def _require_object(model: str, name: str) -> None:
    """Raise InputError for a file of a model's directory that is no JSON object; transformers explains missing ones."""
    if Path(model, name).is_file():
        read_json_object(Path(model, name))


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers for a model of this config that writes text."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def read_tokenizer(model: str, class_name: str = "AutoTokenizer", **options: Any) -> Any:
    """Return the tokenizer, or the object that a different auto class loads. Raises InputError if it is unusable.

    class_name  name of the auto class
    """
    import transformers

    missing = InputError(f"{model}: has no tokenizer; put its files ({TOKENIZER}) beside {CONFIG}")
    root = Path(model) if Path(model).is_dir() else hub.find_snapshot(model, options.get("revision"))
    if root is not None:
        _require_safe_tokenizer(root / TOKENIZER)
    if Path(model).is_dir() and not any(any(Path(model).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise missing
    _require_object(model, TOKENIZER_CONFIG)
    with explain_errors(model, TOKENIZER):
        try:
            loaded = getattr(transformers, class_name).from_pretrained(model, **options)
        except ValueError as error:
            if NO_BACKEND not in str(error):
                raise
            raise missing from error
        tokenizer = getattr(loaded, "tokenizer", loaded)
        # If files are missing, transformers returns a different object, or a tokenizer that returns no tokens.
        if (
            not isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
            or not tokenizer("a", add_special_tokens=False)["input_ids"]
        ):
            raise missing
        tokenizer.decode(tokenizer("a b")["input_ids"])
    return loaded


def require_chat_template(tokenizer: Any, model: str) -> None:
    """Raise InputError for a chat template with a syntax error. Tags of transformers' own are accepted."""
    import jinja2

    template = tokenizer.chat_template or {}
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except jinja2.TemplateSyntaxError as error:
            if "unknown tag" in str(error):
                continue
            file = TEMPLATE if Path(model, TEMPLATE).is_file() else TOKENIZER_CONFIG
            problem = f"the chat template has a syntax error in line {error.lineno} ({error.message})"
            raise InputError(problem, COMPARE, path=_locate(model, file)) from error


def _require_safe_tokenizer(path: Path) -> None:
    """Raise InputError for a file that is no JSON, and for values with which `tokenizers` would end the process.

    It allocates memory for all ids below the largest, and cuts the prefix of continuing tokens off without a check.
    """
    if not path.is_file():
        return
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, RecursionError, msgspec.DecodeError, ValueError):
        read_json_object(path)
        return
    try:
        model = document["model"]
        vocabulary = dict(model["vocab"])
        ids = {token["content"]: token["id"] for token in document["added_tokens"]} | vocabulary
        prefix = model.get("continuing_subword_prefix") or ""
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]] if prefix else []
        wrong_merge = next((f"{a} {b}" for a, b in merges if a + b.removeprefix(prefix) not in vocabulary), None)
    except (AttributeError, KeyError, TypeError, ValueError):
        return  # transformers explains what it cannot read
    for token, number in ids.items():
        if type(number) is int and number >= MOST_TOKENS:
            raise InputError(f"token {token!r:.100} has the id {number}, and no model has so many", COMPARE, path=path)
    if wrong_merge is not None:
        problem = f"merge {wrong_merge!r:.100} gives no token with the continuing_subword_prefix {prefix!r:.100}"
        raise InputError(problem, COMPARE, path=path)


def read_generation_config(model: str, **options: Any) -> Any:
    """Return the generation config, or None for a model without one.

    Raises InputError for an unusable file, which from_pretrained of a model would silently ignore.
    """
    import transformers

    if not Path(model, GENERATION).is_file():
        return None
    # Numbers without effect on the likeliest token, which many files have, would be logged between words of the answer.
    logging.getLogger(transformers.GenerationConfig.__module__).setLevel(logging.ERROR)
    _require_object(model, GENERATION)
    with explain_errors(model, GENERATION):
        config = transformers.GenerationConfig.from_pretrained(model, **options)
    _correct_generation_config(config, Path(model, GENERATION))
    return config


def _correct_generation_config(config: Any, path: Path) -> None:
    """Give a generation config the types that transformers requires. Raises InputError for values without a meaning."""
    for name, (kind, lowest, highest) in SAMPLING.items():
        value = getattr(config, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            problem = f"{name} is {value!r:.100}, not a number from {lowest:g} to {highest:g}"
            raise InputError(problem, COMPARE, path=path)
        setattr(config, name, kind(max(value, 0)))  # transformers refuses a temperature of 2, and takes 2.0
    if config.temperature == 0:
        config.do_sample, config.temperature = False, None
    for name in TOKEN_IDS:
        value = getattr(config, name, None)
        ids = value if isinstance(value, list) else [value] if value else []
        if not all(type(token) is int for token in ids):
            raise InputError(f"{name} is {value!r:.100}, not the id of a token", COMPARE, path=path)


def load_pretrained(
    model_class: Any, model: str, config: Any, weights: dict[str, StoredTensor] | None, **options: Any
) -> Any:
    """Return the model that from_pretrained of an auto class loads.

    weights  weights to use instead of the checkpoint's, by name

    Raises InputError for tensors that are missing or do not have the shapes of the config, and for a model that cannot
    compute.
    """
    hub_options = {name: options[name] for name in HUB_OPTIONS}
    generation = read_generation_config(model, **hub_options)
    with (
        explain_memory_errors(model),
        explain_errors(model, CONFIG, action=BUILD),
        silence_loading_report(),
        limit_pattern_time(model),
    ):
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        if weights is None:
            adapter_options = {"local_files_only": options["local_files_only"]}  # of an adapter beside the model
            loaded_model, info = model_class.from_pretrained(
                model, config=config, adapter_kwargs=adapter_options, **options
            )
        else:
            options = {name: value for name, value in options.items() if name not in HUB_OPTIONS}
            options["state_dict"] = weights
            loaded_model, info = model_class._model_mapping[type(config)].from_pretrained(
                None, config=config, **options
            )
            loaded_model.config.name_or_path = loaded_model.name_or_path = model
    loaded_model.generation_config = generation or loaded_model.generation_config
    from ktconvert.native_quant.runtime import hf_non_experts

    hf_non_experts.require_equal_shapes(info["mismatched_keys"], model)
    if missing := sorted(info["missing_keys"]):
        problem = f"lacks {plural(len(missing), 'tensor')} of the model that {CONFIG} describes, such as {missing[0]}"
        experts = f"{GIVE_EXPERTS} (a model from `ktconvert fetch` has none), or "
        remedy = (experts if ".experts." in missing[0] else "") + "compare both with the release"
        raise InputError(problem, remedy, path=model)
    _warn_of_unread_layers(config, info["unexpected_keys"], model)
    require_finite_logits(loaded_model, model)
    return loaded_model


def _warn_of_unread_layers(config: Any, names: Iterable[str], model: str) -> None:
    """Warn if tensors that the model did not read belong to more layers than config.json has, and it has no MTP layers.

    names  names of these tensors
    """
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    if count is None or getattr(text, "num_nextn_predict_layers", None):
        return
    layers = {int(match[1]) for name in names if (match := LAYER.match(name)) is not None}
    if unread := sorted(layer for layer in layers if layer >= count):
        place, ignored = _locate(model, CONFIG), name_layers(format_ranges(unread))
        problem = f"num_hidden_layers is {count}, so that {ignored} of the checkpoint is not computed"
        warnings.warn(f"{place}: {problem}; unless it is an MTP layer, {COMPARE}", stacklevel=2)


@contextmanager
def limit_pattern_time(model: str) -> Iterator[None]:
    """Have compressed-tensors match the regular expressions of config.json with a time limit, which `re` lacks."""
    try:
        from compressed_tensors.utils import match
    except ImportError:  # if the package is needed, transformers says what to install
        yield
        return
    expression = functools.cache(lambda text: patterns.compile(text, _locate(model, CONFIG)))
    original = match.re
    match.re = SimpleNamespace(match=lambda text, name: expression(text).match(name))
    try:
        yield
    finally:
        match.re = original


@contextmanager
def silence_loading_report() -> Iterator[None]:
    """Silence transformers' table of missing and other tensors: load_pretrained raises one sentence."""
    import transformers

    logging: Any = transformers.utils.logging
    old_verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(old_verbosity)


def require_finite_logits(loaded: Any, model: str) -> None:
    """Raise InputError for a model that cannot compute a few tokens, or computes NaN or infinity."""
    import torch

    with explain_memory_errors(model), explain_errors(model, CONFIG, action=COMPUTE), torch.no_grad():
        ids = torch.zeros((1, CHECKED_TOKENS), dtype=torch.long, device=loaded.device)
        logits = loaded(input_ids=ids).logits
    require_finite(logits, model)


def require_finite(logits: torch.Tensor, model: str) -> None:
    """Raise InputError for logits [..., vocabulary] of which the largest is infinite or NaN, as it is if any is NaN."""
    if not bool(logits.amax(-1).isfinite().all()):
        raise not_finite_error(model)


def not_finite_error(model: str) -> InputError:
    """Return the error for a model that computes NaN or infinity."""
    problem = "with its settings, or with damaged weights, the model computes NaN or infinity"
    return InputError(problem, COMPARE_FILES, path=_locate(model, CONFIG))
