"""A transformers model of which one decoder layer is in memory at a time, and never a routed expert.

The model is built on the meta device; a layer's weights come from the checkpoint when they are needed (on the CPU as
views of the mapped file) and are dropped afterwards. A function of the caller computes its experts. Attention is
transformers' eager one with a causal mask, which llmcompressor traces too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ktconvert.layouts.checkpoints.output_tensors import OtherTensor
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import INCOMPLETE, InputError, UnsupportedError, VerificationError
from ktconvert.pipeline.calibration.footprint import AT_ONCE
from ktconvert.pipeline.models import pretrained
from ktconvert.pipeline.models.loading import read_tensor

if TYPE_CHECKING:
    import torch

PROBE = 9  # tokens of the sequence on which causality is tried
# Experts, called with (hidden [T, H], ids [T, k], weights [T, k]), give [T, H].
Routed = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a layer besides the hidden states


class _Reached(Exception):
    """Ends a forward pass that has come as far as needed."""


class LayeredModel:
    """The skeleton of a checkpoint's language model.

    tensors  the checkpoint's tensors outside the routed experts
    device   where layers are computed
    instead  what messages advise where the model cannot be calibrated
    Raises UnsupportedError for a model whose experts transformers holds in another way, or that has code of its own
    unless that is trusted.
    """

    def __init__(
        self,
        source: TensorSource,
        tensors: Mapping[str, OtherTensor],
        *,
        trust_remote_code: bool = False,
        device: str = "cpu",
        instead: str = "use another model",
    ) -> None:
        import torch
        import transformers
        from accelerate import init_empty_weights
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        from ktconvert.native_quant.runtime.hf_modules import find_experts

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self.source, self.tensors, self.device = source, tensors, device
        self._trusted, self._instead = trust_remote_code, instead
        try:
            config = pretrained.read_config(str(source.root), trust_remote_code=trust_remote_code)
        except UnsupportedError as error:
            raise error.advising(f"{instead}.") from error
        for part in (config, config.get_text_config(decoder=True)):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        options = {"dtype": torch.bfloat16, "attn_implementation": "eager", "trust_remote_code": trust_remote_code}
        # Buffers stay real.
        with self._explained(pretrained.BUILD), init_empty_weights(include_buffers=False):
            self.model = pretrained.auto_class(config).from_config(config, **options).eval()
        found = find_experts(self.model)
        self._experts: dict[int, Any] = {}
        for experts in found:
            if experts.zero_ids:
                raise UnsupportedError(
                    f"{source.root}: {experts.name} has experts that give back what they get, which cannot be "
                    f"calibrated yet; {instead}."
                )
            module = self.model.get_submodule(experts.name)
            for name in list(module._parameters):
                del module._parameters[name]
            self._experts[experts.layer] = module
        prefix = found[0].name[: found[0].name.rindex("layers.")]
        self.stack = self.model.get_submodule(prefix.rstrip("."))
        self.layers = self.stack.layers
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)
        self._mapping: Any = get_model_conversion_mapping(self.model)
        renamings = [t for t in self._mapping if isinstance(t, WeightRenaming)]
        converters = [t for t in self._mapping if isinstance(t, WeightConverter)]
        names = renamings, converters, self.model.base_model_prefix, self.model.state_dict()
        # Name in the checkpoint -> name in the model, of everything but routed experts.
        self._keys = {name: rename_source_key(name, *names)[0] for name in tensors}
        self._prefix = f"{prefix}layers."
        self._called: tuple[int, list[Call]] = (0, [])

    @property
    def hidden(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer. Raises InputError where there is none."""
        return pretrained.read_tokenizer(str(self.source.root), trust_remote_code=self._trusted)

    def _explained(self, doing: str) -> AbstractContextManager[None]:
        """Raise InputError, which names config.json, for what transformers raises inside."""
        return pretrained.explain_errors(str(self.source.root), pretrained.CONFIG, action=doing, unchanged=(_Reached,))

    # --- weights ----------------------------------------------------------------------------------

    def loaded(self, layer: int) -> AbstractContextManager[None]:
        """Has a decoder layer's weights, but for routed experts, inside. InputError where the checkpoint lacks some."""
        return self._filled(f"{self._prefix}{layer}.")

    @contextmanager
    def _filled(self, prefix: str) -> Iterator[None]:
        import torch
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        names = [name for name, key in self._keys.items() if key.startswith(prefix)]
        needed = {key for key in self.model.state_dict() if key.startswith(prefix)}
        kind, plan = torch.bfloat16, self.model._get_dtype_plan(torch.bfloat16)
        config = LoadStateDictConfig(
            device_map={"": self.device}, dtype=kind, dtype_plan=plan, weight_mapping=self._mapping
        )
        remedy = f"take the model's BF16 release, or {self._instead}."
        stored = {name: read_tensor(self.source, self.tensors[name], remedy) for name in names}
        with self._explained(pretrained.BUILD):
            loading, _ = convert_and_load_state_dict_in_model(self.model, stored, config)
        del stored
        if lacks := sorted(needed & loading.missing_keys):
            raise InputError(
                f"{self.source.root}: lacks {len(lacks)} tensors of its model, such as {lacks[0]}; {INCOMPLETE}."
            )
        try:
            yield
        finally:
            module = self.model.get_submodule(prefix.rstrip("."))
            module.to("meta")
            for name in names:
                for info in self.tensors[name].reads:
                    self.source.release(info)

    # --- computing --------------------------------------------------------------------------------

    def embed(self, ids: Iterator[Any]) -> Iterator[torch.Tensor]:
        """For each sample, int64 [T], what enters the first layer: BF16 [T, H]."""
        import torch

        embedding = self.model.get_input_embeddings()
        name = next(n for n, module in self.model.named_modules() if module is embedding)
        with self._filled(f"{name}."):
            for sample in ids:
                tokens = torch.from_numpy(np.ascontiguousarray(sample))[None].to(self.device)
                yield self._reach(0, input_ids=tokens)[0].detach()

    def _reach(self, layer: int, **inputs: Any) -> torch.Tensor:
        """The hidden states with which the stack calls a layer; those before do nothing. Notes all calls."""
        import torch

        reached: list[torch.Tensor] = []
        self._called = (0, [])

        def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._called[1].append((args, kwargs))
            if len(self._called[1]) == layer + 1:
                reached.append(hidden)
                raise _Reached
            return hidden

        for module in self.layers:
            module.forward = record
        try:
            with self._explained(pretrained.COMPUTE), torch.inference_mode(), suppress(_Reached):
                self.stack(**inputs, use_cache=False)
        finally:
            for module in self.layers:
                del module.forward
        return reached[0]

    def call(self, layer: int, length: int) -> Call:
        """What the stack calls a layer with for so many tokens, beside hidden states: masks, positions, rotations."""
        import torch

        if self._called[0] != length or len(self._called[1]) < len(self.layers):
            hidden = torch.zeros((1, length, self.hidden), dtype=torch.bfloat16, device=self.device)
            self._reach(len(self.layers) - 1, inputs_embeds=hidden)
            self._called = (length, self._called[1])
        return self._called[1][layer]

    def run(self, layer: int, hidden: torch.Tensor, routed: Routed | None = None) -> torch.Tensor:
        """One sequence through a loaded layer: BF16 [T, H] to [T, H], with its experts computed by `routed`."""
        import torch

        experts = self._experts.get(layer)
        if experts is not None:
            experts.forward = routed
        args, kwargs = self.call(layer, hidden.shape[0])
        try:
            with self._explained(pretrained.COMPUTE), torch.inference_mode():
                out = self.layers[layer](hidden[None].to(self.device), *args, **kwargs)
        finally:
            if experts is not None:
                del experts.forward
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first[0]

    def routed_inputs(
        self, layer: int, hidden: torch.Tensor, *, through: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """A loaded layer's experts' inputs for a sequence, BF16 [T, H]: hidden [T, H], ids and weights [T, k]; and what
        leaves the layer without what routed experts add to it, BF16 [T, H], if it is run through to its end.
        """
        import torch

        called: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def catch(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            called.append((x.flatten(0, -2), ids.flatten(0, -2), weights.flatten(0, -2)))
            if not through:
                raise _Reached
            return torch.zeros_like(x)

        leaving = None
        with suppress(_Reached):
            leaving = self.run(layer, hidden, catch)
        return *called[0], leaving

    def middle(self, layer: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What a layer's down projections read: silu(gate) * up, as the model's class computes it."""
        import torch

        module = self._experts[layer]
        if hasattr(module, "_apply_gate"):
            return module._apply_gate(torch.cat([gate, up], dim=-1))  # type: ignore[no-any-return]
        return module.act_fn(gate) * up  # type: ignore[no-any-return]

    def slopes(self, layer: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The derivatives of `middle` with respect to gate and to up, side by side: float32 [T, 2 I]."""
        import torch

        with torch.inference_mode(False), torch.enable_grad():
            inputs = [x.clone().requires_grad_() for x in (gate, up)]
            return torch.cat(torch.autograd.grad(self.middle(layer, *inputs).sum(), inputs), dim=1).float()

    def gradients(self, hidden: torch.Tensor, seed: int) -> torch.Tensor:
        """What predictions feel of hidden states BF16 [T, H] that leave a layer, as if it were the last one: gradients
        of the log-probability of a next token, which is drawn from the prediction itself; float32 [T, H].
        """
        import torch

        generator, made = torch.Generator().manual_seed(seed), []
        with self._head(), self._explained(pretrained.COMPUTE), torch.inference_mode(False), torch.enable_grad():
            for first in range(0, len(hidden), AT_ONCE):
                leaving = hidden[first : first + AT_ONCE].clone()[None].to(self.device).requires_grad_()
                logits = self.model(inputs_embeds=leaving, use_cache=False).logits[0].float()
                drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
                loss = torch.nn.functional.cross_entropy(logits, drawn.to(self.device), reduction="sum")
                made.append(torch.autograd.grad(loss, leaving)[0][0].float())
        return torch.cat(made)

    @contextmanager
    def _head(self) -> Iterator[None]:
        """Has the weights of what follows the last layer inside, and layers that give back what they get."""
        names = {module: name for name, module in self.model.named_modules()}
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if head is None:
            raise UnsupportedError(f"{self.source.root}: predicts no tokens; use --gptq-steps descent.")
        tied = f"{names[head]}.weight" not in self._keys.values()
        others = (module for module in self.stack.children() if module not in (self.layers, embedding))
        after = [module for module in others if any(True for _ in module.parameters())]
        with ExitStack() as filled:
            for module in (*after, embedding if tied else head):
                filled.enter_context(self._filled(f"{names[module]}."))
            kept = head.weight
            if tied:
                head.weight = embedding.weight
            for layer in self.layers:
                layer.forward = lambda hidden, *_, **__: hidden
            try:
                yield
            finally:
                head.weight = kept
                for layer in self.layers:
                    del layer.forward

    def require_causal(self, layer: int) -> None:
        """Raise VerificationError where a token of a loaded layer sees later ones: it would be another model. Raise
        InputError for a layer that computes no numbers.
        """
        import torch

        generator = torch.Generator().manual_seed(layer)
        first = torch.randn((PROBE, self.hidden), generator=generator).to(torch.bfloat16)
        other = first.clone()
        other[-1] = torch.randn(self.hidden, generator=generator).to(torch.bfloat16)

        def nothing(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

        a, b = (self.run(layer, x, nothing)[:-1].float() for x in (first, other))
        if not bool(a.isfinite().all()):
            raise InputError(f"{self.source.root / pretrained.CONFIG}: {pretrained.NOT_FINITE}; {pretrained.COMPARE}")
        if not torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(a.abs().mean())):
            raise VerificationError(
                f"{self.source.root}: in layer {layer} a token sees those after it, so that calibration would be "
                f"wrong; {self._instead}, and tell us the model."
            )
