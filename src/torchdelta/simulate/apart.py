"""Compiled code that its callers do not contain: they call it by a name, which stands for its address.

numba puts the code of everything that a function calls into that function's own, and optimizes all of it once more. A
simulation is two thousand instructions that a dozen moves of a planner call, one inside of the other: its code would be
compiled for each of them, which took most of the time of a first plan. So it is compiled once, and LLVM's table of
symbols tells the moves where it is. That table has to be filled before any caller is compiled, or loaded from a cache:
`SharedCode.locate`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from numba import config, types
from numba.core import cgutils
from numba.core.typing.templates import signature
from numba.extending import intrinsic

__all__ = ["SharedCode"]

_SETTINGS: Any = config  # its attributes are set when numba reads the environment


class SharedCode:
    """A `compiled` function without a result, and what compiled functions call in its place.

    Attributes:
        function: The function.
        call: The same for compiled callers; takes eight arguments. `locate` has to be called before.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._name = f"torchdelta.{function.__name__}"
        self._is_located = bool(_SETTINGS.DISABLE_JIT)  # then everything stays Python
        self.call: Callable[..., None] = function if self._is_located else self._stand_in()

    def locate(self, arguments: Sequence[Any]) -> None:
        """Compile the function for arguments like these, or load it, and tell LLVM its address; once per process."""
        if self._is_located:
            return
        # The types that a call from Python would have.
        wanted = signature(types.none, *(self.function.typeof_pyval(argument) for argument in arguments))
        found = self.function.get_compile_result(wanted)
        address = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
        llvmlite.binding.add_symbol(self._name, address)
        self._is_located = True

    def _stand_in(self) -> Callable[..., None]:
        name = self._name

        @intrinsic
        def call(_typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
            def generate(context: Any, builder: Any, found: Any, arguments: Any) -> Any:
                kind = context.call_conv.get_function_type(found.return_type, found.args)
                function = cgutils.get_or_insert_function(builder.module, kind, name)
                status, result = context.call_conv.call_function(
                    builder, function, found.return_type, found.args, arguments
                )
                with cgutils.if_unlikely(builder, status.is_error):
                    context.call_conv.return_status_propagate(builder, status)
                return result

            return signature(types.none, a, b, c, d, e, f, g, h), generate

        return call
