"""Features of torch and transformers on a model with our experts, all on the CPU or some computed by torch.

The model is compiled, exported, traced, copied, saved, and trained by mistake.
"""

import contextlib
import copy
import gc
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ktconvert.native_quant import KTConvertConfig, KTExperts, KTMoEWrapper  # noqa: E402
from ktconvert.native_quant.runtime.hf_modules import RoutedExperts  # noqa: E402
from rig import conversion, hf  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 30)[None]
NO_GRADIENT = r"hot experts have no gradients \(layer \d of .*\): to train, load the model without hot experts"


@pytest.fixture(scope="module")
def weights(packed_example: Callable[..., Path]) -> Path:
    """Convert the bundled model to INT8."""
    return packed_example("int8")


def load_model(example: Path, weights: Path, **options: Any) -> Any:
    """Load the bundled model with converted experts."""
    dtype = options.pop("dtype", torch.bfloat16)
    config = KTConvertConfig(cpu_weights=weights, **{"threads": 2, **options})
    return transformers.AutoModelForCausalLM.from_pretrained(example, quantization_config=config, dtype=dtype)


@pytest.fixture(params=[{}, {"num_gpu_experts": 3}], ids=["cold", "hot"])
def model(request: pytest.FixtureRequest, example: Path, weights: Path) -> Any:
    """Load the model with all experts on the CPU, and with three hot experts per layer."""
    return load_model(example, weights, **request.param)


def experts_of(model: Any) -> list[Any]:
    """Return the modules of routed experts, by layer."""
    return list(hf.experts_of(model).values())


def logits(model: Any, ids: Any = IDS, **more: Any) -> Any:
    """Return logits without gradients."""
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def gradients(model: Any, **settings: Any) -> list[torch.Tensor]:
    """Return the gradients of the embeddings, and of the router and the attention of the first layer."""
    model.zero_grad()
    if settings:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    layer = model.model.layers[0]
    parameters = (model.get_input_embeddings().weight, layer.mlp.gate.weight, layer.self_attn.v_proj.weight)
    return [parameter.grad.clone() for parameter in parameters]


def test_gradients_are_close_to_those_of_transformers(example: Path, weights: Path) -> None:
    """Gradients of hidden states and routing weights pass through all layers, and keep their bits under both kinds of
    checkpointing.
    """
    original = transformers.AutoModelForCausalLM.from_pretrained(example, dtype=torch.bfloat16)
    model = load_model(example, weights)
    direct = gradients(model)
    for ours, theirs in zip(direct, gradients(original), strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.1
    for reentrant in (True, False):
        checkpointed = gradients(model, use_reentrant=reentrant)
        assert all(torch.equal(one, two) for one, two in zip(direct, checkpointed, strict=True))


def test_hot_experts_have_no_gradient(example: Path, weights: Path) -> None:
    model = load_model(example, weights, num_gpu_experts=3)
    for change in (model.eval, model.gradient_checkpointing_enable):
        change()
        with pytest.raises(RuntimeError, match=NO_GRADIENT) as caught:
            model.train()(IDS, labels=IDS).loss.backward()
        assert "\n" not in str(caught.value) and "torch.no_grad()" in str(caught.value)


def test_results_without_gradients_are_unchanged(model: Any) -> None:
    """A call raises no error unless a gradient would be wrong."""
    expected = logits(model)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)
    assert torch.equal(model(IDS).logits, expected)
    (above,) = torch.autograd.grad(model(IDS).logits.float().sum(), model.lm_head.weight)
    model.requires_grad_(False)
    model.lm_head.requires_grad_()
    model(IDS).logits.float().sum().backward()
    assert torch.equal(model.lm_head.weight.grad, above)
    model.requires_grad_(False)
    assert torch.equal(model(IDS).logits, expected)
    with pytest.raises(RuntimeError, match="does not require grad"):  # torch's own message
        model(IDS, labels=IDS).loss.backward()


