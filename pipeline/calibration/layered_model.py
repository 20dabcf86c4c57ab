"""A transformers model with one decoder layer in memory at a time, without routed experts.

The model is built on the meta device. A layer's weights are read from the checkpoint when they are needed (on the CPU
as views of the mapped file) and dropped afterwards. The caller provides a function that computes the experts. Attention
is transformers' eager implementation with a causal mask, which llmcompressor traces too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.expert_function import ExpertFunction
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.errors import INCOMPLETE, InputError, UnsupportedError, VerificationError
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.native_quant.runtime.stored_tensors import read_tensor
from ktconvert.pipeline.calibration.requirements import TOKENS_AT_ONCE
from ktconvert.pipeline.models import pretrained
from ktconvert.pipeline.report.text import plural

if TYPE_CHECKING:
    import torch

PROBE_TOKENS = 9  # length of the sequence that tests causality
# A layer's routed experts: (hidden [T, H], ids [T, k], weights [T, k]) -> [T, H].
RoutedExperts = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
CallArguments = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a layer, without the hidden states
Bits = npt.NDArray[np.uint16]


def bits_to_tensor(bits: Bits, device: Any = "cpu") -> torch.Tensor:
    """Return NumPy's BF16, which are bits, as a torch tensor."""
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16).to(device)


def tensor_to_bits(tensor: torch.Tensor) -> Bits:
    """Return the bits of a BF16 tensor."""
    import torch

    return tensor.contiguous().cpu().view(torch.uint16).numpy()


class _StopForward(Exception):
    """Ends a forward pass at the point that was of interest."""


