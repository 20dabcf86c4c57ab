"""Features of torch and transformers on a model with our experts, all of them cold, or some computed by torch: compiled,
exported, traced, copied, saved, and trained against by mistake.
"""

import contextlib
import copy
import gc
import io
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ktconvert.native_quant import Experts, KTConvertConfig, KTMoEWrapper  # noqa: E402
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts  # noqa: E402
from rig import hf  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 30)[None]
SENTENCE = r"no gradient goes through hot experts \(layer \d of .*\): to train, load the model without num_gpu_experts"


@pytest.fixture(scope="module")
def weights(packed_example: Callable[..., Path]) -> Path:
    return packed_example("int8")


def loaded(example: Path, weights: Path, **options: Any) -> Any:
    dtype = options.pop("dtype", torch.bfloat16)
    config = KTConvertConfig(cpu_weights=weights, **{"threads": 2, **options})
    return transformers.AutoModelForCausalLM.from_pretrained(example, quantization_config=config, dtype=dtype)


@pytest.fixture(params=[{}, {"num_gpu_experts": 3}], ids=["cold", "hot"])
def model(request: pytest.FixtureRequest, example: Path, weights: Path) -> Any:
    return loaded(example, weights, **request.param)


def experts_of(model: Any) -> list[Any]:
    return list(hf.experts_of(model).values())


def logits(model: Any, ids: Any = IDS, **more: Any) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def gradients(model: Any, **settings: Any) -> list[torch.Tensor]:
    """Of the embeddings, and of the first layer's router and attention."""
    model.zero_grad()
    if settings:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    layer = model.model.layers[0]
    found = (model.get_input_embeddings().weight, layer.mlp.gate.weight, layer.self_attn.v_proj.weight)
    return [parameter.grad.clone() for parameter in found]


def test_gradients_are_close_to_those_of_transformers(example: Path, weights: Path) -> None:
    """Of hidden states and routing weights, through all layers; the same bits under either kind of checkpoint."""
    original = transformers.AutoModelForCausalLM.from_pretrained(example, dtype=torch.bfloat16)
    model = loaded(example, weights)
    found = gradients(model)
    for ours, theirs in zip(found, gradients(original), strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.1
    for reentrant in (True, False):
        again = gradients(model, use_reentrant=reentrant)
        assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))


def test_hot_experts_have_no_gradient(example: Path, weights: Path) -> None:
    model = loaded(example, weights, num_gpu_experts=3)
    for change in (model.eval, model.gradient_checkpointing_enable):
        change()
        with pytest.raises(RuntimeError, match=SENTENCE) as refused:
            model.train()(IDS, labels=IDS).loss.backward()
        assert "\n" not in str(refused.value) and "torch.no_grad()" in str(refused.value)


def test_tensors_without_gradient_stay_without(model: Any) -> None:
    """Nothing is refused before a gradient would be wrong."""
    want = logits(model)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, want)
    assert torch.equal(model(IDS).logits, want)
    (above,) = torch.autograd.grad(model(IDS).logits.float().sum(), model.lm_head.weight)
    model.requires_grad_(False)
    model.lm_head.requires_grad_()
    model(IDS).logits.float().sum().backward()
    assert torch.equal(model.lm_head.weight.grad, above)
    model.requires_grad_(False)
    assert torch.equal(model(IDS).logits, want)
    with pytest.raises(RuntimeError, match="does not require grad"):  # torch's own sentence
        model(IDS, labels=IDS).loss.backward()


@pytest.mark.long
def test_a_compiled_model_generates(example: Path, weights: Path) -> None:
    """In float32, where fused operations round as single ones do, up to the order of sums."""
    for options in ({}, {"num_gpu_experts": 3}):
        torch._dynamo.reset()
        model = loaded(example, weights, dtype=torch.float32, **options)
        got, want = logits(torch.compile(model, fullgraph=True)), logits(model)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()
    model = loaded(example, weights)
    prompt = {"input_ids": IDS, "max_new_tokens": 4, "do_sample": False}
    want = model.generate(**prompt)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(**prompt), want)


