"""The process that holds a lock or makes a unit: which one it is, and whether it still runs."""

from __future__ import annotations

import os

from msgspec import Struct

from ktconvert.layouts.files.documents import Number
from ktconvert.native_quant import machine

UNNAMED = {"localhost", "localhost.localdomain", "(none)"}  # names that several machines may have


class Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """A process among all that ever ran on any host. start: machine.process_start, since numbers come again."""

    pid: Number
    host: str
    boot: str
    start: Number
    namespace: str

    @classmethod
    def this(cls) -> Holder:
        """The process that calls."""
        pid = os.getpid()
        return cls(pid, machine.host(), machine.boot_id(), machine.process_start(pid), machine.pid_namespace())

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    def lives(self) -> bool | None:
        """Whether it still runs; None where that cannot be told: on another host, or in a container of its own."""
        if self.host != machine.host():
            return None
        if self.boot != machine.boot_id():
            return None if self.host in UNNAMED else False
        if self.namespace != machine.pid_namespace():
            return None
        return machine.process_alive(self.pid, self.start)
