"""Has a scheduler give the tasks that need a GPU to the workers that have one (`kinds.py`).

It is a plugin of the scheduler, and looks at each task once, when its graph comes. Only names are read:
nothing of a user's is imported, called or compared.

*Invariant:* a task of which the user has said where it is to run is as the user wants it, and so is one at
which looking fails.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import dask.utils
from distributed import Scheduler, SchedulerPlugin

from cuda_cluster_dask import internals, kinds

logger = logging.getLogger("distributed.scheduler")

#: What a task needs that is for GPU workers alone. It takes none of it: a task that waits for others
#: (`distributed.secede`) would keep it, and they might wait for it.
ON_GPU = {"GPU": 0}

#: Most things in one task that are looked at.
MOST = 256

#: Where packages are installed: their functions may name a GPU's only to be open to it.
INSTALLED = ("site-packages", "dist-packages")

#: Packages that say nothing of what their functions are used for.
OPEN_TO_ALL = kinds.ON_HOST | frozenset("dask distributed functools operator toolz tlz cytoolz".split())

NAMED = (FunctionType, BuiltinFunctionType, MethodDescriptorType, type)


class ByKind(SchedulerPlugin):
    """Restricts new tasks, and remembers whose results are in a GPU's memory."""

    name = "cuda-cluster-by-kind"

    def __init__(self) -> None:
        # By `TaskState.__weakref__`, which is there for such uses: what Dask forgets is gone here, too.
        self._on_device: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_failed = False

    def update_graph(self, scheduler: Scheduler, *, tasks: Iterable[Any], **_: Any) -> None:
        try:
            known = map(scheduler.tasks.get, tasks)
            # Others run already, or did.
            new = {ts for ts in known if ts is not None and is_new(ts)}
            look = Look()
            for ts in dependencies_first(new):
                self._place(ts, look)
        except Exception:
            self._tell_once()

    def _place(self, ts: Any, look: Look) -> None:
        try:
            modules, functions = look.into(ts.run_spec), look.results_come_from(ts.run_spec)
            kind = kinds.kind(modules, functions, map(self._is_on_device, ts.dependencies))
        except Exception:
            self._tell_once()
            return
        if kind.on_device:
            self._on_device.add(ts)
        if kind.needs_gpu and not is_restricted(ts):
            ts.resource_restrictions = dict(ON_GPU)

    def _is_on_device(self, ts: Any) -> bool:
        # What a worker has said of the result goes before what was expected.
        told = kinds.is_on_device(ts.type)
        return ts in self._on_device if told is None else told

    def _tell_once(self) -> None:
        if not self._has_failed:
            logger.warning("Some tasks are placed as Dask does, whatever they need", exc_info=True)
            self._has_failed = True


def is_new(ts: Any) -> bool:
    """Whether a task is to be run, and nothing has been decided about it."""
    return ts.state == "released" and ts.run_spec is not None


def is_restricted(ts: Any) -> bool:
    """Whether somebody has said where a task is to run; no resources at all is said, too."""
    restrictions = (ts.resource_restrictions, ts.worker_restrictions, ts.host_restrictions)
    return any(one is not None for one in restrictions)


def dependencies_first(tasks: set[Any]) -> Iterator[Any]:
    """Each of some tasks after those that it takes results of. Their priorities may be anything."""
    done: set[Any] = set()
    for task in tasks:
        todo = [task]
        while todo:
            if todo[-1] in done:
                todo.pop()
                continue
            before = [one for one in todo[-1].dependencies if one in tasks and one not in done]
            if before:
                todo += before
                continue
            done.add(todo[-1])
            yield todo.pop()


