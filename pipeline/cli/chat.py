"""The chat of `ktconvert run`: its messages, commands and history."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from ktconvert.layouts.errors import InputError, UsageError

HELP = '''\
/help          Show this help.
/new           Begin a new chat, with the same system message.
/system TEXT   Begin a new chat with this system message, or without one.
/exit          End, as Ctrl-D does. Ctrl-C stops an answer, or drops the line.
A line that ends with \\ continues on the next one. A line """ begins and ends a message of several lines.
The arrow keys recall earlier lines, also those of earlier chats.'''
UNKNOWN_COMMAND = re.compile(r"/[a-z]+( [^\n]*)?")  # not a path, which has a second slash
QUOTES = '"""'
HISTORY_LINES = 1000


@dataclass
class Conversation:
    """A chat with a model.

    system    the system message
    messages  all messages, in the form that chat templates read
    """

    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def add(self, role: str, content: str) -> None:
        """Add a message, after the system message if it is the first one."""
        if not self.messages and self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": role, "content": content})

    def restart(self, system: str | None) -> None:
        """Forget all messages, and use this system message."""
        self.system = system
        self.messages = []


def answer_messages(system: str | None, answer: Callable[[list[dict[str, str]]], str]) -> None:
    """Answer the messages on stdin until its end or /exit.

    answer  prints the model's answer to a chat and returns it

    Raises InputError if stdin is not UTF-8.
    """
    chat = Conversation(system)
    with _keep_history():
        for text in _read_messages():
            command, _, argument = text.strip().partition(" ")
            if command == "/exit":
                return
            if command == "/help":
                click.echo(HELP, err=True)
            elif command == "/new":
                chat.restart(chat.system)
            elif command == "/system":
                chat.restart(argument.strip() or None)
            elif UNKNOWN_COMMAND.fullmatch(text.strip()):
                click.echo(f"unknown command {command}; /help lists the commands", err=True)
            elif command:
                chat.add("user", text)
                try:
                    chat.add("assistant", answer(chat.messages))
                except KeyboardInterrupt:
                    if not sys.stdin.isatty():
                        raise
                    chat.messages.pop()
                    click.echo("\nstopped; the model forgets this message", err=True)
                except UsageError as error:
                    chat.messages.pop()
                    click.echo(f"{error.text}; the model forgets this message (/new begins a new chat)", err=True)


def _read_messages() -> Iterator[str]:
    """Yield the messages and commands of stdin. On a terminal, Ctrl-C drops a message."""
    while True:
        try:
            message = _read_message()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo("\n(/exit or Ctrl-D ends)", err=True)
            continue
        if message is None:
            return
        yield message


def _read_message() -> str | None:
    """Return the next message or command of stdin, or None at its end, also at one within a message."""
    line = _read_line("> ")
    if line is None:
        return None
    lines = []
    if line.strip() == QUOTES:
        while (line := _read_line("... ")) is not None and line.strip() != QUOTES:
            lines.append(line)
        return None if line is None else "\n".join(lines)
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = _read_line("... ") or ""
    return "\n".join([*lines, line])


def _read_line(prompt: str) -> str | None:
    """Return a line of stdin, or None at its end. Raises InputError if it is not UTF-8."""
    try:
        line = input(prompt if sys.stdin.isatty() else "")
        line.encode()  # some locales make Python accept any byte
    except EOFError:
        return None
    except UnicodeError as error:
        raise InputError("standard input is not UTF-8 text; convert it first") from error
    return line


@contextmanager
def _keep_history() -> Iterator[None]:
    """Let input() edit lines and remember them, in a file that only this user can read, if stdin is a terminal."""
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ktconvert" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
            file.chmod(0o600)
