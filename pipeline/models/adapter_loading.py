"""Loading a LoRA adapter, of `ktconvert train` or of PEFT, into a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.adapter import require_adapter
from ktconvert.layouts.errors import InputError, KtconvertError
from ktconvert.pipeline.ui.text import first_line

MISSING = "Found missing adapter keys"  # how PEFT warns of them


def with_adapter(model: Any, folder: Path, name: str) -> Any:
    """The model, which from now on computes with this adapter; name: the model's, for messages. Raises InputError for
    an adapter that does not fit.
    """
    import peft

    require_adapter(folder)
    with _explained(folder, name), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        warnings.filterwarnings("error", message=MISSING)
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.lora_dropout = 0.0  # of training only, and PEFT adapts no stacked experts with it
        return peft.PeftModel.from_pretrained(model, str(folder), config=config).eval().get_base_model()


@contextmanager
def _explained(folder: Path, model: str) -> Iterator[None]:
    """What is raised for an adapter that cannot be loaded as InputError."""
    try:
        yield
    except KtconvertError as error:
        raise InputError(f"{folder}: does not fit {model}: {error}") from error
    except Warning as warning:
        what = "it lacks tensors for modules that it names" if MISSING in str(warning) else first_line(warning)
        raise InputError(f"{folder}: does not fit {model}: {what}") from warning
    except Exception as error:  # PEFT, torch and safetensors raise their own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        why = lines[1] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else lines[0]
        raise InputError(f"{folder}: does not fit {model}: {why.rstrip('.')}") from error