class LayeredModel:
    """A checkpoint's language model without weights, whose layers are loaded one by one.

    tensors      the checkpoint's non-expert tensors
    device       where layers are computed
    alternative  advice in messages about a model that cannot be calibrated
    read_function  layer -> what its experts compute; None: a plain SwiGLU
    hf_model     the transformers model
    decoder      the module of hf_model that has the decoder layers
    layers       the decoder layers

    Raises UnsupportedError for a model whose experts transformers stores in an unknown way or computes differently, or
    that has its own code unless that code is trusted.
    """

    def __init__(
        self,
        source: TensorSource,
        tensors: Mapping[str, OutputTensor],
        *,
        trust_remote_code: bool = False,
        device: str = "cpu",
        alternative: str = "use a different model",
        read_function: Callable[[int], ExpertFunction | None] = lambda layer: None,
    ) -> None:
        import torch
        import transformers
        from accelerate import init_empty_weights
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        from ktconvert.native_quant.runtime.hf_modules import find_experts

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self.source = source
        self.tensors = tensors
        self.device = device
        self._trusted = trust_remote_code
        self._alternative = alternative
        try:
            config = pretrained.read_config(str(source.root), trust_remote_code=trust_remote_code)
        except UnsupportedError as error:
            raise error.with_remedy(f"{alternative}.") from error
        for part in (config, config.get_text_config(decoder=True)):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        options = {"dtype": torch.bfloat16, "attn_implementation": "eager", "trust_remote_code": trust_remote_code}
        # Buffers keep their contents.
        with self._explain_errors(pretrained.BUILD), init_empty_weights(include_buffers=False):
            self.hf_model = pretrained.auto_class(config).from_config(config, **options).eval()
        try:
            expert_modules = find_experts(self.hf_model, read_function)
        except UnsupportedError as error:
            raise error.with_path(source.root).with_remedy(f"{alternative}.") from error
        self._experts: dict[int, Any] = {}
        for experts in expert_modules:
            if experts.zero_ids:
                raise UnsupportedError(
                    f"{source.root}: {experts.name} has experts that return their input, which cannot be "
                    f"calibrated yet; {alternative}."
                )
            module = self.hf_model.get_submodule(experts.name)
            for name in list(module._parameters):
                del module._parameters[name]
            self._experts[experts.layer] = module
        prefix = expert_modules[0].name[: expert_modules[0].name.rindex("layers.")]
        self.decoder = self.hf_model.get_submodule(prefix.rstrip("."))
        self.layers = self.decoder.layers
        for module in self.hf_model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)
        self._mapping: Any = get_model_conversion_mapping(self.hf_model)
        renamings = [t for t in self._mapping if isinstance(t, WeightRenaming)]
        converters = [t for t in self._mapping if isinstance(t, WeightConverter)]
        names = renamings, converters, self.hf_model.base_model_prefix, self.hf_model.state_dict()
        # Name in the checkpoint -> name in the model, without routed experts.
        self._keys = {name: rename_source_key(name, *names)[0] for name in tensors}
        self._prefix = f"{prefix}layers."
        self._layer_calls: tuple[int, list[CallArguments]] = (0, [])

    @property
    def hidden(self) -> int:
        return int(self.hf_model.config.get_text_config(decoder=True).hidden_size)

    def tokenizer(self) -> Any:
        """Return the checkpoint's tokenizer. Raises InputError if it has none."""
        return pretrained.read_tokenizer(str(self.source.root), trust_remote_code=self._trusted)

    def _explain_errors(self, action: str) -> AbstractContextManager[None]:
        """Turn errors of transformers inside the context into an InputError that names config.json."""
        return pretrained.explain_errors(
            str(self.source.root), pretrained.CONFIG, action=action, unchanged=(_StopForward,)
        )

    # --- weights ----------------------------------------------------------------------------------

    def load_layer(self, layer: int) -> AbstractContextManager[None]:
        """Hold a decoder layer's weights, without routed experts, inside the context.

        Raises InputError if the checkpoint lacks some of them.
        """
        return self._load_weights(f"{self._prefix}{layer}.")

    @contextmanager
    def _load_weights(self, prefix: str) -> Iterator[None]:
        """Hold the weights below a prefix on the device inside the block.

        Raises InputError if any is missing, or has a different shape than in the model.
        """
        import torch
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        names = [name for name, key in self._keys.items() if key.startswith(prefix)]
        needed = {key for key in self.hf_model.state_dict() if key.startswith(prefix)}
        config = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=torch.bfloat16,
            dtype_plan=self.hf_model._get_dtype_plan(torch.bfloat16),
            weight_mapping=self._mapping,
        )
        remedy = f"use the model's BF16 release, or {self._alternative}."
        stored = {name: read_tensor(self.source, self.tensors[name], remedy) for name in names}
        with self._explain_errors(pretrained.BUILD):
            loading, _ = convert_and_load_state_dict_in_model(self.hf_model, stored, config)
        del stored
        from ktconvert.native_quant.runtime import hf_non_experts

        hf_non_experts.require_equal_shapes(loading.mismatched_keys, str(self.source.root))
        if missing := sorted(needed & loading.missing_keys):
            problem = f"lacks {plural(len(missing), 'tensor')} of its model, such as {missing[0]}"
            raise InputError(problem, INCOMPLETE, path=self.source.root)
        try:
            yield
        finally:
            module = self.hf_model.get_submodule(prefix.rstrip("."))
            module.to("meta")
            for name in names:
                for info in self.tensors[name].reads:
                    self.source.release(info)

    # --- computing --------------------------------------------------------------------------------

    def embed(self, ids: Iterator[Any]) -> Iterator[torch.Tensor]:
        """Yield the input of the first layer for each sample, int64 [T]: BF16 [T, H]."""
        import torch

        embedding = self.hf_model.get_input_embeddings()
        name = next(n for n, module in self.hf_model.named_modules() if module is embedding)
        with self._load_weights(f"{name}."):
            for sample in ids:
                tokens = torch.from_numpy(np.ascontiguousarray(sample))[None].to(self.device)
                yield self._capture_layer_input(0, input_ids=tokens)[0].detach()

    def _capture_layer_input(self, layer: int, **inputs: Any) -> torch.Tensor:
        """Return the hidden states that the decoder passes to a layer, with all layers skipped; record all calls."""
        import torch

        captured: list[torch.Tensor] = []
        self._layer_calls = (0, [])

        def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._layer_calls[1].append((args, kwargs))
            if len(self._layer_calls[1]) == layer + 1:
                captured.append(hidden)
                raise _StopForward
            return hidden

        for module in self.layers:
            module.forward = record
        try:
            with self._explain_errors(pretrained.COMPUTE), torch.inference_mode(), suppress(_StopForward):
                self.decoder(**inputs, use_cache=False)
        finally:
            for module in self.layers:
                del module.forward
        return captured[0]

    def layer_arguments(self, layer: int, length: int) -> CallArguments:
        """Return the arguments of a layer for a sequence of this length: masks, positions, rotations."""
        import torch

        if self._layer_calls[0] != length or len(self._layer_calls[1]) < len(self.layers):
            hidden = torch.zeros((1, length, self.hidden), dtype=torch.bfloat16, device=self.device)
            self._capture_layer_input(len(self.layers) - 1, inputs_embeds=hidden)
            self._layer_calls = (length, self._layer_calls[1])
        return self._layer_calls[1][layer]

    def run_layer(self, layer: int, hidden: torch.Tensor, routed_experts: RoutedExperts | None = None) -> torch.Tensor:
        """Run one sequence through a loaded layer, BF16 [T, H] to [T, H]; `routed_experts` computes the experts."""
        import torch

        experts = self._experts.get(layer)
        if experts is not None:
            experts.forward = routed_experts
        args, kwargs = self.layer_arguments(layer, hidden.shape[0])
        try:
            with self._explain_errors(pretrained.COMPUTE), torch.inference_mode():
                out = self.layers[layer](hidden[None].to(self.device), *args, **kwargs)
        finally:
            if experts is not None:
                del experts.forward
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first[0]

    def expert_inputs(
        self, layer: int, hidden: torch.Tensor, *, to_end: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the inputs of a loaded layer's experts for a sequence, BF16 [T, H].

        These are hidden states [T, H], expert ids and routing weights [T, k]; and if the layer is run to its end, its
        output without its routed experts, BF16 [T, H].
        """
        import torch

        calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def record_call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            calls.append((x.flatten(0, -2), ids.flatten(0, -2), weights.flatten(0, -2)))
            if not to_end:
                raise _StopForward
            return torch.zeros_like(x)

        output = None
        with suppress(_StopForward):
            output = self.run_layer(layer, hidden, record_call)
        return *calls[0], output

    def activate(self, layer: int, *products: torch.Tensor) -> torch.Tensor:
        """Return the inputs of a layer's down projections, as the model's class computes them.

        products  outputs of gate and up, each [T, I]; without a gate only of up
        """
        import torch

        module = self._experts[layer]
        if len(products) == 1:
            return module.act_fn(*products)  # type: ignore[no-any-return]
        if not hasattr(module, "_apply_gate"):
            gate, up = products
            return module.act_fn(gate) * up  # type: ignore[no-any-return]
        if getattr(module, "is_concatenated", True):
            return module._apply_gate(torch.cat(products, dim=-1))  # type: ignore[no-any-return]
        return module._apply_gate(torch.stack(products, dim=-1).flatten(-2))  # type: ignore[no-any-return]

    def activation_slopes(self, layer: int, *products: torch.Tensor) -> torch.Tensor:
        """Return the derivatives of `activate` with respect to its products, float32 [T, 2 I], of one [T, I]."""
        import torch

        with torch.inference_mode(False), torch.enable_grad():
            inputs = [x.clone().requires_grad_() for x in products]
            return torch.cat(torch.autograd.grad(self.activate(layer, *inputs).sum(), inputs), dim=1).float()

    def prediction_gradients(self, hidden: torch.Tensor, seed: int) -> torch.Tensor:
        """Return gradients of predictions with respect to a layer's outputs BF16 [T, H], as if it were the last layer.

        They are gradients of the log-probability of a next token that is drawn from the prediction itself; float32
        [T, H].
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        gradients = []
        with (
            self._load_head(),
            self._explain_errors(pretrained.COMPUTE),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            for first in range(0, len(hidden), TOKENS_AT_ONCE):
                outputs = hidden[first : first + TOKENS_AT_ONCE].clone()[None].to(self.device).requires_grad_()
                logits = self.hf_model(inputs_embeds=outputs, use_cache=False).logits[0].float()
                drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
                loss = torch.nn.functional.cross_entropy(logits, drawn.to(self.device), reduction="sum")
                gradients.append(torch.autograd.grad(loss, outputs)[0][0].float())
        return torch.cat(gradients)

    def output_derivatives(self, layer: int, width: int) -> torch.Tensor:
        """Return the derivatives of a loaded layer's outputs by those of its experts, float32 [width, H].

        width  hidden size of the experts. In a latent space, a matrix follows the sum of their outputs
        """
        import torch

        hidden = torch.zeros((width, self.hidden), dtype=torch.bfloat16)
        with_units, without = (
            self.run_layer(layer, hidden, lambda x, *_, sums=sums: sums.to(x).reshape(x.shape)).float()
            for sums in (torch.eye(width), torch.zeros((width, width)))
        )
        return with_units - without

    @contextmanager
    def _load_head(self) -> Iterator[None]:
        """Hold the weights of the modules after the last layer, and make layers return their input, in the context."""
        names = {module: name for name, module in self.hf_model.named_modules()}
        embedding = self.hf_model.get_input_embeddings()
        head = self.hf_model.get_output_embeddings()
        if head is None:
            raise UnsupportedError(f"{self.source.root}: predicts no tokens; use --gptq-steps descent.")
        tied = f"{names[head]}.weight" not in self._keys.values()
        others = (module for module in self.decoder.children() if module not in (self.layers, embedding))
        last_modules = [module for module in others if any(True for _ in module.parameters())]
        with ExitStack() as loaded:
            for module in (*last_modules, embedding if tied else head):
                loaded.enter_context(self._load_weights(f"{names[module]}."))
            head_weight = head.weight
            if tied:
                head.weight = embedding.weight
            for layer in self.layers:
                layer.forward = lambda hidden, *_, **__: hidden
            try:
                yield
            finally:
                head.weight = head_weight
                for layer in self.layers:
                    del layer.forward

    def require_causal(self, layer: int) -> None:
        """Raise VerificationError if a token of a loaded layer sees later tokens: it would be a different model.

        Raises InputError for a layer that computes NaN or infinity.
        """
        import torch

        generator = torch.Generator().manual_seed(layer)
        hidden = torch.randn((PROBE_TOKENS, self.hidden), generator=generator).to(torch.bfloat16)
        changed = hidden.clone()
        changed[-1] = torch.randn(self.hidden, generator=generator).to(torch.bfloat16)

        def zero_output(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

        outputs = self.run_layer(layer, hidden, zero_output)[:-1].float()
        changed_outputs = self.run_layer(layer, changed, zero_output)[:-1].float()
        if not bool(outputs.isfinite().all()):
            raise pretrained.not_finite_error(str(self.source.root))
        if not torch.allclose(outputs, changed_outputs, rtol=1e-2, atol=1e-2 * float(outputs.abs().mean())):
            raise VerificationError(
                f"{self.source.root}: in layer {layer} a token sees later tokens, so calibration would be "
                f"wrong; {self._alternative}, and tell us the model."
            )