def test_layers_compiled_separately_share_code(model: Any) -> None:
    """Otherwise a model of many layers would reach torch's limit of recompilations."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    want = logits(model)
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    assert torch.equal(logits(model), want)
    assert len(graphs) == 1


def test_compiled_experts_compute(model: Any) -> None:
    """Any number of tokens. The passes that a training step compiles work; backward of hot experts is the sentence."""
    torch._dynamo.reset()
    module = experts_of(model)[1]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for tokens in (7, 1, 4, 0):
        hidden = torch.randn(tokens, module.experts.hidden, generator=torch.Generator().manual_seed(tokens))
        ids, scores = torch.arange(2 * tokens).reshape(tokens, 2) % 8, torch.full((tokens, 2), 0.5)
        want = module(hidden, ids, scores)
        assert torch.equal(compiled(hidden, ids, scores), want)
        got = compiled(hidden.requires_grad_(), ids, scores.requires_grad_())
        assert torch.equal(got, want)
        with contextlib.nullcontext() if module.hot is None else pytest.raises(RuntimeError, match=SENTENCE):
            got.sum().backward()
        if module.hot is None and tokens:
            want_gradient = (hidden.grad.clone(), scores.grad.clone())
            hidden.grad = scores.grad = None
            module(hidden, ids, scores).sum().backward()
            assert torch.equal(hidden.grad, want_gradient[0]) and torch.equal(scores.grad, want_gradient[1])


EXPORTED = """
import sys, torch
from ktconvert.native_quant import KTConvertConfig
from transformers import AutoModelForCausalLM
import ktconvert.native_quant.runtime.hf
model, weights, program = sys.argv[1:]
ids = torch.arange(3, 30)[None]
program = torch.export.load(program).module()
with torch.no_grad():
    try:
        program(ids, use_cache=False)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    config = KTConvertConfig(cpu_weights=weights, threads=2)
    ours = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.bfloat16)
    print(torch.equal(program(ids, use_cache=False).logits, ours(ids).logits))
"""


def test_an_exported_program_runs_in_another_process(example: Path, weights: Path, tmp_path: Path) -> None:
    model = loaded(example, weights)
    with torch.no_grad():
        program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
        assert torch.equal(program.module()(IDS, use_cache=False).logits, logits(model))
    names = [str(node.target) for node in program.graph.nodes if "ktconvert" in str(node.target)]
    assert names == ["ktconvert.routed_experts.default"] * 2
    torch.export.save(program, tmp_path / "program.pt2")
    words = [sys.executable, "-c", EXPORTED, str(example), str(weights), str(tmp_path / "program.pt2")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[1:] == ["True"], done.stderr
    assert re.match(rf"no experts are loaded as 'layer 0 of {weights}.*' in this process", done.stdout)


def test_a_recorded_program_rejects_a_different_directory(weights: Path, tmp_path: Path) -> None:
    """Whatever the directories are called: also by bytes that are no UTF-8."""
    for one, other in (("out #1", "out #2"), ("out #2", "out"), ("out", "out #2"), ("\udcff #2", "\udcff #3")):
        for name in (one, other):
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).symlink_to(weights)
        module = RoutedExperts(0, Experts.load(tmp_path / one, 0))
        arguments = torch.ones(1, module.experts.hidden), torch.tensor([[0, 5]]), torch.ones(1, 2)
        want = module(*arguments)
        with torch.no_grad():
            program = torch.export.export(module, arguments, strict=False).module()
        del module
        gc.collect()
        kept = RoutedExperts(0, Experts.load(tmp_path / other, 0))
        with pytest.raises(RuntimeError, match="no experts are loaded as 'layer 0 of "):
            program(*arguments)
        kept = RoutedExperts(0, Experts.load(tmp_path / one, 0))
        assert torch.equal(program(*arguments), want)
        del kept


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_a_trace_has_no_constants(model: Any) -> None:
    """torch.jit.trace would keep what the experts gave for the example; it is used with other tokens here."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            return self.model(ids, use_cache=False).logits

    with torch.no_grad():
        traced = torch.jit.trace(Logits(), IDS, check_trace=False)
        assert torch.equal(traced(IDS + 7), logits(model, IDS + 7))


