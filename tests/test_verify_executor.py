"""verify, its questions answered by an executor's workers: the same report."""

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ktconvert.layouts.errors import InputError, KtconvertError, OutputError
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify import item_checks, report
from ktconvert.pipeline.verify.inputs import VerifyInputs, open_inputs
from ktconvert.pipeline.verify.verify import verify
from rig import conversion

OUTPUTS = {
    "merged": ("cpu",),
    "loose": ("cpu", "--no-merge-safetensor"),
    "mxfp4, all else kept": ("cpu", "--quant-method", "mxfp4", "--non-experts", "keep"),
    "for the GPU": ("gpu", "--quant-method", "RTN"),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("source") / "model", layers=2)


def reported(chosen: VerifyInputs, workers: Executor | None) -> str:
    return json.dumps(report.document(verify(chosen, Reporter(verbosity=-1), workers, 1)), sort_keys=True)


@pytest.mark.parametrize("which", OUTPUTS)
def test_the_report_is_the_same(source, workers, tmp_path, cli, which):
    output = tmp_path / "out"
    command, *options = OUTPUTS[which]
    cli(command, "-i", source, "-o", output, *options)
    chosen = VerifyInputs(output, against=str(source), load=False, full=True)
    assert '"ok": true' in reported(chosen, None)
    assert reported(chosen, workers) == reported(chosen, None)
    file = max(output.rglob("*.safetensors" if which != "loose" else "*.kt"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-100] ^= 0x10
    file.write_bytes(data)
    assert '"ok": false' in reported(chosen, None)
    assert reported(chosen, workers) == reported(chosen, None)
    assert reported(replace(chosen, against=None), workers) == reported(replace(chosen, against=None), None)


def test_against_another_output_and_of_a_dequantized_one(source, workers, tmp_path, cli):
    merged, loose, whole = tmp_path / "merged", tmp_path / "loose", tmp_path / "whole"
    cli("cpu", "-i", source, "-o", merged)
    cli("cpu", "-i", source, "-o", loose, "--no-merge-safetensor")
    cli("dequantize", source, whole)
    for chosen in (VerifyInputs(merged, against=str(loose)), VerifyInputs(whole, against=str(source))):
        assert '"ok": true' in reported(chosen, None)
        assert reported(chosen, workers) == reported(chosen, None)


def test_a_worker_that_sees_something_else(source, workers, tmp_path, cli):
    output, mine = tmp_path / "out", tmp_path / "mine"
    shutil.copytree(source, mine)
    cli("cpu", "-i", mine, "-o", output)
    opened = open_inputs(VerifyInputs(output, against=str(mine)))
    order = item_checks.WorkerTask(opened.options, "run", "0.0.0", opened.files, 1)
    failure = workers.submit(item_checks.check_as_worker, order, "hashes", []).result()
    assert failure.kind == OutputError.__name__
    assert f"host {os.uname().nodename}: ktconvert " in failure.sentence and "0.0.0" in failure.sentence
    (mine / "model-00001-of-00003.safetensors").unlink()
    order = replace(order, version=item_checks.tool_version())
    check = item_checks.by_workers(workers, lambda *_: None, "again")  # not a function of a module: it cannot travel
    with pytest.raises(KtconvertError, match="the executor has lost it"):
        list(check("hashes", [1], [1]))
    failure = workers.submit(item_checks.check_as_worker, order, "hashes", []).result()
    assert failure.kind == InputError.__name__
    assert f"host {os.uname().nodename}: {mine}" in failure.sentence
    opened.close()


def test_a_worker_sees_what_was_put_in_place_since(tmp_path, cli):
    output, mine = tmp_path / "out", conversion.checkpoint(tmp_path / "mine", layers=1)
    cli("cpu", "-i", mine, "-o", output)
    chosen = VerifyInputs(output, against=str(mine), load=False)
    with ThreadPoolExecutor(1) as worker:
        assert '"ok": true' in reported(chosen, worker)
        shard = mine / "model-00001-of-00002.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 0x80
        other = shard.with_name("other")
        other.write_bytes(data)
        other.rename(shard)
        assert '"ok": false' in reported(chosen, None)
        assert reported(chosen, worker) == reported(chosen, None)


def test_on_the_command_line(source, tmp_path, cli):
    output = tmp_path / "out"
    cli("cpu", "-i", source, "-o", output)
    line = ("verify", output, "--against", source, "--json")
    assert cli(*line, "--executor", "dask:local:1").stdout == cli(*line).stdout