@pytest.mark.long
def test_a_compiled_model_generates(example: Path, weights: Path) -> None:
    """Logits are compared in float32, where fused operations round like single ones, except for the order of sums."""
    for options in ({}, {"num_gpu_experts": 3}):
        torch._dynamo.reset()
        model = load_model(example, weights, dtype=torch.float32, **options)
        actual, expected = logits(torch.compile(model, fullgraph=True)), logits(model)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()
    model = load_model(example, weights)
    prompt = {"input_ids": IDS, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**prompt)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(**prompt), expected)


def test_layers_compiled_separately_share_code(model: Any) -> None:
    """Otherwise a model of many layers would reach torch's limit of recompilations."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = logits(model)
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    assert torch.equal(logits(model), expected)
    assert len(graphs) == 1


def test_compiled_experts_compute(model: Any) -> None:
    """Any number of tokens and the passes of a training step work; the backward of hot experts fails with a message."""
    torch._dynamo.reset()
    module = experts_of(model)[1]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for tokens in (7, 1, 4, 0):
        hidden = torch.randn(tokens, module.experts.hidden, generator=torch.Generator().manual_seed(tokens))
        ids, scores = torch.arange(2 * tokens).reshape(tokens, 2) % 8, torch.full((tokens, 2), 0.5)
        expected = module(hidden, ids, scores)
        assert torch.equal(compiled(hidden, ids, scores), expected)
        actual = compiled(hidden.requires_grad_(), ids, scores.requires_grad_())
        assert torch.equal(actual, expected)
        with contextlib.nullcontext() if module.hot is None else pytest.raises(RuntimeError, match=NO_GRADIENT):
            actual.sum().backward()
        if module.hot is None and tokens:
            want_gradient = (hidden.grad.clone(), scores.grad.clone())
            hidden.grad = scores.grad = None
            module(hidden, ids, scores).sum().backward()
            assert torch.equal(hidden.grad, want_gradient[0]) and torch.equal(scores.grad, want_gradient[1])


def test_an_exported_program_runs_in_another_process(example: Path, weights: Path, tmp_path: Path) -> None:
    model = load_model(example, weights)
    with torch.no_grad():
        program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
        assert torch.equal(program.module()(IDS, use_cache=False).logits, logits(model))
    names = [str(node.target) for node in program.graph.nodes if "ktconvert" in str(node.target)]
    assert names == ["ktconvert.routed_experts.default"] * 2
    torch.export.save(program, tmp_path / "program.pt2")
    done = conversion.fork("rig.hf:run_exported", example, weights, tmp_path / "program.pt2", models=True)
    assert done.stdout.splitlines()[1:] == ["True"], done.stderr
    assert re.match(rf"no experts are loaded as 'layer 0 of {weights}.*' in this process", done.stdout)


def test_a_recorded_program_rejects_a_different_directory(weights: Path, tmp_path: Path) -> None:
    """Names of directories may contain any bytes, also invalid UTF-8."""
    for one, other in (("out #1", "out #2"), ("out #2", "out"), ("out", "out #2"), ("\udcff #2", "\udcff #3")):
        for name in (one, other):
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).symlink_to(weights)
        module = RoutedExperts(0, KTExperts.load(tmp_path / one, 0))
        arguments = torch.ones(1, module.experts.hidden), torch.tensor([[0, 5]]), torch.ones(1, 2)
        expected = module(*arguments)
        with torch.no_grad():
            program = torch.export.export(module, arguments, strict=False).module()
        del module
        gc.collect()
        kept = RoutedExperts(0, KTExperts.load(tmp_path / other, 0))
        with pytest.raises(RuntimeError, match="no experts are loaded as 'layer 0 of "):
            program(*arguments)
        kept = RoutedExperts(0, KTExperts.load(tmp_path / one, 0))
        assert torch.equal(program(*arguments), expected)
        del kept


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_a_trace_has_no_constants(model: Any) -> None:
    """torch.jit.trace could record the experts' results for the example; the trace runs with different tokens here."""

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
    expected = logits(model)
    copied = copy.deepcopy(model)
    for ours, theirs in zip(experts_of(copied), experts_of(model), strict=True):
        assert ours.experts._packed is theirs.experts._packed and ours.experts is not theirs.experts
        assert ours.hot is theirs.hot
        theirs.experts.close()
    with pytest.raises(ValueError, match="were closed"):
        logits(model)
    del model, theirs
    gc.collect()
    assert torch.equal(logits(copied), expected)
    torch._dynamo.reset()
    module = experts_of(copied)[1]
    arguments = torch.ones(1, module.experts.hidden), torch.tensor([[0, 5]]), torch.ones(1, 2)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(*arguments), module(*arguments))


