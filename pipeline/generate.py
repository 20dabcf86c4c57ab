"""A model of transformers that writes: loaded with or without converted experts, its words streamed, its speed measured."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError
from ktconvert.layouts.gpu_output import is_gpu_output
from ktconvert.layouts.output import is_output
from ktconvert.native_quant.runtime.weights import layers_of

# extra -> the packages without which its commands cannot start
NEEDS = {
    "run": ("torch", "transformers", "accelerate"),
    "serve": ("torch", "transformers", "accelerate", "fastapi", "uvicorn", "openai", "pydantic"),
}
# The plainest chat template there is, for tokenizers that have none: what was said, one message per line.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def require(extra: str) -> None:
    """Raises KtconvertError, which names what to install, where a package of this extra is missing."""
    missing = [name for name in NEEDS[extra] if find_spec(name) is None]
    if missing:
        raise KtconvertError(
            f"`ktconvert {extra}` needs {', '.join(missing)}, not installed here: pip install 'ktconvert[{extra}]'"
        )


def share_cores() -> None:
    """Have torch's threads sleep when they have no work; to be called before torch is imported.

    Otherwise they spin on the cores that compute the experts: decoding is then up to 20 times slower. What the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(frozen=True)
class Choice:
    """Which model, and who computes its experts.

    model        a directory or a hub id
    cpu_weights  what the model was converted into; None: the experts stay in the model
    threads      None: the physical cores that this process may use
    """

    model: str
    cpu_weights: Path | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    threads: int | None = None
    exact: bool = False

    def where(self) -> dict[str, Any]:
        """What every from_pretrained of transformers takes."""
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}

    def quantization_config(self) -> Any:
        """What from_pretrained takes to swap the experts; None without cpu_weights."""
        if self.cpu_weights is None:
            return None
        from ktconvert.native_quant.runtime.hf import KTConvertConfig

        return KTConvertConfig(
            cpu_weights=self.cpu_weights.expanduser().absolute(), exact=self.exact, threads=self.threads
        )


@dataclass(frozen=True)
class Speed:
    """Seconds until the first new token, and for those after it."""

    prompt: int
    new: int
    prefill: float
    decode: float

    def line(self) -> str:
        """For people."""
        first = f"prefill {self.prompt} tokens in {self.prefill:.2f} s ({self.prompt / self.prefill:.1f} tokens/s)"
        if self.new < 2:
            return first
        rest = self.new - 1
        return f"{first}, decode {rest} tokens in {self.decode:.2f} s ({rest / self.decode:.1f} tokens/s)"


@contextmanager
def explained(model: str) -> Iterator[None]:
    """What transformers raises for a model that it cannot load, as InputError with its first line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{model}: transformers cannot load it: {said[0]}") from error


def prepare(choice: Choice) -> Any:
    """Threads, and the model's config. To be called before torch is imported.

    Raises InputError for a model that is not there, UnsupportedError for one that is converted experts alone, or that is quantized
    itself where its experts are to come from elsewhere.
    """
    if choice.model.startswith(("/", ".", "~")) and not Path(choice.model).exists():
        raise InputError(f"{choice.model}: no such directory; give a model's directory or its hub id")
    if is_output(Path(choice.model)) and not is_gpu_output(Path(choice.model)):
        raise UnsupportedError(
            f"{choice.model}: holds converted experts, no model; give the original model, and this as --cpu-weights"
        )
    if choice.cpu_weights is not None:
        layers_of(choice.cpu_weights.expanduser())  # a wrong directory is told at once
    share_cores()
    import torch
    import transformers

    if choice.threads is not None:
        torch.set_num_threads(choice.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with explained(choice.model):
        config = transformers.AutoConfig.from_pretrained(choice.model, **choice.where())
    have = getattr(config, "quantization_config", None)
    have = have or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if choice.cpu_weights is not None and have is not None:
        method = have.get("quant_method") if isinstance(have, dict) else have.quant_method
        raise UnsupportedError(
            f"{choice.model}: is quantized itself ({method}), and transformers takes one quantization per model; "
            "give a BF16 copy of the model, with the same --cpu-weights"
        )
    return config


def load(choice: Choice) -> tuple[Any, Any]:
    """The model and its tokenizer.

    Raises InputError where transformers cannot load it or finds a part missing, UnsupportedError where the experts do not fit it.
    """
    config = prepare(choice)
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        kind = transformers.AutoModelForImageTextToText
    experts = choice.quantization_config()
    options = {} if experts is None else {"quantization_config": experts}
    with explained(choice.model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(choice.model, **choice.where())
        model, found = kind.from_pretrained(choice.model, **choice.where(), **options, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise InputError(
            f"{choice.model}: lacks {len(missing)} tensors of its model, such as {missing[0]}; download it again"
        )
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # what transformers gives where its files are missing
        raise InputError(f"{choice.model}: has no tokenizer; put its files (tokenizer.json) beside config.json")
    return model, tokenizer


def write(
    model: Any,
    tokenizer: Any,
    inputs: Any,
    *,
    max_new_tokens: int,
    temperature: float,
    say: Callable[[str], None],
) -> tuple[str, Speed]:
    """Let the model go on after `inputs` (input_ids [1, T], ...), saying each piece as soon as it is a whole word.

    temperature  0: always the likeliest token. Returns all that was said, and the speed.
    """
    import torch
    from transformers import TextStreamer

    class Spoken(TextStreamer):
        """Passes the text on and notes when the first and the last token came."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self.text = ""

        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                self.times.append(time.perf_counter())
            super().put(value)  # type: ignore[no-untyped-call]

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            say(text)

    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.do_sample = max_new_tokens, temperature > 0
    config.temperature = temperature if temperature > 0 else None
    if temperature <= 0:
        config.top_p = config.top_k = None
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    spoken = Spoken()
    inputs = inputs.to(model.device)
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(**inputs, generation_config=config, streamer=spoken)
    first, last = spoken.times[0], spoken.times[-1]
    return spoken.text, Speed(inputs["input_ids"].shape[1], len(spoken.times), first - begin, last - first)


def prompt_inputs(tokenizer: Any, prompt: str) -> Any:
    """A text that is to be continued. Raises InputError for one without a token."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        raise InputError("the prompt holds no token; give some text")
    return inputs


def chat_inputs(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Any:
    """A conversation that is to be answered, in the tokenizer's own form or the plainest one."""
    return tokenizer.apply_chat_template(
        list(messages),
        chat_template=None if tokenizer.chat_template else PLAIN_TEMPLATE,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
