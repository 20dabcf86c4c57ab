"""Every mixture-of-experts family of the installed transformers, as docs/reference/architectures.md describes it.

A family is converted and computes the logits of the original, or it is refused with the expected sentence.

`python tests/test_families.py [MODEL_TYPE ...]` prints the table of that page.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.archs import ARCHS
from rig import conversion, decided
from rig.families import VOCABULARY
from rig.family_models import auto_class, compute_chosen_experts, config_of, save_model, zero_experts
from rig.family_rows import PLAIN, ROWS, Row
from rig.safetensors import write_file

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/architectures.md"
# Method of `cpu` -> bound of the logits' error. Weights of a different expert give about 1. The largest measured errors
# of all families are 0.036, 0.40 and 0.0063; that of MXFP4 is where the router of a later layer chooses other experts.
BOUNDS = {"int8": 0.05, "mxfp4": 0.5, "bf16": 0.01}
DECISIVE = 0.4  # without experts, logits change by at least 0.48
SHARE = 0.4  # bound of an error as a share of that change; measured: 0.026, 0.30 and 0.0046
QUICK = ("granitemoe", "nllb-moe", "qwen3_omni_moe_thinker", "switch_transformers")  # the others take minutes
TOKENS = 24
BLOCK = re.compile(r"^class \w*(?:Experts|MoE|MOE|MoeBlock)\w*\(", re.M)
HEAD = "| `model_type` | family | transformers | converts | computes | " + " | ".join(BOUNDS) + " |\n"
HEAD += f"|{'---|' * (5 + len(BOUNDS))}"


class Outcome(NamedTuple):
    """Result of a family: the fields of Row, with complete messages, and errors of the logits (median over tokens).

    errors    relative error of the converted model by method
    without   relative error of the original without experts; if it is large, the experts decide the logits
    """

    build_error: str = ""
    refusal: str = ""
    load_error: str = ""
    errors: Mapping[str, float] = MappingProxyType({})
    without: float = 0.0


def moe_model_types() -> Iterator[str]:
    """Yield the model_types of the installed transformers that have a model with experts and write text."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    root = Path(transformers.__file__).parent / "models"
    generative = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        | modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
    for model_type in sorted(CONFIG_MAPPING_NAMES.keys() & generative.keys()):
        module = model_type_to_module_name(model_type)
        code = root / module / f"modeling_{module}.py"
        if code.is_file() and BLOCK.search(code.read_text(encoding="utf-8")):
            yield model_type


def try_family(model_type: str, row: Row, folder: Path) -> Outcome:
    """Make, convert and compute one family in a folder."""
    import torch

    from ktconvert.layouts.errors import KTConvertError
    from ktconvert.native_quant import KTConvertConfig

    kind = auto_class(model_type)
    try:
        save_model(kind, config_of(model_type, row), folder / "model")
        original = kind.from_pretrained(folder / "model", dtype=torch.float32)
        compute_chosen_experts(original)
        expected_logits = _logits(original)
    except Exception as error:  # any error that this transformers raises for a model of its own
        return Outcome(build_error=str(error) or repr(error))
    errors = {}
    for method in BOUNDS:
        paths = ("-i", folder / "model", "-o", folder / method)
        done = conversion.ktconvert("cpu", *paths, "--quant-method", method, "--threadpool-count", "1")
        if done.returncode:
            return Outcome(
                refusal=f"{done.stderr.strip().splitlines()[-1]} (exit code {done.returncode})", errors=errors
            )
        try:
            config = KTConvertConfig(cpu_weights=folder / method, threads=1)
            ours = kind.from_pretrained(folder / "model", dtype=torch.float32, quantization_config=config)
        except KTConvertError as error:
            return Outcome(load_error=str(error), errors=errors)
        errors[method] = _distance(_logits(ours), expected_logits)
    zero_experts(original, ours)
    return Outcome(errors=errors, without=_distance(_logits(original), expected_logits))


def _logits(model: Any) -> Any:
    import torch

    tokens = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # DiffusionGemma draws its canvas
    with torch.no_grad():
        decoded = {"decoder_input_ids": tokens.flip(1)} if model.config.is_encoder_decoder else {}
        return model.eval()(tokens, use_cache=False, **decoded).logits.float()[0]