def test_pickling_fails_with_a_message(model: Any, weights: Path) -> None:
    saved = io.BytesIO()
    message = rf"layer 0 of {re.escape(str(weights))} cannot be pickled .*: .* save the path"
    for save in (pickle.dumps, lambda x: torch.save(x, saved), lambda x: pickle.dumps(experts_of(x)[0].experts)):
        with pytest.raises(TypeError, match=message):
            save(model)
    logits(model, output_router_logits=True, output_hidden_states=True)  # transformers adds hooks
    for module in (model, model.model, model.model.layers[0], model.model.layers):
        with pytest.raises(TypeError, match=message):
            pickle.dumps(module)
    torch.save(model.state_dict(), saved := io.BytesIO())  # everything except the experts
    saved.seek(0)
    assert model.load_state_dict(torch.load(saved)).missing_keys == []


def test_pools_are_neither_copied_nor_pickled(weights: Path) -> None:
    wrapper = KTMoEWrapper(0, 8, 2, 256, 256, None, 1, 1, str(weights), 64, method="AMXINT8")
    wrapper.load_weights()
    copied = copy.deepcopy(wrapper)
    arguments = torch.ones(1, 256), torch.tensor([[0, 5]]), torch.ones(1, 2)
    expected = wrapper.forward(*arguments)
    wrapper.gpu_experts_mask[0] = True  # the copy has its own mask
    assert torch.equal(copied.forward(*arguments), expected) and not torch.equal(wrapper.forward(*arguments), expected)
    with pytest.raises(
        TypeError, match=r"^an object with threads cannot be pickled .*; create it in the other process"
    ):
        pickle.dumps(wrapper)


def test_save_pretrained_and_dequantize_name_the_remedy(model: Any, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="load the original model without KTConvertConfig"):
        model.dequantize()
    with pytest.raises(ValueError, match="not serializable: its experts are in") as caught:
        model.save_pretrained(tmp_path / "again")
    assert str(weights) in str(caught.value) and "`ktconvert cpu --non-experts keep`" in str(caught.value)
    assert "\n" not in str(caught.value) and not list((tmp_path / "again").glob("*.safetensors"))


def test_ids_of_no_expert_are_skipped_or_rejected(weights: Path) -> None:
    experts = KTExperts.load(weights, 1)
    hidden = np.random.default_rng(0).integers(0, 1 << 14, (4, experts.hidden)).astype(np.uint16)
    valid_ids, scores = np.array([[0, 1], [2, 7], [3, 4], [5, 6]]), np.full((4, 2), 0.5, np.float32)
    expected = experts.forward(hidden, valid_ids, scores)
    assert np.array_equal(experts.forward(hidden, valid_ids, scores, strict_ids=True), expected)
    for outside in (-1, 8, np.iinfo(np.int64).max, np.iinfo(np.int64).min):
        ids = valid_ids.copy()
        ids[2, 1] = outside
        actual = experts.forward(hidden, ids, scores)
        without_outside = scores.copy()
        without_outside[2, 1] = 0
        assert np.array_equal(actual, experts.forward(hidden, valid_ids, without_outside))
        message = rf"ids\[2, 1\] is {outside}, but layer 1 has experts 0 to 7"
        with pytest.raises(ValueError, match=message):
            experts.forward(hidden, ids, scores, strict_ids=True)
        with pytest.raises(ValueError, match=message):
            experts._submit(hidden, ids, scores, out=np.empty_like(hidden), strict_ids=True)
    assert not experts.forward(hidden, np.full((4, 2), -1), scores).any()
