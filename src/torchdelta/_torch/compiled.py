"""Compiled code: the three doors to it, what is kept out of it, whether it runs. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torchdelta._torch.doors import patch_when_imported, replace

_COMPILED_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"
InputsOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]
# Called before a compiled function runs, with that function (None if unknown) and its arguments, in tuples, lists and
# dicts. Returns a callable to run after it, or None. If it raises, the compiled function is not called.
Begin = Callable[[Any, Any], Callable[[], None] | None]


def _inputs_of_backward(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Return the inputs of `call_func_at_runtime_with_args(function, inputs, ...)`."""
    return args[1]


def _inputs_of_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the inputs of `OptimizedModule.__call__(module, *args, **kwargs)`."""
    return (args[1:], kwargs)


def patch_compiled_call(make: Callable[[Callable[..., Any], InputsOf], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the two doors to compiled code by `make(original, inputs_of)`; returns what undoes it.

    The doors are `OptimizedModule.__call__` (a module that `torch.compile` returned) and the function through which
    AOTAutograd calls a compiled backward; `inputs_of(args, kwargs)` returns what a call hands to the compiled code, in
    tuples, lists and dicts. Importing their modules costs a second, so where nobody has done it yet the patch waits for
    whoever does.
    """

    def patch_backward(module: Any) -> Callable[[], None] | None:
        if not hasattr(module, "call_func_at_runtime_with_args"):
            return None
        return replace(module, "call_func_at_runtime_with_args", lambda original: make(original, _inputs_of_backward))

    def patch_module(module: Any) -> Callable[[], None] | None:
        return replace(module.OptimizedModule, "__call__", lambda original: make(original, _inputs_of_module))

    undo_backward = patch_when_imported(_COMPILED_RUNTIME, patch_backward)
    undo_module = patch_when_imported("torch._dynamo.eval_frame", patch_module)

    def undo() -> None:
        undo_backward()
        undo_module()

    return undo


class _Hooks:
    """What a compiling context calls before and after each call: its own list, and one more function.

    The list itself stays as it is: it outlives the patch, and may be pickled with a compiled module.
    """

    def __init__(self, own: list[Any], enter: Callable[[], Callable[[], None]]) -> None:
        self._own = own
        self._enter = enter

    def __iter__(self) -> Iterator[Any]:
        yield self._enter
        yield from self._own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def patch_compiled_functions(begin: Begin) -> Callable[[], None]:
    """Call `begin` before each call of a function that `torch.compile` returned; returns what undoes it.

    Dynamo notes which dispatch keys are on when such a call begins, and restores them when it ends: a mode that comes
    or goes meanwhile leaves the thread unable to run any op. What must come or go has to do so in `begin`.
    `is_in_compiled_call` tells whether such a call runs.
    """

    def enter(function: Any, inputs: Any) -> Callable[[], None]:
        call = _Call()
        try:
            for each in (*_noted, begin):
                end = each(function, inputs)
                if end is not None:
                    call.ends.callback(end)
        except BaseException:
            call()
            raise
        _calls.num_running = getattr(_calls, "num_running", 0) + 1
        call.ends.callback(_leave)
        return call

    def hooks_of(context: Any) -> _Hooks:
        # The frame that asks is that of the wrapper around `fn`, which was called with `args` and `kwargs`.
        names = sys._getframe(1).f_locals
        inputs = (names.get("args", ()), names.get("kwargs", {}))
        return _Hooks(vars(context)["enter_exit_hooks"], functools.partial(enter, names.get("fn"), inputs))

    # Each context keeps its list under the name of the property, and calls what is in it before it looks at the keys.
    hooks = property(hooks_of, lambda context, own: vars(context).__setitem__("enter_exit_hooks", own))

    def patch(module: Any) -> Callable[[], None]:
        kind = module._TorchDynamoContext
        kind.enter_exit_hooks = hooks

        def undo() -> None:
            if vars(kind).get("enter_exit_hooks") is hooks:
                del kind.enter_exit_hooks

        return undo

    return patch_when_imported("torch._dynamo.eval_frame", patch)


def note_compiled_calls(begin: Begin) -> Callable[[], None]:
    """Call one more `begin` before each such call of any thread; returns what undoes it.

    Only while the patch of `patch_compiled_functions` is on.
    """
    _noted.append(begin)
    return lambda: _noted.remove(begin)


class _Call:
    """Ends what began before a call of a compiled function; also if torch drops it instead of calling it.

    It does so where it raises an error of its own after the call, such as that `fullgraph=True` compiled nothing.
    """

    def __init__(self) -> None:
        self.ends = contextlib.ExitStack()  # calls all of them, even if one raises

    def __call__(self) -> None:
        self.ends.close()

    def __del__(self) -> None:
        self.ends.close()


def _leave() -> None:
    _calls.num_running -= 1


def is_in_compiled_call() -> bool:
    """Return whether this thread runs a call of a function that `torch.compile` returned."""
    return getattr(_calls, "num_running", 0) > 0


_calls = threading.local()
_noted: list[Begin] = []


def keep_out_of_compiled_code(package: str) -> Callable[[], None]:
    """Have Dynamo run the functions of a package as they are, and never compile them; returns what undoes it.

    Where Dynamo leaves a frame as it is, as those of `torch.nn`, it still looks at every Python function that is called
    below, saved-tensor hooks among them. The rule stays after the undoing if Dynamo has been imported by then.
    """

    def add_rule(rules: Any) -> None:
        if package not in _kept_out:
            _kept_out.add(package)
            rules.add(package)

    return patch_when_imported("torch._dynamo.trace_rules", add_rule)


_kept_out: set[str] = set()
_region_codes: set[Any] = set()


def is_in_compiled_region() -> bool:
    """Return whether the running op comes from compiled code.

    A compiled function calls kernels that are dispatched among kernels that are not.

    Costs a walk up the stack, but only in a process that has compiled something.
    """
    if not getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0):
        return False
    if not _region_codes:
        module = sys.modules.get(_COMPILED_RUNTIME)
        _region_codes.update(_codes_named("runtime_wrapper", module))
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _region_codes:
            return True
        frame = frame.f_back
    return False


def _codes_named(name: str, module: Any) -> set[Any]:
    """Return the code objects of all functions of this name in a module, nested ones too: closures share them."""
    found: set[Any] = set()
    stack = (
        [thing.__code__ for thing in vars(module).values() if hasattr(thing, "__code__")] if module is not None else []
    )
    stack += [
        method.__code__
        for thing in (vars(module).values() if module is not None else ())
        if isinstance(thing, type)
        for method in vars(thing).values()
        if hasattr(method, "__code__")
    ]
    while stack:
        code = stack.pop()
        if code.co_name == name:
            found.add(code)
        stack.extend(constant for constant in code.co_consts if hasattr(constant, "co_consts"))
    return found