def test_a_copy_shares_the_weights(model: Any) -> None:
    want = logits(model)
    copied = copy.deepcopy(model)
    for ours, theirs in zip(experts_of(copied), experts_of(model), strict=True):
        assert ours.experts.packed is theirs.experts.packed and ours.experts is not theirs.experts
        assert ours.hot is theirs.hot
        theirs.experts.close()
    with pytest.raises(ValueError, match="were closed"):
        logits(model)
    del model, theirs
    gc.collect()
    assert torch.equal(logits(copied), want)
    torch._dynamo.reset()
    module = experts_of(copied)[1]
    arguments = torch.ones(1, module.experts.hidden), torch.tensor([[0, 5]]), torch.ones(1, 2)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(*arguments), module(*arguments))


def test_pickling_fails_with_one_sentence(model: Any, weights: Path) -> None:
    saved = io.BytesIO()
    sentence = rf"layer 0 of {re.escape(str(weights))} cannot be pickled .*: .* save the path"
    for save in (pickle.dumps, lambda x: torch.save(x, saved), lambda x: pickle.dumps(experts_of(x)[0].experts)):
        with pytest.raises(TypeError, match=sentence):
            save(model)
    logits(model, output_router_logits=True, output_hidden_states=True)  # transformers adds hooks
    for part in (model, model.model, model.model.layers[0], model.model.layers):
        with pytest.raises(TypeError, match=sentence):
            pickle.dumps(part)
    torch.save(model.state_dict(), saved := io.BytesIO())  # all but the experts
    saved.seek(0)
    assert model.load_state_dict(torch.load(saved)).missing_keys == []


def test_pools_are_neither_copied_nor_pickled(weights: Path) -> None:
    wrapper = KTMoEWrapper(0, 8, 2, 256, 256, None, 1, 1, str(weights), 64, method="AMXINT8")
    wrapper.load_weights()
    copied = copy.deepcopy(wrapper)
    arguments = torch.ones(1, 256), torch.tensor([[0, 5]]), torch.ones(1, 2)
    want = wrapper.forward(*arguments)
    wrapper.gpu_experts_mask[0] = True  # is the wrapper's own
    assert torch.equal(copied.forward(*arguments), want) and not torch.equal(wrapper.forward(*arguments), want)
    with pytest.raises(TypeError, match="threads belong to this process; create one in the other process"):
        pickle.dumps(wrapper)


def test_save_pretrained_and_dequantize_name_the_remedy(model: Any, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="load the original model without KTConvertConfig"):
        model.dequantize()
    with pytest.raises(ValueError, match="not serializable: its experts are in") as refused:
        model.save_pretrained(tmp_path / "again")
    assert str(weights) in str(refused.value) and "`ktconvert cpu --non-experts keep`" in str(refused.value)
    assert "\n" not in str(refused.value) and not list((tmp_path / "again").glob("*.safetensors"))


def test_ids_outside(weights: Path) -> None:
    experts = Experts.load(weights, 1)
    hidden = np.random.default_rng(0).integers(0, 1 << 14, (4, experts.hidden)).astype(np.uint16)
    good, scores = np.array([[0, 1], [2, 7], [3, 4], [5, 6]]), np.full((4, 2), 0.5, np.float32)
    want = experts.forward(hidden, good, scores)
    assert np.array_equal(experts.forward(hidden, good, scores, strict_ids=True), want)
    for outside in (-1, 8, np.iinfo(np.int64).max, np.iinfo(np.int64).min):
        ids = good.copy()
        ids[2, 1] = outside
        silent = experts.forward(hidden, ids, scores)
        alone = scores.copy()
        alone[2, 1] = 0
        assert np.array_equal(silent, experts.forward(hidden, good, alone))
        words = rf"ids\[2, 1\] is {outside}, and layer 1 has experts 0 to 7"
        with pytest.raises(ValueError, match=words):
            experts.forward(hidden, ids, scores, strict_ids=True)
        with pytest.raises(ValueError, match=words):
            experts.submit(hidden, ids, scores, out=np.empty_like(hidden), strict_ids=True)
    assert not experts.forward(hidden, np.full((4, 2), -1), scores).any()
