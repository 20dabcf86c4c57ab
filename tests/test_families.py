"""Every mixture-of-experts family of the installed transformers, as docs/reference/architectures.md says: converted and
computed with the logits of the original, or refused with the sentence that is expected.

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
# Measured, the largest of all families: 0.036. Another expert's weights give about 1.
ERROR = 0.05
DECISIVE = 0.4  # the smallest that experts move the logits: 0.48
QUICK = ("granitemoe", "qwen3_omni_moe_thinker")  # the others take minutes
TOKENS = 24
BLOCK = re.compile(r"^class \w*(?:Experts|MoE|MOE|MoeBlock)\w*\(", re.M)
HEAD = "| `model_type` | family | transformers | converts | computes | error |\n|---|---|---|---|---|---|"


class Outcome(NamedTuple):
    """What became of a family: as in Row, whole sentences; the relative error of the logits (median over tokens), and how
    far they move when the experts give nothing: where that is large, they decide.
    """

    unbuilt: str = ""
    refused: str = ""
    warned: bool = False
    computes: str = ""
    error: float = 0.0
    without: float = 0.0


def families() -> Iterator[str]:
    """The model_types of the installed transformers that make a causal model and have a block of experts."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    root = Path(transformers.__file__).parent / "models"
    made = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for model_type in sorted(CONFIG_MAPPING_NAMES.keys() & made.keys()):
        module = model_type_to_module_name(model_type)
        code = root / module / f"modeling_{module}.py"
        if code.is_file() and BLOCK.search(code.read_text(encoding="utf-8")):
            yield model_type


def outcome(model_type: str, row: Row, folder: Path) -> Outcome:
    """Make, convert and compute one family in this folder."""
    import torch

    from ktconvert.layouts.errors import KtconvertError
    from ktconvert.native_quant import KTConvertConfig

    kind = _auto(model_type)
    try:
        _make(kind, config_of(model_type, row), folder / "model")
        original = kind.from_pretrained(folder / "model", dtype=torch.float32)
        want = _logits(original)
    except Exception as error:  # whatever this transformers says of a model of its own
        return Outcome(unbuilt=str(error) or repr(error))
    where = ("-i", folder / "model", "-o", folder / "int8")
    done = conversion.ktconvert("cpu", *where, "--quant-method", "int8", "--threadpool-count", "1")
    if done.returncode:
        return Outcome(refused=f"{done.stderr.strip().splitlines()[-1]} (exit code {done.returncode})")
    warned = "would compute something else" in done.stdout + done.stderr
    try:
        config = KTConvertConfig(cpu_weights=folder / "int8", threads=1)
        ours = kind.from_pretrained(folder / "model", dtype=torch.float32, quantization_config=config)
    except KtconvertError as error:
        return Outcome(warned=warned, computes=str(error))
    error = _distance(_logits(ours), want)
    _silence(original, ours)
    return Outcome(warned=warned, error=error, without=_distance(_logits(original), want))


