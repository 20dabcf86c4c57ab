"""Every mixture-of-experts family of the installed transformers, as docs/reference/architectures.md describes it.

A family is converted and computes the logits of the original, or it is refused with the expected sentence.

`python tests/test_families.py [MODEL_TYPE ...]` prints the table of that page.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ktconvert.layouts.checkpoints.archs import ARCHS
from rig import conversion
from rig.families import VOCABULARY
from rig.family_rows import PLAIN, ROWS, TINY, VISION, Row, Settings

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/architectures.md"
# The largest measured error of all families is 0.036. Weights of a different expert give about 1.
ERROR = 0.05
DECISIVE = 0.4  # without experts, logits change by at least 0.48
QUICK = ("granitemoe", "qwen3_omni_moe_thinker")  # the others take minutes
TOKENS = 24
BLOCK = re.compile(r"^class \w*(?:Experts|MoE|MOE|MoeBlock)\w*\(", re.M)
HEAD = "| `model_type` | family | transformers | converts | computes | error |\n|---|---|---|---|---|---|"


class Outcome(NamedTuple):
    """Result of a family: the fields of Row, with complete messages, and errors of the logits (median over tokens).

    error     relative error of the converted model
    without   relative error of the original without experts; if it is large, the experts decide the logits
    """

    build_error: str = ""
    refusal: str = ""
    load_error: str = ""
    error: float = 0.0
    without: float = 0.0


def moe_model_types() -> Iterator[str]:
    """Yield the model_types of the installed transformers that have a causal model with experts."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    root = Path(transformers.__file__).parent / "models"
    generative = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    for model_type in sorted(CONFIG_MAPPING_NAMES.keys() & generative.keys()):
        module = model_type_to_module_name(model_type)
        code = root / module / f"modeling_{module}.py"
        if code.is_file() and BLOCK.search(code.read_text(encoding="utf-8")):
            yield model_type


def try_family(model_type: str, row: Row, folder: Path) -> Outcome:
    """Make, convert and compute one family in a folder."""
    import torch

    from ktconvert.layouts.errors import KtconvertError
    from ktconvert.native_quant import KTConvertConfig

    kind = _auto_class(model_type)
    try:
        _save_model(kind, config_of(model_type, row), folder / "model")
        original = kind.from_pretrained(folder / "model", dtype=torch.float32)
        expected_logits = _logits(original)
    except Exception as error:  # any error that this transformers raises for a model of its own
        return Outcome(build_error=str(error) or repr(error))
    paths = ("-i", folder / "model", "-o", folder / "int8")
    done = conversion.ktconvert("cpu", *paths, "--quant-method", "int8", "--threadpool-count", "1")
    if done.returncode:
        return Outcome(refusal=f"{done.stderr.strip().splitlines()[-1]} (exit code {done.returncode})")
    try:
        config = KTConvertConfig(cpu_weights=folder / "int8", threads=1)
        ours = kind.from_pretrained(folder / "model", dtype=torch.float32, quantization_config=config)
    except KtconvertError as error:
        return Outcome(load_error=str(error))
    error = _distance(_logits(ours), expected_logits)
    _zero_experts(original, ours)
    return Outcome(error=error, without=_distance(_logits(original), expected_logits))


