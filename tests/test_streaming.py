"""Models of the hub whose weights are fetched while they are needed: `--stream` and `fetch`."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import mmap
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.sources import remote
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.sources.hub_headers import FIRST_BYTES, Commit
from ktconvert.layouts.sources.remote import RemoteFile
from ktconvert.layouts.sources.whole_files import WholeFiles, list_fetches, plan_windows
from ktconvert.native_quant.runtime.hot_experts import mask_file
from rig import conversion, hub_server, killpoint, shims
from rig.hub_server import Hub, serve_hub

NAME = "org/model"
SIZE = 3_000_000
WEIGHTS = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes()
LAYERS, EXPERTS = 11, 2


class FileSystem:
    """The part of huggingface_hub's file system that a Commit uses; each file consists of WEIGHTS."""

    def open(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO(WEIGHTS)


STEP = st.tuples(st.sampled_from(("view", "keep", "prefetch", "release")), st.integers(0, SIZE), st.integers(0, SIZE))


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(STEP))
def test_bytes_are_right_in_any_order_of_accesses(steps: list[tuple[str, int, int]]) -> None:
    """Views keep their bytes, also those that have been released; otherwise, released bytes take no disk space."""
    with conversion.memory_folder(Path(tempfile.mkdtemp())) as folder:  # a file system with holes
        files = remote.RemoteFiles(Commit(FileSystem(), NAME, "0" * 40), folder)
        kept = []
        for step, *ends in steps:
            start, stop = sorted(ends)
            if step == "prefetch":
                files.prefetch("a", SIZE, start, stop)
                continue
            view = files.view("a", SIZE, start, stop)
            assert view.tobytes() == WEIGHTS[start:stop]
            if step == "keep":
                kept.append((view[: len(view) // 2], start, start + len(view) // 2))
            elif step == "release":
                files.release("a", start, stop)
            del view
        assert all(view.tobytes() == WEIGHTS[start:stop] for view, start, stop in kept)
        kept.clear()
        files.view("a", SIZE, 0, SIZE)
        files.release("a", 0, SIZE)
        assert files.held_bytes <= 4096  # the last page, of which the file has a part
        files.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 12 shards."""
    return conversion.checkpoint(tmp_path_factory.mktemp("hub") / "model", layers=LAYERS, experts=EXPERTS)


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with serve_hub({NAME: model}) as running:
        yield running


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> conversion.Tree:
    output = tmp_path_factory.mktemp("expected") / "out"
    assert conversion.ktconvert("cpu", "-i", model, "-o", output, "--quant-method", "int8").returncode == 0
    return weights(output)


def weights(folder: Path) -> conversion.Tree:
    return {name: data for name, data in conversion.tree(folder).items() if name.endswith(".safetensors")}


def stream(output: Path) -> tuple[str, ...]:
    return "cpu", "-i", NAME, "-o", str(output), "--quant-method", "int8", "--stream"


def test_a_streamed_conversion_has_the_same_bytes(hub, environment, model, expected, tmp_path) -> None:
    """`verify` fetches the weights again; no cache keeps them."""
    done = conversion.ktconvert(*stream(tmp_path / "out"), env=environment)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "out") == expected
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    headers = 12 * FIRST_BYTES
    assert hub.sent < 1.1 * (size + headers)
    sent = hub.sent
    done = conversion.ktconvert("verify", tmp_path / "out", "--against", NAME, "--full", env=environment)
    assert done.returncode == 0 and "quantized again, same bytes" in done.stdout, done.stderr
    assert hub.sent - sent < 1.02 * size  # each expert once
    for cache in ("hf", "cache"):
        held = sum(path.stat().st_blocks * 512 for path in (tmp_path / cache).rglob("*") if not path.is_symlink())
        assert held < 0.3 * size, cache


CHOOSE_MAP = ("--method-map", "auto", "--ram", "1500KB", "--numa", "1")


def test_a_map_that_is_chosen_for_a_streamed_conversion_is_the_same(hub, environment, model, tmp_path) -> None:
    """A sample of the weights is fetched before. The next run of the same conversion uses the recorded map."""
    done = conversion.ktconvert("cpu", "-i", model, "-o", tmp_path / "local", *CHOOSE_MAP)
    assert done.returncode == 0, done.stderr
    command = ("cpu", "-i", NAME, "-o", tmp_path / "out", *CHOOSE_MAP, "--stream")
    done = conversion.ktconvert(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_bytes())["model"]["methods"]) > 1
    assert weights(tmp_path / "out") == weights(tmp_path / "local")
    hub.sent = 0
    assert conversion.ktconvert(*command, env=environment).returncode == 0
    assert hub.sent == 0


def test_job_shares_fetch_only_their_files(hub, environment, expected, tmp_path) -> None:
    command = stream(tmp_path / "out")
    assert conversion.ktconvert(*command, "--dry-run", env=environment).returncode == 0  # which fetches headers
    hub.requests.clear()
    assert conversion.ktconvert(*command, "--part", "1/2", env=environment).returncode == 0
    sent = {path.rsplit("/", 1)[1] for method, path, span in hub.requests if method == "GET" and span}
    assert sent == {f"model-{number:05d}-of-{LAYERS + 1:05d}.safetensors" for number in range(2, LAYERS + 1, 2)}
    assert conversion.ktconvert("resume", tmp_path / "out", "--executor", "threads", env=environment).returncode == 0
    assert weights(tmp_path / "out") == expected


def test_faults_of_the_network_are_survived(hub, environment, expected, tmp_path) -> None:
    plan = (*stream(tmp_path / "out"), "--dry-run")
    assert conversion.ktconvert(*plan, env=environment).returncode == 0  # headers are in the cache from now on
    hub.faults += ["503", "429", "reset", "short", "flip"]
    done = conversion.ktconvert(*stream(tmp_path / "out"), env=environment, program=hub_server.SHORT_WAITS)
    assert done.returncode == 0, done.stderr
    assert hub.faults == [] and weights(tmp_path / "out") == expected


def test_a_lasting_fault_ends_with_one_sentence_and_loses_nothing(hub, environment, expected, tmp_path) -> None:
    assert conversion.ktconvert(*stream(tmp_path / "out"), "--dry-run", env=environment).returncode == 0
    hub.faults += ["403"] * 100
    conversion.check_refusal(
        conversion.ktconvert(*stream(tmp_path / "out"), env=environment), 5, NAME, ".safetensors: cannot be read", "403"
    )
    hub.faults.clear()
    assert conversion.ktconvert(*stream(tmp_path / "out"), env=environment).returncode == 0
    assert weights(tmp_path / "out") == expected


def test_wrong_bytes_stop_the_run_and_name_the_file(hub, environment, expected, tmp_path) -> None:
    """The hub states the SHA-256 of each file; layers of other files are kept."""
    assert conversion.ktconvert(*stream(tmp_path / "out"), "--dry-run", env=environment).returncode == 0
    damaged = f"model-00004-of-{LAYERS + 1:05d}.safetensors"
    hub.flipped.add(damaged)
    done = conversion.ktconvert(*stream(tmp_path / "out"), env=environment)
    conversion.check_refusal(done, 5, NAME, f"{damaged}: its SHA-256 is ", "but the hub states ")
    hub.flipped.clear()
    finished = {path.name.split(".")[1] for path in (tmp_path / "out.work" / "store").iterdir()}
    assert finished >= {"layer-000", "layer-001", "layer-002"} and "layer-003" not in finished
    assert conversion.ktconvert("resume", tmp_path / "out", env=environment).returncode == 0
    assert weights(tmp_path / "out") == expected


def test_parts_of_files_are_enough_without_files_ahead(hub, environment, model, expected, tmp_path) -> None:
    options = (*stream(tmp_path / "out"), "--stream-ahead", "0")
    plan = read_plan(conversion.ktconvert(*options, "--dry-run", "--json", env=environment))
    assert plan["download"] == {
        "bytes": plan["bytes_in"],
        "files": [],
        "parts_bytes": plan["bytes_in"],
        "peak_bytes": 0,
    }
    hub.requests.clear()
    assert conversion.ktconvert(*options, env=environment).returncode == 0
    assert weights(tmp_path / "out") == expected
    assert_fetched_once(hub)


def assert_fetched_once(hub: Hub) -> None:
    """Require that no byte of the weights was requested twice, not even of the experts whose error is measured."""
    spans: dict[str, list[list[int]]] = {}
    for _, path, span in hub.requests:
        if path.endswith(".safetensors") and span:
            spans.setdefault(path, []).append([int(number) for number in span.removeprefix("bytes=").split("-")])
    assert spans
    for of_file in spans.values():
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(sorted(of_file)))


def read_plan(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = next(
        event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "plan"
    )
    return plan


NEEDS = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True).map(tuple), max_size=9)


@given(needs=NEEDS, ahead=st.integers(1, 4))
def test_a_window_has_the_files_of_a_reader_and_the_next_ones(needs: list[tuple[str, ...]], ahead: int) -> None:
    for number, (own, window) in enumerate(zip(needs, plan_windows(needs, ahead), strict=True)):
        later = [name for names in needs[number + 1 :] for name in names if name not in own]
        assert window == (*own, *[*dict.fromkeys(later)][:ahead])


@settings(deadline=None, max_examples=30)
@given(needs=NEEDS, ahead=st.integers(1, 4))
def test_readers_that_overlap_find_their_files_within_the_planned_space(
    needs: list[tuple[str, ...]], ahead: int
) -> None:
    size = 4 * mmap.PAGESIZE
    files = {name: RemoteFile(name, size, hashlib.sha256(WEIGHTS[:size]).hexdigest()) for name in "abcdefgh"}
    peak = max((len(window) for window in plan_windows(needs, ahead)), default=0) * size
    with conversion.memory_folder(Path(tempfile.mkdtemp())) as folder:
        fetched = remote.RemoteFiles(Commit(FileSystem(), NAME, "0" * 40), folder)
        whole = WholeFiles(fetched, files, needs, ahead)

        def read(number: int) -> None:
            with whole.hold(number):
                for name in needs[number]:
                    fetched.release(name, 0, size)
                    assert fetched.view(name, size, 0, size).tobytes() == WEIGHTS[:size]
                assert fetched.held_bytes <= peak

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, range(len(needs))))
        assert fetched.held_bytes == 0
        planned = len([*list_fetches(plan_windows(needs, ahead))])
        assert fetched.fetched_bytes <= size * planned  # readers that overlap may skip a window
        whole.close()
        fetched.close()


def test_the_disk_holds_as_many_files_as_planned(hub, environment, model, expected, tmp_path) -> None:
    """Files are fetched in the planned order; the process's files without a name never exceed the planned peak."""
    with conversion.memory_folder(tmp_path) as folder:
        options = (*stream(folder / "out"), "--stream-ahead", "2")
        download = read_plan(conversion.ktconvert(*options, "--dry-run", "--json", env=environment))["download"]
        shards = sorted(model.glob("*.safetensors"))[:LAYERS]
        assert download["files"] == [{"name": path.name, "bytes": path.stat().st_size} for path in shards]
        assert download["peak_bytes"] == sum(sorted(path.stat().st_size for path in shards)[-3:])
        hub.requests.clear()
        hub.rate = 2_000_000
        process = subprocess.Popen([*conversion.KTCONVERT, *options], env=os.environ | environment, stderr=-3)
        held = [0]
        while process.poll() is None:
            held.append(measure_nameless_files(process.pid))
            time.sleep(0.01)
        assert process.returncode == 0 and weights(folder / "out") == expected
        sent = [path.rsplit("/", 1)[1] for method, path, span in hub.requests if method == "GET" and span]
        assert [*dict.fromkeys(sent)] == [path.name for path in shards]
        assert max(held) == 3 * -(-download["peak_bytes"] // 3 // mmap.PAGESIZE) * mmap.PAGESIZE


def measure_nameless_files(pid: int) -> int:
    """Return the disk space of the files that a process has open and that have no name."""
    blocks: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                status = link.stat()
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killpoint.build(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_killed_conversion_resumes_with_the_same_bytes(hub, environment, expected, shim, tmp_path, kills) -> None:
    """A resumed run fetches only what unfinished files need."""
    output = tmp_path / "out"
    for point in conversion.choose_kill_points(120, kills):
        command = [*conversion.KTCONVERT, *stream(output)]
        killpoint.run(command, output, point, shim, env=environment)
    sent, finished = hub.sent, len(list(output.with_name("out.work").glob("store/*"))) or LAYERS
    done = conversion.ktconvert(*stream(output), env=environment)
    assert done.returncode == 0, done.stderr
    assert weights(output) == expected and finished
    layer_bytes = sum(len(data or b"") for data in expected.values()) * 2 // LAYERS
    assert hub.sent - sent <= 1.2 * layer_bytes * (LAYERS + 1)


def test_a_killed_conversion_resumes_with_the_map_and_the_same_bytes(
    hub, environment, model, shim, monkeypatch, tmp_path
) -> None:
    """It is killed while it fetches samples, while it records the map, and twice while it fetches the weights."""
    done = conversion.ktconvert("cpu", "-i", model, "-o", tmp_path / "local", *CHOOSE_MAP)
    assert done.returncode == 0, done.stderr
    output, draw = tmp_path / "out", conversion.seeded_random().randint
    command = ("cpu", "-i", NAME, "-o", str(output), *CHOOSE_MAP, "--stream")

    def kill(answer: int = 0, change: int = 0) -> None:
        """Kill a run when it gets this answer of the hub, or before it makes this change."""
        answers = itertools.count(1)
        preload = killpoint.signal_environment(shim, output, change, signal.SIGKILL)
        process = subprocess.Popen([*conversion.KTCONVERT, *command], env=os.environ | environment | preload)
        monkeypatch.setattr(hub, "wait", lambda _: next(answers) == answer and process.kill())
        assert process.wait() == killpoint.KILLED

    assert conversion.ktconvert(*command, "--dry-run", env=environment).returncode == 0  # which fetches headers
    kill(answer=draw(6, 25))
    kill(change=draw(2, 20))
    kill(answer=draw(6, 20))
    kill(answer=draw(6, 8))
    assert conversion.ktconvert(*command, env=environment).returncode == 0
    assert weights(output) == weights(tmp_path / "local")
    maps = [
        json.loads((tmp_path / name / "manifest.json").read_bytes())["model"]["methods"] for name in ("out", "local")
    ]
    assert maps[0] == maps[1]


def test_a_model_that_changes_on_the_hub_stops_the_run(
    hub, environment, model, expected, shim, monkeypatch, tmp_path
) -> None:
    """The hub states the hash of each file: with the same sizes and headers, other weights are another input."""
    shutil.copytree(model, tmp_path / "model")
    hub.models[NAME] = tmp_path / "model"
    output = tmp_path / "out"
    command = [*conversion.KTCONVERT, *stream(output)]
    assert killpoint.run(command, output, 60, shim, env=environment).returncode == killpoint.KILLED
    for shard in (tmp_path / "model").glob("*.safetensors"):
        conversion.flip_bit(shard)
    monkeypatch.setattr(hub_server, "COMMIT", "f" * 40)
    done = conversion.ktconvert(*stream(output), env=environment)
    conversion.check_refusal(done, 5, f"{NAME} is not the input of {output}", "the content of model-00001-of-00012")
    monkeypatch.undo()
    hub.models[NAME] = model
    done = conversion.ktconvert(*stream(output), "--revision", hub_server.COMMIT, env=environment)
    assert done.returncode == 0, done.stderr
    assert weights(output) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--verify-inputs",), "which does not work with --verify-inputs"),
        (("--scale", "gptq", "--dataset", "x.txt"), "which does not work with GPTQ"),
        (("--executor", "dask:local"), "which does not work with workers in other processes"),
        (("--quant-method", "int4,int8"), "--stream would fetch the weights once per output"),
    ],
)
def test_stream_refuses_what_reads_weights_elsewhere_or_again(options, reason, environment, tmp_path) -> None:
    (tmp_path / "x.txt").write_text("text")
    done = conversion.ktconvert(*stream(tmp_path / "out"), *options, env=environment, cwd=tmp_path)
    conversion.check_refusal(done, 2, reason)


def test_a_full_disk_ends_with_one_sentence(environment, expected, tmp_path) -> None:
    """The second write to a file without a name fails."""
    full = shims.build(tmp_path, "full", Path(shims.__file__).with_name("full.c").read_text())
    folder = tmp_path / "o"
    folder.mkdir()
    disk = {**shims.preload_environment(full), "FULL_ROOT": f"{folder}/#", "FULL_N": "2"}
    done = conversion.ktconvert(*stream(folder / "out"), env=environment | disk)
    conversion.check_refusal(done, 4, str(folder), "No space left on device")
    assert conversion.ktconvert(*stream(folder / "out"), env=environment).returncode == 0
    assert weights(folder / "out") == expected


@pytest.mark.parametrize("command", ["fetch", "cpu"])
def test_a_directory_needs_no_hub_and_has_no_revision(command, model, tmp_path) -> None:
    """Weights that are here can be hashed."""
    options = ("--stream",) if command == "cpu" else ()
    words = (command, model, tmp_path / "out", *options, "--verify-inputs")
    done = conversion.ktconvert(*words)
    assert done.returncode == 0, done.stderr
    done = conversion.ktconvert(command, model, tmp_path / "other", *options, "--revision", "main")
    conversion.check_refusal(done, 2, "--revision main", "is a local path")


def test_fetch_gets_what_is_no_expert(hub, environment, model, tmp_path) -> None:
    """The output is verified against the model, and much smaller parts of the files were sent."""
    done = conversion.ktconvert("fetch", NAME, "-o", tmp_path / "rest", env=environment)
    assert done.returncode == 0, done.stderr
    tensors = {entry.name for path in (tmp_path / "rest").glob("*.safetensors") for entry in read_header(path).entries}
    everything = {entry.name for path in model.glob("*.safetensors") for entry in read_header(path).entries}
    assert tensors == {name for name in everything if ".experts." not in name}
    assert (tmp_path / "rest" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    done = conversion.ktconvert("verify", tmp_path / "rest", "--against", model)
    assert done.returncode == 0, done.stdout + done.stderr


def test_fetch_refuses_experts_alone(model, tmp_path) -> None:
    converted = tmp_path / "converted"
    assert conversion.ktconvert("cpu", model, converted, "--quant-method", "rawint4").returncode == 0
    refused = conversion.ktconvert("fetch", converted, "-o", tmp_path / "rest")
    conversion.check_refusal(refused, 5, "contains converted experts, not a model; give the model")


def test_fetch_adds_the_experts_of_a_mask(environment, model, tmp_path) -> None:
    mask = np.zeros((LAYERS, EXPERTS), np.bool_)
    mask[3, 1] = True
    (tmp_path / "mask.safetensors").write_bytes(mask_file(mask))
    command = ("fetch", model, "-o", tmp_path / "rest", "--gpu-experts-mask", tmp_path / "mask.safetensors")
    done = conversion.ktconvert(*command)
    assert done.returncode == 0, done.stderr
    names = {entry.name for path in (tmp_path / "rest").glob("*.safetensors") for entry in read_header(path).entries}
    assert {name for name in names if ".experts." in name} == {
        f"model.layers.3.mlp.experts.1.{projection}_proj.weight" for projection in ("gate", "up", "down")
    }
    described = conversion.ktconvert("inspect", tmp_path / "rest")
    assert "made by       ktconvert" in described.stdout and "complete      yes" in described.stdout
    refused = conversion.ktconvert("cpu", tmp_path / "rest", tmp_path / "out")
    conversion.check_refusal(refused, 5, "`ktconvert fetch` left out experts; give the complete model")
    (tmp_path / "mask.safetensors").write_bytes(mask_file(mask[1:]))
    shutil.rmtree(tmp_path / "rest")
    conversion.check_refusal(
        conversion.ktconvert(*command), 2, "mask.safetensors: is [10, 2]", "11 layers of 2 experts"
    )