def test_both_stacks_of_experts_for_text_and_images_are_computed(tmp_path: Path) -> None:
    import torch
    from safetensors.numpy import load_file

    from ktconvert.native_quant import KTConvertConfig

    model_type = "ernie4_5_vl_moe"
    kind = auto_class(model_type)
    save_model(kind, config_of(model_type, ROWS[model_type]), tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator)
    inputs = {"moe_mm_token_type_ids": torch.randint(0, 2, (1, TOKENS), generator=generator, dtype=torch.int32)}

    def logits(**options: Any) -> Any:
        model = kind.from_pretrained(tmp_path / "model", dtype=torch.float32, **options).eval()
        with torch.no_grad():
            return model(tokens, use_cache=False, **inputs).logits[0]

    expected = logits()
    stored: dict[str, dict[str, bytes]] = {}
    for experts in ("all", "text"):
        paths = ("-i", tmp_path / "model", "-o", tmp_path / experts, "--experts", experts)
        done = conversion.ktconvert("cpu", *paths, "--quant-method", "int8", "--threadpool-count", "1")
        assert done.returncode == 0, done.stderr
        files = (tmp_path / experts).glob("*.safetensors")
        stored[experts] = {name: value.tobytes() for file in files for name, value in load_file(file).items()}
        config = KTConvertConfig(cpu_weights=tmp_path / experts, threads=1)
        actual = logits(quantization_config=config)
        assert _distance(actual, expected) < BOUNDS["int8"]
        # Without `--experts text`, the runtime computes the experts for images, too, and rounds their tokens.
        assert (actual != expected).any(dim=-1).all() == (experts == "all")
    assert stored["text"].items() < stored["all"].items() and len(stored["all"]) == 2 * len(stored["text"])
    done = conversion.ktconvert("cpu", tmp_path / "model", tmp_path / "none", "--experts", "audio")
    conversion.check_refusal(done, 2, "--experts audio", "choose all, text, images")


def _distance(actual: Any, expected: Any) -> float:
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def table_line(model_type: str, row: Row, figures: Sequence[str]) -> str:
    """Return a family's line of the table; figures: its errors by method, or empty texts."""
    family = next((arch.name for arch in ARCHS if model_type in arch.matches), "")
    if row.build_error:
        converts, computes = f"not tried, transformers makes none: {row.build_error}", ""
    elif row.refusal:
        converts, computes = f'**refused**: "... {row.refusal} ..."', ""
    else:
        family = family or "by its tensors"
        converts = "yes"
        computes = f'**refused**: "... {row.load_error} ..."' if row.load_error else "yes"
        if row.loads_since:
            computes = f"yes; with transformers before {row.loads_since} {computes}"
    return f"| `{model_type}` | {family} | {row.since} | {converts} | {computes} | {' | '.join(figures)} |"