def config_of(model_type: str, row: Row) -> Any:
    """Return a config of the family whose parts are all tiny."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return kind(**_tiny(kind, TINY, row.settings, row.vision))


def _tiny(kind: Any, sizes: Settings, settings: Settings, vision: Settings) -> Settings:
    default = kind()
    fields = default.to_dict().keys() | getattr(kind, "attribute_map", {}).keys()
    config = {name: value for name, value in sizes.items() if name in fields}
    parts = {name: part for name in kind.sub_configs if (part := getattr(default, name, None)) is not None}
    for name, part in parts.items():
        sizes_and_settings = (TINY, settings) if "text" in name else (VISION, vision)
        config[name] = {"model_type": part.model_type, **_tiny(type(part), *sizes_and_settings, vision)}
    return config if any("text" in name for name in parts) else {**config, **settings}


def _auto_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    return transformers.AutoModelForCausalLM if model_type in CAUSAL else transformers.AutoModelForImageTextToText


def _save_model(kind: Any, config: Any, folder: Path) -> None:
    """Save a model with random weights whose experts decide the logits."""
    import torch

    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.bfloat16)
    modules = model.named_modules()
    scales = {f"{name}.weight": float(m.embed_scale) for name, m in modules if hasattr(m, "embed_scale")}
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            gain = 2 if "experts." in name and "shared" not in name else 1
            inputs = min(weight.shape[-2:]) if weight.ndim == 3 else weight[0].numel()
            torch.nn.init.normal_(weight, std=1 / scales.get(name, 1.0) if "embed" in name else gain * inputs**-0.5)
    model.save_pretrained(folder)


def _logits(model: Any) -> Any:
    import torch

    tokens = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # DiffusionGemma draws its canvas
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits.float()[0]


def _zero_experts(original: Any, ours: Any) -> None:
    """Set the weights of all experts of the original that ours replaces to zero."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    for name, module in ours.named_modules():
        if isinstance(module, RoutedExperts):
            block, _, child = name.rpartition(".")
            parent = original.get_submodule(block)
            for weight in getattr(parent, child, parent).parameters():
                if weight.ndim == 3 or hasattr(parent, child):  # JetMoE's block is its experts and a router
                    weight.data.zero_()


def _distance(actual: Any, expected: Any) -> float:
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def table_line(model_type: str, row: Row, error: str) -> str:
    """Return a family's line of the table."""
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
    return f"| `{model_type}` | {family} | {row.since} | {converts} | {computes} | {error} |"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def row_for_version(row: Row, installed: tuple[int, ...]) -> Row:
    """Return the row that holds for a version of transformers."""
    if row.loads_since and installed >= version(row.loads_since):
        return PLAIN
    return row


def check_computed(outcome: Outcome) -> None:
    assert outcome.error < ERROR, outcome
    assert outcome.without > DECISIVE, f"the experts do not decide: {outcome}"


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in ROWS])
def test_families_convert_and_compute_as_documented(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    installed = version(transformers.__version__)
    row = ROWS[model_type]
    if installed < version(row.since):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    expected, outcome = row_for_version(row, installed), try_family(model_type, row, tmp_path)
    for message, words in (
        (outcome.build_error, expected.build_error),
        (outcome.refusal, expected.refusal),
        (outcome.load_error, expected.load_error),
    ):
        assert words in message and bool(words) == bool(message), outcome
    if not (expected.build_error or expected.refusal or expected.load_error):
        check_computed(outcome)


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
    installed = version(transformers.__version__)
    assert {name for name, row in ROWS.items() if version(row.since) <= installed} <= {*moe_model_types()}


def test_documented_families_equal_the_rows() -> None:
    """The measured figures must only be within the bound."""
    page = PAGE.read_text(encoding="utf-8")
    assert HEAD in page, f"{PAGE} has no table of families: paste what `python tests/test_families.py` prints"
    rows = page.split(f"{HEAD}\n")[1].split("\n\n")[0].splitlines()
    figures = [row.removesuffix(" |").rpartition("| ")[2].strip() for row in rows]
    assert rows == [table_line(*item, figure) for item, figure in zip(ROWS.items(), figures, strict=True)]
    for row, figure in zip(ROWS.values(), figures, strict=True):
        loads = not (row.build_error or row.refusal) and (not row.load_error or bool(row.loads_since))
        assert (0 < float(figure) < ERROR) if loads else not figure


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
        print(table_line(model_type, row, f"{outcome.error:.3f}" if outcome.error else ""), flush=True)
        print(f"  {outcome}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