def config_of(model_type: str, row: Row) -> Any:
    """The family's config, each part of it tiny."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return kind(**_tiny(kind, TINY, row.settings, row.vision))


def _tiny(kind: Any, sizes: Settings, settings: Settings, vision: Settings) -> Settings:
    usual = kind()
    known = usual.to_dict().keys() | getattr(kind, "attribute_map", {}).keys()
    out = {name: value for name, value in sizes.items() if name in known}
    parts = {name: part for name in kind.sub_configs if (part := getattr(usual, name, None)) is not None}
    for name, part in parts.items():
        own = (TINY, settings) if "text" in name else (VISION, vision)
        out[name] = {"model_type": part.model_type, **_tiny(type(part), *own, vision)}
    return out if any("text" in name for name in parts) else {**out, **settings}


def _auto(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    return transformers.AutoModelForCausalLM if model_type in CAUSAL else transformers.AutoModelForImageTextToText


def _make(kind: Any, config: Any, folder: Path) -> None:
    """Save a model whose experts decide what it says, as users of transformers save theirs."""
    import torch

    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            loud = 2 if "experts." in name and "shared" not in name else 1
            inputs = min(weight.shape[-2:]) if weight.ndim == 3 else weight[0].numel()
            torch.nn.init.normal_(weight, std=1 if "embed" in name else loud * inputs**-0.5)
    model.save_pretrained(folder)


def _logits(model: Any) -> Any:
    import torch

    tokens = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits.float()[0]


def _silence(original: Any, ours: Any) -> None:
    """Let the experts that were replaced in ours give nothing in the original."""
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    for name, module in ours.named_modules():
        if isinstance(module, RoutedExperts):
            for weight in original.get_submodule(name).parameters():
                weight.data.zero_()


def _distance(got: Any, want: Any) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


def line(model_type: str, row: Row, error: str) -> str:
    """A family's line of the table."""
    family = next((arch.name for arch in ARCHS if model_type in arch.matches), "")
    if row.build_error:
        converts, computes = f"not tried, transformers makes none: {row.build_error}", ""
    elif row.refusal:
        converts, computes = f'**refused**: "... {row.refusal} ..."', ""
    else:
        family = family or "by its tensors"
        converts = "with a warning" if row.warned else "yes"
        computes = f'**refused**: "... {row.load_error} ..."' if row.load_error else "yes"
        if row.loads_since:
            computes = f"yes; with transformers before {row.loads_since} {computes}"
    return f"| `{model_type}` | {family} | {row.since} | {converts} | {computes} | {error} |"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def expected(row: Row, installed: tuple[int, ...]) -> Row:
    """What the row says of this version of transformers."""
    if row.loads_since and installed >= version(row.loads_since):
        return Row(warned=row.warned)
    return row


def check_computed(seen: Outcome) -> None:
    assert seen.error < ERROR, seen
    assert seen.without > DECISIVE, f"the experts do not decide: {seen}"


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in ROWS])
def test_a_family_is_as_its_row_says(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    installed = version(transformers.__version__)
    row = ROWS[model_type]
    if installed < version(row.since):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    want, seen = expected(row, installed), outcome(model_type, row, tmp_path)
    for said, words in (
        (seen.build_error, want.build_error),
        (seen.refusal, want.refusal),
        (seen.load_error, want.load_error),
    ):
        assert words in said and bool(words) == bool(said), seen
    assert seen.warned == want.warned, seen
    if not (want.build_error or want.refusal or want.load_error):
        check_computed(seen)


@pytest.mark.long
def test_a_family_without_a_row_is_computed_or_refused(tmp_path: Path) -> None:
    """Those of a transformers that is newer than the table; each is an exception of ours or has the original's logits."""
    pytest.importorskip("transformers")
    unlisted = [name for name in families() if name not in ROWS]
    for name in unlisted:
        seen = outcome(name, PLAIN, tmp_path / name)
        print(f"{name}: {seen}")
        if not (seen.build_error or seen.refusal or seen.load_error):
            check_computed(seen)


def test_the_rows_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    installed = version(transformers.__version__)
    assert {name for name, row in ROWS.items() if version(row.since) <= installed} <= {*families()}


def test_the_table_of_families_is_that_of_the_rows() -> None:
    """All but the measured figures, which must be within the bound."""
    page = PAGE.read_text(encoding="utf-8")
    assert HEAD in page, f"{PAGE} has no table of families: paste what `python tests/test_families.py` prints"
    rows = page.split(f"{HEAD}\n")[1].split("\n\n")[0].splitlines()
    figures = [row.removesuffix(" |").rpartition("| ")[2].strip() for row in rows]
    assert rows == [line(*item, figure) for item, figure in zip(ROWS.items(), figures, strict=True)]
    for row, figure in zip(ROWS.values(), figures, strict=True):
        loads = not (row.build_error or row.refusal) and (not row.load_error or bool(row.loads_since))
        assert (0 < float(figure) < ERROR) if loads else not figure


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(HEAD)
    for model_type in sys.argv[1:] or families():
        row = ROWS.get(model_type, Row())
        with tempfile.TemporaryDirectory() as folder:
            seen = outcome(model_type, row, Path(folder))
        print(line(model_type, row, f"{seen.error:.3f}" if seen.error else ""), flush=True)
        print(f"  {seen}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