def check_computed(outcome: Outcome) -> None:
    assert outcome.errors.keys() == BOUNDS.keys(), outcome
    for method, bound in BOUNDS.items():
        assert outcome.errors[method] < min(bound, SHARE * outcome.without), (method, outcome)
    assert outcome.without > DECISIVE, f"the experts do not decide: {outcome}"


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in ROWS])
def test_families_convert_and_compute_as_documented(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = ROWS[model_type].holds_for(transformers.__version__)
    if expected is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    outcome = try_family(model_type, expected, tmp_path)
    for message, words in (
        (outcome.build_error, expected.build_error),
        (outcome.refusal, expected.refusal),
        (outcome.load_error, expected.load_error),
    ):
        assert words in message and bool(words) == bool(message), outcome
    if not (expected.build_error or expected.refusal or expected.load_error):
        check_computed(outcome)


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in ROWS])
def test_run_generates_the_text_of_transformers(model_type: str, tmp_path: Path) -> None:
    """64 greedy tokens in BF16, with the tensors under the names that transformers' save_pretrained publishes."""
    transformers = pytest.importorskip("transformers")
    row = ROWS[model_type].holds_for(transformers.__version__)
    if row is None or row.build_error or row.refusal or row.load_error:
        pytest.skip(f"{model_type} is not computed")
    if row.no_text:
        pytest.skip(f"transformers generates no text with {model_type}: {row.no_text}")
    check_text(model_type, row, tmp_path)


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=() if n == "phimoe" else pytest.mark.long) for n in ROWS])
def test_transformers_loads_outputs_for_the_gpu(model_type: str, tmp_path: Path) -> None:
    """It finds the Linears that are not quantized, also under its own names: Phi-3.5-MoE's router is one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    row = ROWS[model_type].holds_for(transformers.__version__)
    if row is None or row.build_error or row.refusal:
        pytest.skip(f"{model_type} is not converted")
    kind, model, output = auto_class(model_type), tmp_path / "model", tmp_path / "w4"
    save_model(kind, config_of(model_type, row), model)
    done = conversion.ktconvert("gpu", model, output, "--quant-method", "RTN", "--group-size", "32")
    if done.returncode:
        assert done.returncode == 3 and "has several stacks of experts" in done.stderr, done.stderr
        return
    verified = conversion.ktconvert("verify", output, "--against", model)
    assert verified.returncode == 0, verified.stderr
    if "note: not loaded: transformers reads no single experts of" not in verified.stderr:
        assert re.search(r"^reload +ok", verified.stdout, re.M), verified.stderr


def check_text(model_type: str, row: Row, folder: Path) -> None:
    import torch

    from ktconvert.native_quant import KTConvertConfig

    kind, model = auto_class(model_type), folder / "model"
    save_model(kind, config_of(model_type, row), model)
    original = kind.from_pretrained(model, dtype=torch.bfloat16).eval()
    tokenizer = decided.add_tokenizer(model)
    prompt, text = decided.decide_text(original, tokenizer)
    original.save_pretrained(model)
    paths = ("-i", model, "-o", folder / "bf16")
    done = conversion.ktconvert("cpu", *paths, "--quant-method", "bf16", "--threadpool-count", "1")
    assert done.returncode == 0, done.stderr
    experts = ("--cpu-weights", folder / "bf16", "--threads", 1)
    ran = conversion.run_in_process("run", model, *experts, "--prompt", prompt, "--max-new-tokens", decided.TOKENS)
    assert (ran.exit_code, "transformers computes" in ran.stderr) == (0, False), (ran.exception, ran.stderr)
    assert ran.stdout == f"{prompt}{text}\n"
    config = KTConvertConfig(cpu_weights=folder / "bf16", threads=1)
    zero_experts(original, kind.from_pretrained(model, quantization_config=config))
    assert decided.generate_text(original, tokenizer, prompt) != text


def test_commands_that_write_text_refuse_encoders(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config_of("switch_transformers", ROWS["switch_transformers"]).save_pretrained(tmp_path)
    write_file(tmp_path / "model.safetensors", {"experts.weight": ("BF16", np.zeros((4, 4), np.uint16))})
    ran = conversion.run_in_process("run", tmp_path, "--prompt", "a")
    assert "has an encoder, and this command takes only decoders" in str(ran.exception)


@pytest.mark.long
def test_families_without_a_row_are_computed_or_refused(tmp_path: Path) -> None:
    """A newer transformers has such families; each raises our exception or has the original's logits."""
    pytest.importorskip("transformers")
    unlisted = [name for name in moe_model_types() if name not in ROWS]
    for name in unlisted:
        outcome = try_family(name, PLAIN, tmp_path / name)
        print(f"{name}: {outcome}")
        if not (outcome.build_error or outcome.refusal or outcome.load_error):
            check_computed(outcome)


def test_transformers_has_every_family_of_the_rows() -> None:
    transformers = pytest.importorskip("transformers")
    present = {name for name, row in ROWS.items() if row.holds_for(transformers.__version__)}
    assert present <= {*moe_model_types()}


def test_documented_families_equal_the_rows() -> None:
    """The measured figures must only be within the bound."""
    page = PAGE.read_text(encoding="utf-8")
    assert HEAD in page, f"{PAGE} has no table of families: paste what `python tests/test_families.py` prints"
    rows = page.split(f"{HEAD}\n")[1].split("\n\n")[0].splitlines()
    figures = [[cell.strip() for cell in row.split("|")[-1 - len(BOUNDS) : -1]] for row in rows]
    assert rows == [table_line(*item, cells) for item, cells in zip(ROWS.items(), figures, strict=True)]
    for row, cells in zip(ROWS.values(), figures, strict=True):
        loads = not (row.build_error or row.refusal) and (not row.load_error or bool(row.loads_since))
        for figure, bound in zip(cells, BOUNDS.values(), strict=True):
            assert (0 < float(figure) < bound) if loads else not figure


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(HEAD)
    for model_type in sys.argv[1:] or moe_model_types():
        row = ROWS.get(model_type, Row())
        with tempfile.TemporaryDirectory() as folder:
            outcome = try_family(model_type, row, Path(folder))
        figures = [f"{error:.2g}" for error in outcome.errors.values()] or [""] * len(BOUNDS)
        print(table_line(model_type, row, figures), flush=True)
        print(f"  {outcome}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