class Look:
    """Finds the names in tasks; of those that one graph's have in common only once."""

    def __init__(self) -> None:
        self._task, self._data = internals.task_nodes()
        self._functions: dict[int, frozenset[str]] = {}
        #: Types that say nothing.
        self._of_none: set[type] = set()

    def into(self, spec: Any) -> set[str]:
        """The modules of what is in a task, but for those that have nothing to do with a GPU."""
        modules: set[str] = set()
        todo, left = [spec], MOST
        while todo and left:
            one, left = todo.pop(), left - 1
            # Not `isinstance`, which asks the object itself.
            of = type(one)
            if of in self._of_none:
                continue
            if issubclass(of, self._task):
                todo += islice(one.args, left)
                todo += islice(one.kwargs.values(), left)
                todo.append(one.func)
            elif issubclass(of, self._data):
                todo.append(one.value)
            elif of is dict:
                todo += islice(one.values(), left)
            elif of in (list, tuple, set, frozenset):
                todo += islice(one, left)
            elif of is partial:
                todo += (*islice(one.args, left), *islice(one.keywords.values(), left), one.func)
            elif of is MethodType:
                todo += (one.__self__, one.__func__)
            elif issubclass(of, NAMED):
                modules |= self._of_function(one)
            else:
                module = _module_of(one)
                if kinds.root(module) in OPEN_TO_ALL:
                    self._of_none.add(of)
                else:
                    modules.add(module)
        return modules

    def _of_function(self, function: Any) -> frozenset[str]:
        # Those of a graph are all there as long as this is.
        known = self._functions.get(id(function))
        if known is None:
            known = self._functions[id(function)] = frozenset(
                module for module in _modules(function) if kinds.root(module) not in kinds.ON_HOST
            )
        return known

    def results_come_from(self, spec: Any) -> Iterator[str]:
        """The names of the functions that a task's result comes from, as far as they matter."""
        for own in self._own(spec):
            yield from _to_host(own)

    def _own(self, spec: Any) -> Iterator[Any]:
        """The functions that a task's result comes from: its own, or those that it hands to Dask's."""
        while issubclass(type(spec), self._task):
            # One that is several has a graph, and the key of the one that has the result.
            graph, key = (*spec.args, None, None)[:2]
            last = graph.get(key) if type(graph) is dict and _is_key(key) else None
            if not issubclass(type(last), self._task):
                break
            spec = last
        if not issubclass(type(spec), self._task):
            return
        own = _inner(spec.func)
        yield own
        if kinds.root(_module_of_function(own)) == "dask":
            for one in islice((*spec.args, *spec.kwargs.values()), MOST):
                if issubclass(type(one), (partial, *NAMED, dask.utils.methodcaller)):
                    yield _inner(one)


def _is_key(one: Any) -> bool:
    return type(one) is str or type(one) is tuple and all(map(_is_key_or_number, one))


def _is_key_or_number(one: Any) -> bool:
    return type(one) in (int, float, bytes) or _is_key(one)


def _inner(function: Any) -> Any:
    while type(function) is partial:
        function = function.func
    return function


def _module_of(one: Any) -> str:
    """The module of an object's type."""
    module = type(one).__module__
    if not isinstance(module, str):
        return ""
    if module.startswith("_cython"):
        module = getattr(one, "__module__", "")
    elif kinds.root(module) == "torch" and getattr(one, "is_cuda", False) is True:
        module = "torch.cuda"
    return module if isinstance(module, str) else ""


def _module_of_function(function: Any) -> str:
    if not issubclass(type(function), NAMED):
        return _module_of(function)
    if isinstance(function, MethodDescriptorType):
        function = function.__objclass__
    module = function.__module__
    return module if isinstance(module, str) else ""


def _modules(function: Any) -> Iterator[str]:
    """The module of a function or a class, and those of what a user's function names."""
    module = _module_of_function(function)
    yield module
    if isinstance(function, BuiltinFunctionType) and not isinstance(function.__self__, ModuleType):
        yield _module_of(function.__self__)
    if not _is_users(function):
        return
    for name in _names(function.__code__):
        if name in kinds.PACKAGES:
            yield name  # It imports it.
        elif name in function.__globals__:
            value = function.__globals__[name]
            yield value.__name__ if isinstance(value, ModuleType) else _module_of_function(value)


def _is_users(function: Any) -> bool:
    """Whether a function is the user's own, not one of an installed package."""
    if not isinstance(function, FunctionType) or kinds.root(_module_of_function(function)) in OPEN_TO_ALL:
        return False
    return not any(folder in function.__code__.co_filename for folder in INSTALLED)


def _names(code: CodeType) -> set[str]:
    """The names that a function uses, and those in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _to_host(function: Any) -> set[str]:
    """By which names a function may bring its result to the host."""
    if isinstance(function, dask.utils.methodcaller):
        return {function.method}
    if isinstance(function, operator.methodcaller):
        # With keywords the class is a partial, which has the name.
        made: Any = function.__reduce__()
        kind, arguments = made
        return {(*getattr(kind, "args", ()), *arguments)[0]}
    module = _module_of_function(function)
    if kinds.is_of_gpu(module):
        name = getattr(function, "__name__", None)
        return {name} if isinstance(name, str) else set()
    if _is_users(function):
        return _names(function.__code__) & kinds.SURELY_TO_HOST
    return set()


def add(scheduler: Scheduler, asked: bool) -> None:
    """Has a scheduler place tasks by what they need, if that is asked for. A line in its log if this Dask
    does not allow it."""
    if not asked:
        return
    try:
        Look()
    except ImportError as error:
        logger.warning("Tasks are placed as Dask does, whatever they need: %s", error)
        return
    scheduler.add_plugin(ByKind())
