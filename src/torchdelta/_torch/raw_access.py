"""The methods by which a program reaches a tensor's memory without an op. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.doors import replace, together

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[Callable[..., Any]], Callable[..., Any]]

# They read or write the memory of their tensor arguments during the call, or return the storage's Python object.
READING_METHODS: Final = (
    "__array__",
    "__reduce_ex__",
    "_typed_storage",
    "apply_",
    "map2_",
    "map_",
    "numpy",  # torch makes the storage of an array that shares memory not resizable
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
)
# They return an address, or an object that has one.
EXPORTING_METHODS: Final = ("__dlpack__", "data_ptr")


def patch_raw_access(*, reads: Make, exports: Make, copies: Make, saves: Make) -> Callable[[], None]:
    """Replace what reads memory without an op by `make(original)`; returns what undoes it.

    Args:
        reads: Makes what takes tensors and reads them.
        exports: Makes what takes tensors or storages and passes their address on.
        copies: Makes what reads all tensors of one that it takes (a module's parameters) and uses the methods above
            without passing anything on.
        saves: Makes `_save(obj, zip_file, ...)`, by which `torch.save` writes a file.
    """
    script = torch.jit.RecursiveScriptModule
    undos = [
        *(replace(torch.Tensor, name, reads) for name in READING_METHODS),
        *(replace(torch.Tensor, name, exports) for name in EXPORTING_METHODS),
        replace(torch.Tensor, "__deepcopy__", copies),
        replace(torch._tensor_str, "_str", copies),  # it switches the dispatch modes off
        replace(torch.UntypedStorage, "data_ptr", exports),
        replace(torch.UntypedStorage, "__getitem__", exports),
        replace(torch, "to_dlpack", exports),
        replace(torch.utils.dlpack, "to_dlpack", exports),
        *(replace(owner, name, copies) for owner, name in ((torch.jit, "save"), (script, "save"))),
        replace(script, "save_to_buffer", copies),
        replace(torch.serialization, "_save", saves),
    ]
    return together(undos)


def patch_storage_reads(*, sizes: Make, reads: Make) -> Callable[[], None]:
    """Replace what `torch.save` asks storage objects while it runs; returns what undoes it.

    A program's own code that runs inside of it may pickle storages, which calls `_write_file`.
    """
    storage = torch.UntypedStorage
    undos = [replace(storage, "nbytes", sizes), *(replace(storage, name, reads) for name in ("cpu", "_write_file"))]
    return together(undos)
