"""What survives a power cut: nothing counts, and nothing appears, before it was synced."""

from pathlib import Path
from typing import Any

import pytest

from rig.bench import CONVERSIONS


class Disk:
    """What would be left of the calls so far if the power went now: names and contents count once they were synced."""

    def __init__(self) -> None:
        self.contents: set[str] = set()  # files whose content was not synced
        self.names: set[str] = set()  # entries of folders that were not synced

    def apply(self, call: Any) -> None:
        name, path, second = call
        match name:
            case "open":
                self.names.add(path)
                self.contents.add(path)
            case "write" | "pwrite" | "ftruncate" | "posix_fallocate":
                self.contents.add(path)
            case "mkdir":
                self.names.add(path)
            case "link":
                self.names.add(second)
                if path in self.contents:
                    self.contents.add(second)
            case "rename":
                for known in (self.contents, self.names):
                    for old in [p for p in known if p == path or p.startswith(f"{path}/")]:
                        known.discard(old)
                        known.add(second + old.removeprefix(path))
                self.names.add(second)
            case "fsync":
                self.contents.discard(path)
                self.names = {p for p in self.names if str(Path(p).parent) != path}
            case "syncfs":
                self.contents.clear()
                self.names.clear()
            case "unlink" | "unlinkat" | "rmdir":
                self.contents.discard(path)
                self.names.discard(path)

    def unsafe(self, below: str) -> set[str]:
        """What of this file or folder would be lost, the names above it too."""
        above = {below, *(str(p) for p in Path(below).parents)}
        return {p for p in self.contents | self.names if p in above or p.startswith(f"{below}/")} - {"."}


@pytest.mark.parametrize("over", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("which", CONVERSIONS)
def test_nothing_counts_before_it_is_durable(bench, which, over):
    if over:
        assert bench.begin(which).returncode == 0
    assert bench.begin(which, *(["--overwrite"] if over else [])).returncode == 0
    disk, stored, recorded, appeared = Disk(), [], 0, 0
    base = str(bench.output.parent)
    for call in bench.calls():
        call = call._replace(path="." if call.path == base else call.path)
        if call.name == "rename" and call.second.startswith("out.work/store/"):
            assert disk.unsafe(call.path) <= {call.path, "out.work/partial"}, f"{call.path} is published, not synced"
            assert call.path not in disk.contents
            stored.append(call.second)
        if call[:2] in (("pwrite", "out.work/journal.jsonl"), ("write", "out.work/journal.jsonl")):
            for unit in stored:
                assert disk.unsafe(unit) == set(), f"{unit} may be recorded before it is durable"
        if call.name in ("rename", "renameat2") and call.second == "out":
            if over and call.name == "rename":
                continue  # refused, since something lies there; then the two are swapped
            assert disk.unsafe("out.work/out") - {"out.work/out"} == set()
            recorded, appeared = len(stored), appeared + 1
            call = call._replace(name="rename")
        if call.name in ("unlink", "unlinkat", "rmdir") and appeared:
            assert disk.unsafe("out") == set(), "the work folder is removed before the output is durable"
        disk.apply(call)
    assert appeared == 1
    assert recorded == len(stored) > 0
    assert disk.unsafe("out") == set()


@pytest.mark.parametrize("which", CONVERSIONS)
def test_where_files_move_in_the_index_comes_last(bench, which):
    """An output that is a link to a folder cannot be renamed to."""
    real = bench.output.with_name("out-real")
    real.mkdir()
    bench.output.symlink_to(real)
    assert bench.begin(which).returncode == 0
    seen = False
    disk, last = Disk(), "manifest.json" if which == "loose" else "model.safetensors.index.json"

    def ours() -> set[str]:
        return {name for name in disk.unsafe("out-real") if ".ktconvert" not in name}

    for call in bench.calls():
        if call.name == "rename" and call.second == f"out-real/{last}":
            seen = True
            assert ours() == set(), "the index comes before what it names is durable"
        disk.apply(call)
    assert seen
    assert ours() == set()
