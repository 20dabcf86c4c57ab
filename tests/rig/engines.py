"""The code by which SGLang calls KTMoEWrapper, driven on CPU tensors, and the float64 reference of its results.

As a program (`python -P engines.py JOB`), it imports the real kt_ep_wrapper.py of an unpacked wheel with ktconvert as
kt_kernel, and with stubs for CUDA and for the rest of SGLang. It prints the relative error of each case as JSON.
"""

import contextlib
import importlib.util
import itertools
import json
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EXPERTS, HIDDEN, WIDTH, TOPK, LAYERS = 8, 256, 256, 2, 2  # of the bundled model
ON_GPU = (1, 4, 6)
RANK, ALPHA = 8, 16.0
SIZES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
Weights = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def read_weights(model: Path) -> Weights:
    """Return gate, up and down of each layer, float64 [E, n, k]."""
    tensors = load_file(model / "model.safetensors")
    base = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    return [
        tuple(  # type: ignore[misc]
            torch.stack([tensors[base.format(layer, e, name)].double() for e in range(EXPERTS)])
            for name in ("gate", "up", "down")
        )
        for layer in range(LAYERS)
    ]


def write_adapter(folder: Path) -> Path:
    """Write an adapter of PEFT with random matrices for each expert, and return its folder."""
    g = torch.Generator().manual_seed(3)
    tensors = {}
    for layer, expert, (name, (rows, columns)) in itertools.product(range(LAYERS), range(EXPERTS), SIZES.items()):
        module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=g) / 20
        tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=g) / 20
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [f"{name}_proj" for name in SIZES]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge_adapter(weights: Weights, folder: Path) -> Weights:
    """Return the weights with the adapter's matrices added."""
    tensors = load_file(folder / "adapter_model.safetensors")

    def sum_products(layer: int, name: str) -> torch.Tensor:
        modules = (f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{name}_proj" for e in range(EXPERTS))
        pairs = ([tensors[f"{module}.lora_{side}.weight"].double() for side in "BA"] for module in modules)
        return ALPHA / RANK * torch.stack([b @ a for b, a in pairs])

    return [
        tuple(matrix + sum_products(layer, name) for matrix, name in zip(matrices, SIZES, strict=True))  # type: ignore[misc]
        for layer, matrices in enumerate(weights)
    ]


def compute(weights: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, skip: Any = ()) -> torch.Tensor:
    """Compute the weighted sum of each token's experts in float64, without negative ids and the experts in skip."""
    gate, up, down = weights
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, j in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        if (e := int(ids[t, j])) >= 0 and e not in skip:
            token = x[t].double()
            out[t] += float(scores[t, j]) * (down[e] @ (torch.nn.functional.silu(gate[e] @ token) * (up[e] @ token)))
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the L2 distance relative to the expected values."""
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-9))


def draw(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw hidden states, int32 ids, of which the last token has none if there are several tokens, and weights."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOPK].int()
    if tokens > 1:
        ids[-1] = -1
    return torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16), ids, torch.rand(tokens, TOPK, generator=g)


# --- program ------------------------------------------------------------------------------------------------------

Combined = namedtuple("Combined", "hidden_states")
Dispatched = namedtuple("Dispatched", "hidden_states topk_output")
Topk = namedtuple("Topk", "topk_weights topk_ids router_logits")


class Stub:
    """An object of CUDA or SGLang that does nothing: every attribute is itself, and a call returns None."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        pass


class GpuMethod:
    """Experts of a GPU in float64. experts: the model's expert of each id."""

    experts: list[int]

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def create_weights(self, layer: Any, num_experts: int, **sizes: Any) -> None:
        for name, shape in (("w13_weight", (2 * WIDTH, HIDDEN)), ("w2_weight", (HIDDEN, WIDTH))):
            values = torch.zeros(num_experts, *shape, dtype=torch.bfloat16)
            setattr(layer, name, torch.nn.Parameter(values, requires_grad=False))

    def create_moe_runner(self, layer: Any, config: Any) -> None:
        pass

    def apply(self, layer: Any, dispatched: Any) -> Any:
        scores, ids, _ = dispatched.topk_output
        experts = torch.tensor([*self.experts, -1])  # -1 stays -1
        return Combined(compute(self.weights, dispatched.hidden_states, experts[ids.long()], scores))


@dataclass
class RunnerConfig:
    """SGLang's settings of a layer of experts."""

    activation: str = "silu"
    routed_scaling_factor: float | None = None
    num_local_experts: int = EXPERTS
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None


def add_modules(modules: dict[str, dict[str, Any]]) -> None:
    """Make modules with these attributes importable, and their packages."""
    for name, attributes in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                sys.modules[path] = ModuleType(path)
                sys.modules[path].__path__ = []
        vars(sys.modules[name]).update(attributes)


def stub_modules(metadata: Any, settings: Any, registry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the names that both kt_ep_wrapper modules import from SGLang."""
    srt, moe = "sglang.srt.", "sglang.srt.layers.moe."
    return {
        f"{srt}configs.glm5_next": {"GLM5_NEXT_SUPPORTED_TP_SIZES": (1, 2, 4, 8)},
        f"{srt}distributed": {
            **dict.fromkeys(("get_tensor_model_parallel_rank",), lambda: 0),
            **dict.fromkeys(("get_tensor_model_parallel_world_size",), lambda: 1),
            "get_tp_group": lambda: None,
        },
        f"{srt}layers.quantization.base_config": {"FusedMoEMethodBase": type("FusedMoEMethodBase", (), {})},
        f"{srt}layers.quantization.marlin_utils": {"marlin_permute_scales": lambda scales, *sizes: scales},
        f"{srt}utils": {"get_compiler_backend": lambda: "eager", "is_cuda": lambda: False},
        f"{srt}environ": {"envs": Stub()},
        f"{srt}lora.kt_dsv4": {"is_native_adapter": lambda path: False, "load_expert_layer": None},
        f"{srt}arg_groups.overrides": {
            "model_config_of": lambda arguments: SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=LAYERS))
        },
        f"{srt}runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=settings),
            "get_parallel": lambda: SimpleNamespace(tp_rank=0),
            "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=512),
        },
        f"{srt}eplb.expert_distribution": {"get_global_expert_distribution_recorder": Stub},
        f"{srt}eplb.expert_location_dispatch": {"get_global_expert_location_metadata": lambda: metadata},
        f"{moe}quant_method_registry": {
            "register_moe_quant_wrapper": lambda name, test, make, **options: registry.update({name: make})
        },
        f"{moe}utils": {"is_kt_ep_wrapper_disabled": lambda: False},
        f"{moe}token_dispatcher": {"StandardCombineInput": Combined},
        f"{moe}topk": {"TopKOutputChecker": SimpleNamespace(format_is_bypassed=lambda output: False)},
        f"{moe}fused_moe_triton.layer": {"UnquantizedFusedMoEMethod": Stub},
    }


def stub_cuda() -> None:
    """Replace what the modules call of CUDA."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Stub
    cuda.current_stream = lambda *device: Stub()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *device: None
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]


class Driver:
    """The kt_ep_wrapper module of an engine, and the model's weights."""

    def __init__(self, module: Path, model: Path) -> None:
        from ktconvert.native_quant import install_as_kt_kernel

        install_as_kt_kernel()
        self.weights = read_weights(model)
        self.metadata = SimpleNamespace(physical_to_logical_map_cpu=torch.arange(EXPERTS).repeat(LAYERS, 1))
        self.settings = SimpleNamespace(kt_num_gpu_experts=len(ON_GPU), kt_cpuinfer=2, kt_threadpool_count=1)
        self.registry: dict[str, Any] = {}
        stub_cuda()
        add_modules(stub_modules(self.metadata, self.settings, self.registry))
        name = "sglang.srt.layers.moe.kt_ep_wrapper"
        spec = importlib.util.spec_from_file_location(name, module)
        assert spec is not None and spec.loader is not None
        self.module: Any = importlib.util.module_from_spec(spec)
        sys.modules[name] = self.module
        spec.loader.exec_module(self.module)
        assert self.module.KTRANSFORMERS_AVAILABLE

    def make_layer(
        self, number: int, method: str, path: str, deferred: int | None, on_gpu: Any, adapter: str | None = None
    ) -> tuple[Any, Any]:
        """Return the engine's method object of a layer, with loaded weights, and the layer.

        on_gpu: experts on the GPU, for sglang-kt; upstream has the first ones on the GPU
        adapter: sglang-kt's --kt-expert-lora-path
        """
        layer = torch.nn.Module()
        for name, value in {
            "top_k": TOPK,
            "intermediate_size_per_partition": WIDTH,
            "moe_tp_size": 1,
            "num_experts": EXPERTS,
            "layer_id": number,
            "moe_runner_config": RunnerConfig(),
        }.items():
            setattr(layer, name, value)
        gpu: Any = GpuMethod(self.weights[number])
        if self.registry:
            mask = torch.zeros(EXPERTS, dtype=torch.bool)
            mask[list(on_gpu)] = True
            options = {"weight_path": path, "method": method, "max_deferred_experts_per_token": deferred}
            options["expert_lora_path"] = adapter
            threads = {"cpuinfer_threads": 2, "threadpool_count": 1, "chunked_prefill_size": 512}
            config = self.module.KTConfig(
                layer_idx=number, gpu_experts_mask=mask, num_layers=LAYERS, **options, **threads
            )
            engine = self.registry["kt_ep"](layer, gpu, config)
            gpu.experts = sorted(on_gpu)
        else:
            vars(self.settings).update(
                kt_weight_path=path, kt_method=method, kt_max_deferred_experts_per_token=deferred
            )
            engine = self.module.KTEPWrapperMethod(gpu, self.module.create_kt_config_from_server_args(None, number))
            gpu.experts = self.metadata.physical_to_logical_map_cpu[number].tolist()
        engine.create_weights(layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16)
        engine.create_moe_runner(layer, layer.moe_runner_config)
        engine.process_weights_after_loading(layer)
        return engine, layer

    def measure(self, method: str, path: str, deferred: int | None, on_gpu: Any, order: list[int]) -> float:
        """Return the largest error of both layers' sum, in which deferred experts are complete."""
        self.metadata.physical_to_logical_map_cpu[:] = torch.tensor(order)
        layers = [self.make_layer(number, method, path, deferred, on_gpu) for number in range(LAYERS)]
        worst = 0.0
        for tokens in (1, 5, 33):
            x, ids, scores = draw(tokens, tokens)
            logical = torch.tensor([*order, -1])[ids.long()]
            outs = [e.apply(layer, Dispatched(x, Topk(scores, ids.clone(), None))).hidden_states for e, layer in layers]
            real = ids[:, 0] >= 0  # sglang-kt gives padded tokens to the GPU's last expert
            expected = torch.stack([compute(weights, x, logical, scores)[real] for weights in self.weights])
            actual = torch.stack([out.double()[real] for out in outs])
            both = (actual.sum(0), expected.sum(0)) if deferred else (actual, expected)
            worst = max(worst, relative_error(*both))
        return worst

    def measure_lora(self, method: str, path: str, adapter: str) -> float:
        """Return the largest error of both layers with an adapter, to weights into which it is merged."""
        worst = 0.0
        for number, weights in enumerate(merge_adapter(self.weights, Path(adapter))):
            engine, layer = self.make_layer(number, method, path, None, (), adapter)
            x, ids, scores = draw(16, number)
            out = engine.apply(layer, Dispatched(x, Topk(scores, ids.clone(), None))).hidden_states
            worst = max(worst, relative_error(out, compute(weights, x, ids, scores)))
        return worst

    def measure_update(self, path: str) -> float:
        """Return the error after sglang-kt has chosen other experts for the GPU by a batch."""
        engine, layer = self.make_layer(0, "BF16", path, None, ON_GPU)
        x, ids, scores = draw(40, 3)
        ids[:30] = torch.tensor([0, 5], dtype=torch.int32)
        values = {n: torch.zeros(EXPERTS, *p.shape[1:], dtype=p.dtype) for n, p in layer.named_parameters()}
        kinds = {"_is_fp8_quant": False, "_is_fp8_channel_quant": False, "_is_bf16_quant": True}
        context = SimpleNamespace(**kinds, gpu_layer=SimpleNamespace(**values))
        engine._update_gpu_experts_from_batch(layer, context, Dispatched(x, Topk(scores, ids, None)))
        chosen = torch.where(engine.wrapper.gpu_experts_mask)[0].tolist()
        assert {0, 5} <= set(chosen) != set(ON_GPU), chosen
        engine.gpu_method.experts = chosen
        out = engine.apply(layer, Dispatched(x, Topk(scores, ids.clone(), None))).hidden_states
        return relative_error(out[:-1], compute(self.weights[0], x, ids, scores)[:-1])

    def measure_prefill(self, path: str) -> float:
        """Return the error of the weights that sglang-kt copies for a prefill on the GPU."""
        engine, layer = self.make_layer(0, "BF16", path, None, ON_GPU)
        context = object.__new__(self.module.SharedFullContext)
        context.gpu_layer = SimpleNamespace(num_experts=EXPERTS)
        context.cpu_buffers, context.all_rank_buffer_ptrs = {}, {}
        for name, parameter in layer.named_parameters():
            shape = parameter.shape[1:]
            setattr(context.gpu_layer, name, torch.zeros(EXPERTS, *shape, dtype=parameter.dtype))
            context.cpu_buffers[name] = torch.zeros(2, *shape, dtype=parameter.dtype)
            context.all_rank_buffer_ptrs[name] = [context.cpu_buffers[name].data_ptr()]
        context._prepare_weight_bf16(engine.wrapper, layer, engine.gpu_experts_mask, engine.logical_to_gpu_index)
        gate, up, down = self.weights[0]
        cpu = [e for e in range(EXPERTS) if e not in ON_GPU]
        pairs = ((context.gpu_layer.w13_weight, torch.cat([gate, up], 1)), (context.gpu_layer.w2_weight, down))
        return max(relative_error(copied[cpu], expected[cpu]) for copied, expected in pairs)


def main(job: dict[str, Any]) -> dict[str, float]:
    """Run all cases of an engine. job: paths of module, model and adapter, and method -> path of its weights."""
    driver = Driver(Path(job["module"]), Path(job["model"]))
    identity, backwards = list(range(EXPERTS)), list(range(EXPERTS))[::-1]
    with_masks = bool(driver.registry)
    placements = {"none": (), "some": ON_GPU, "all": range(EXPERTS)} if with_masks else {"first": ()}
    order = identity if with_masks else backwards
    errors = {
        f"{method}, {name} on the GPU, {deferred} deferred": driver.measure(method, path, deferred, on_gpu, order)
        for method, path in job["weights"].items()
        for name, on_gpu in placements.items()
        for deferred in (None, 1)
    }
    if with_masks:
        for method, path in job["weights"].items():
            errors[f"{method}, an adapter"] = driver.measure_lora(method, path, job["adapter"])
        errors["BF16, updated placement"] = driver.measure_update(job["weights"]["BF16"])
        errors["BF16, prefill"] = driver.measure_prefill(job["weights"]["BF16"])
        errors["BF16, a map"] = driver.measure("BF16", job["weights"]["BF16"], None, (), backwards)
    return errors


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
