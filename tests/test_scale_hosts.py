"""What benchmarks/scale.py calculates for many hosts: sizes as the real plan has them, and a formula that makes sense."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.scripts import benchmark

scale_hosts, models = benchmark("scale_hosts"), benchmark("models")
MODELS = {model.name: model for model in scale_hosts.MODELS}


@pytest.mark.parametrize(("name", "method", "bits"), [("DeepSeek-V3.1", "int8", 8), ("Kimi-K2", "int4", 4)])
def test_the_sizes_are_those_of_the_plan(name, method, bits, tmp_path, cli):
    """Of headers and holes with two layers of experts in that model's shape."""
    model = MODELS[name]
    tensors, config = models.deepseek(5, model.experts)  # the first three are dense
    models.write_model(tmp_path / "model", tensors, config, 4)
    arguments = ("-i", tmp_path / "model", "-o", tmp_path / "out", "--quant-method", method, "--dry-run", "--json")
    reported = cli("cpu", *arguments, "--threadpool-count", scale_hosts.NUMA).stdout.splitlines()
    [plan] = [event for line in reported if (event := json.loads(line))["event"] == "plan"]
    assert len(plan["units"]) == 2
    assert (plan["bytes_in"], plan["bytes_out"]) == (2 * model.bytes_in, 2 * model.bytes_out(bits))


numbers = st.floats(1e8, 1e12)


@given(
    layers=st.integers(1, 100),
    rate=numbers,
    link=numbers,
    shared=numbers,
    hosts=st.integers(1, 200),
    between=st.floats(0, 1),
)
def test_no_host_is_faster_than_itself_and_none_slows_the_others_down(layers, rate, link, shared, hosts, between):
    model = scale_hosts.Model("any", 7168, 2048, 256, layers)
    host = scale_hosts.Host({8: rate}, link, between, 1.0)
    one, many, more = (scale_hosts.wall(model, 8, n, host, shared) for n in (1, hosts, 2 * hosts))
    assert more <= many * (1 + 1e-9) <= one * (1 + 1e-9) ** 2
    assert many >= one / hosts * (1 - 1e-9)
    moved = model.layers * (model.bytes_in + model.bytes_out(8))
    assert many >= moved / shared and one >= max(moved / link, layers * host.seconds(model, 8))
