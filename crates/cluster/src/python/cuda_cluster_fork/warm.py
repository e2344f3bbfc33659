"""A process that has imported what the ranks of a program of Python need, and forks them.

It never runs the program: a rank does, as `__main__`, with the arguments, the paths and the end that
an executed one has.

*Invariant:* what a rank shows of itself (arguments, paths, tracebacks) has no part of this package.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.machinery
import io
import json
import os
import random
import runpy
import select
import sys
import types
from dataclasses import dataclass
from typing import Literal, NoReturn, TypedDict

from cuda_cluster_fork import birth, server
from cuda_cluster_fork.failure import StartFailure, describe
from cuda_cluster_fork.pipe import Pipe

#: The variable with the number of the status pipe's descriptor.
STATUS = "CUDA_CLUSTER_STATUS_FD"


class Settings(TypedDict):
    """What the server is told, in a file."""

    socket: str
    #: Modules to import.
    modules: list[str]
    #: How the program is named: by a file, a module, or its text.
    kind: Literal["file", "module", "code"]
    #: The place of that name among the words of the ranks' command.
    at: int
    #: The name.
    program: str


@dataclass
class Rank:
    """A rank's program, in the process that is to run it."""

    kind: Literal["file", "module", "code"]
    #: As the program sees them; the first names it.
    arguments: list[str]

    def run(self) -> None:
        """Runs the program as Python itself would: its end is this process's."""
        name, sys.argv = self.arguments[0], self.arguments
        if self.kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            return
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        if self.kind == "code":
            sys.argv = ["-c", *self.arguments[1:]]
            code = compile(name, "<string>", "exec")
        else:
            main.__file__ = name
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", name)
            code = compile(_text(name), name, "exec")
        sys.modules["__main__"] = main
        exec(code, main.__dict__)


def _text(path: str) -> bytes:
    """A program's text; if it can't be read, this process ends as Python does."""
    try:
        with io.open_code(path) as file:
            return file.read()
    except OSError as error:
        what = f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.orig_argv[0]}: {what}", file=sys.stderr)
        sys.exit(2)


class Waiting(Pipe):
    """The server's own status pipe, on which it is asked whether it lives."""

    def ready(self) -> None:
        self._tell(status="ready", address=None, peers=[])

    def answer(self) -> bool:
        """Answers a question; False if there is nobody who asks any more."""
        if self._descriptor is None or not os.read(self._descriptor, 64):
            return False
        self._tell(status="alive")
        return True

    @property
    def descriptor(self) -> int:
        return -1 if self._descriptor is None else self._descriptor


def serve(path: str) -> Rank:
    """Imports, then forks for every request, for ever. Returns in each forked process alone."""
    with open(path) as file:
        settings: Settings = json.load(file)
    os.set_inheritable(int(os.environ[STATUS]), False)
    status = Waiting(int(os.environ.pop(STATUS)))
    try:
        _load(settings, status)
        listener = server.listen(settings["socket"])
    except StartFailure as failure:
        print(f"error: {failure}", file=sys.stderr)
        status.failed(str(failure))
        sys.exit(1)
    birth.name("warm " + " ".join(settings["modules"]))
    # Objects that live on are not written to by collections, and stay shared.
    gc.collect()
    gc.freeze()
    status.ready()
    asked = select.poll()
    asked.register(listener, select.POLLIN)
    asked.register(status.descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in asked.poll()]
        if status.descriptor in ready and not status.answer():
            # The supervisor is gone, and this process with it.
            asked.unregister(status.descriptor)
        if listener.fileno() in ready:
            newborn = server.answer(listener)
            if newborn is not None:
                status.close()
                return _born(newborn, settings)


def _load(settings: Settings, status: Waiting) -> None:
    """Imports with the paths that the program has."""
    sys.path[0] = {
        "file": os.path.dirname(os.path.realpath(settings["program"])),
        "module": os.getcwd(),
        "code": "",
    }[settings["kind"]]
    for name in settings["modules"]:
        status.step(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:
            raise StartFailure(f"cannot import {name}: {describe(error)}") from error
    reason = server.unsafe()
    if reason is not None:
        raise StartFailure(f"the ranks cannot be forked: {reason}")


def _born(newborn: server.Newborn, settings: Settings) -> Rank:
    """Makes a forked process what the shim makes of an executed one, and returns its program."""
    newborn.wait_for_guardian()
    pipe = Pipe(newborn.status)
    try:
        orders = newborn.become(pipe)
        words = [os.fsdecode(word) for word in map(_bytes, orders["program"]["argv"])]
    except BaseException as error:
        _give_up(pipe, error)
    # As an executed program does: that is how it becomes READY.
    pipe.close()
    birth.name(" ".join(words))
    sys.excepthook = _without_this_package
    sys.orig_argv = words
    gc.unfreeze()
    random.seed()
    if "numpy.random" in sys.modules:
        # Else all ranks would draw the same numbers.
        sys.modules["numpy.random"].seed()
    return Rank(settings["kind"], words[settings["at"] :])


def _give_up(pipe: Pipe, error: BaseException) -> NoReturn:
    pipe.failed(str(error) if isinstance(error, StartFailure) else describe(error))
    os._exit(125)


def _bytes(word: str) -> bytes:
    """An argument as it is; 128 private characters stand for bytes that are no text
    (`os::argument` in Rust)."""
    return b"".join(
        bytes([ord(character) - 0x10FF80 + 0x80]) if ord(character) >= 0x10FF80 else character.encode()
        for character in word
    )


def _without_this_package(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Shows an error as Python does, from the program's own first line on."""
    own = os.path.dirname(os.path.abspath(__file__))
    first = frame = trace
    while frame is not None:
        if os.path.dirname(frame.tb_frame.f_code.co_filename) == own:
            first = frame.tb_next
        frame = frame.tb_next
    sys.__excepthook__(kind, error.with_traceback(first), first)
