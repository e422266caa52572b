"""The options of a budget: one frozen dataclass, checked when it is constructed.

A value that is not allowed raises an error that names the allowed ones at the construction, not inside the first step.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Final, Literal, Self

from torchdelta.errors import ConfigError, SizeError
from torchdelta.names import nearest, unknown_name
from torchdelta.settings_file import read_settings_file, without_none
from torchdelta.units import parse_size

__all__ = ["DECISIONS", "POLICIES", "TIERS", "VERIFY", "Config", "SavedBuffer"]

# The reactive policies; a test compares the runtime's registry with this.
POLICIES: Final = ("torchdelta", "delta-2022", "dtr", "largest-first", "lru", "recompute-only", "swap-only")
# The planners whose plans a session can follow; a test compares the registry with this.
PLANNERS: Final = (
    "autoswap-aoa",
    "autoswap-doa",
    "autoswap-swdoa",
    "autoswap-wdoa",
    "capuchin",
    "checkpoint",
    "delta-2022",
    "delta-2022-released",
    "delta-2024",
    "dtr",
    "keep",
    "mu-two",
    "swap-all",
    "torchdelta",
)
DECISIONS: Final = ("recompute", "swap", "keep")
TIERS: Final = ("disk", "memory")
VERIFY: Final = ("first-step",)
DECISION_CLASSES: Final = ("saved", "all")
MEMORY_BUDGET: Final = "memory_budget"  # the one key of a settings file that is no option of Config


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBuffer:
    """A buffer that autograd has just saved for backward: the argument of a `decisions` callable.

    Attributes:
        index: Position among the buffers saved in this step, from 0.
        op: The op that made it, such as "aten.mm.default"; empty if none is known (a parameter, an input).
        module: Path of the module whose forward was running, such as "transformer.h.0.attn"; empty outside of modules.
        shape: Shape of the saved tensor.
        dtype: Its dtype without the prefix, such as "float32".
        size_bytes: Bytes of the storage behind it.
    """

    index: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How a budget is enforced. The defaults suit most training.

    Attributes:
        policy: Which buffers are evicted when the budget is reached, and how. "torchdelta" weighs recomputing against
            swapping; "delta-2022" follows the paper literally; "dtr", "largest-first" and "lru" are known rules to
            compare with; "recompute-only" and "swap-only" do one of the two.
        planner: Follow plans of this planner, such as "torchdelta" or "delta-2024" (`torchdelta plan --planner list`
            lists them), in place of the policy: once buffers have left, steps are traced, a helper process plans them
            while the training goes on, and the following steps carry the plans out, one for each kind of step. Steps
            without a plan, and what a plan misses, are left to the policy. Only decisions about saved tensors are
            carried out; with decision_class="all", also those about parameters, gradients and optimizer states. "auto"
            follows plans of "torchdelta", but asks for one only once the budget has cost as much time as a plan does
            (10 s), and gives it up if followed steps take longer than reacting did; on CPU only, and not where several
            processes train on one machine. None never plans. A plan needs the extra "plan"; without it "auto" is None.
        decision_class: Which tensors may leave the device. "saved": those that autograd saves for backward. "all": also
            parameters, gradients and optimizer states, if that is not enough, or when a plan says so (of its class
            "persistent"). A step then fits into less than these take together. Experimental; other threads must not
            read them, and `decisions` and `arena` are not possible with it.
        decisions: Forces the decision for every saved buffer when it is saved; the budget is then ignored:
            "recompute", "swap", "keep", or a callable that takes a `SavedBuffer` and returns one of the three. For
            tests and comparisons.
        tier: Where swapped bytes go: "disk" (an unlinked file) or "memory" (a copy in host memory). On CUDA "memory" is
            pinned memory, and "disk" is pinned memory up to `host_budget`, then a file.
        swap_dir: Directory of the swap file. None means TORCHDELTA_SWAP_DIR, else the system's directory for
            temporary files. It should be on a real disk: a tmpfs is memory. A relative one begins at the working
            directory of now, and stays there: the attribute is absolute.
        host_budget: Most bytes of host memory for swapped and staged data ("4GiB", an int); None is no limit on CPU,
            and half of the free memory on CUDA, where it is pinned. Under torchrun (where LOCAL_WORLD_SIZE is set) and
            with Lightning's callback it is for all training processes of a machine together: each gets an equal share.
        disk_budget: Most bytes of disk; None is no limit but the free space. Shared likewise.
        checksum: Compare all data read from the disk with a CRC-32 of what was written. A buffer that differs is
            recomputed if possible, else an error is raised; there is never a wrong gradient.
        verify: "first-step" hashes buffers that are dropped in the first step and compares them when recomputed.
        count_allocations: On CPU, count at the allocator what every op allocates, to the byte. Its first use needs a
            C++ compiler; without one, and when False, the workspace of ops is estimated.
        caching_allocator: On CPU, use the pages of freed blocks from 1 MiB on again, and hold no more than was in use
            at once, so that the resident memory of the process follows the budget. Its first use needs a C++ compiler,
            and it needs `count_allocations`; without them the C library's heap may keep more than the budget.
            `torchdelta.native.caching.caching_status` reports its state.
        arena: On CPU, in place of the caching allocator, give the allocations of repeating steps planned addresses in
            one region, so that memory does not fragment. Its first use needs a C++ compiler, and it needs the extra
            "plan"; without them, and on other devices, memory is allocated as usual, with a warning.
            `torchdelta.native.arena.arena_status` reports its state. On CUDA, where addresses cannot be chosen, it is
            one segment for the large tensors of a step (arena/region.py), which has not been run yet.

    Raises:
        ConfigError: A value is not allowed; the message names those that are.
    """

    policy: str = "torchdelta"
    planner: str | None = "auto"
    decision_class: Literal["saved", "all"] = "saved"
    decisions: str | Callable[[SavedBuffer], str] | None = None
    tier: Literal["disk", "memory"] = "disk"
    swap_dir: str | os.PathLike[str] | None = None
    host_budget: int | str | None = None
    disk_budget: int | str | None = None
    checksum: bool = False
    verify: Literal["first-step"] | None = None
    count_allocations: bool = True
    caching_allocator: bool = True
    arena: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        _check_choice("policy", self.policy, POLICIES)
        if self.planner is not None:
            _check_choice("planner", self.planner, ("auto", *PLANNERS), or_else="None (outside of Python: none)")
            if self.decisions is not None and self.planner != "auto":
                raise ConfigError("planner and decisions exclude each other: leave one of them out")
        if self.decisions is not None and not callable(self.decisions):
            _check_choice("decisions", self.decisions, DECISIONS, or_else="None, or a callable taking a SavedBuffer")
        _check_choice("decision_class", self.decision_class, DECISION_CLASSES)
        if self.decision_class == "all":
            for option in ("decisions", "arena"):
                if getattr(self, option):
                    raise ConfigError(f"decision_class='all' and {option} exclude each other: leave one of them out")
        _check_choice("tier", self.tier, TIERS)
        if self.verify is not None:
            _check_choice("verify", self.verify, VERIFY, or_else="None")
        _check_directory(self.swap_dir)
        if self.swap_dir is not None and not os.path.isabs(self.swap_dir):  # noqa: PTH117 - os.PathLike of any kind
            object.__setattr__(self, "swap_dir", os.path.abspath(self.swap_dir))  # noqa: PTH100 - likewise
        for option in ("host_budget", "disk_budget"):
            size = getattr(self, option)
            _check_size(option, size)
            if isinstance(size, Integral):  # one of numpy's would stay in what is printed and stored
                object.__setattr__(self, option, int(size))
        _check_flag("checksum", self.checksum)
        _check_flag("count_allocations", self.count_allocations)
        _check_flag("caching_allocator", self.caching_allocator)
        _check_flag("arena", self.arena)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], *, source: str = "") -> Self:
        """Make a Config from a mapping whose keys are its attributes, as one read from a file has them.

        The text "none" means None. The key `memory_budget` may be there too; it belongs to
        `MemoryBudget.from_settings`, and is not looked at here.

        Args:
            options: Values by key; what is left out has its default.
            source: Where they come from, such as a file's name: error messages begin with it.

        Raises:
            ConfigError: The options are no mapping, a key is unknown (the message has the nearest one), or a value is
                not allowed.

        Example:
            >>> Config.from_dict({"tier": "memory", "host_budget": "4GiB"}).host_budget_bytes
            4294967296
        """
        keys = tuple(field.name for field in fields(cls))
        prefix = f"{source}: " if source else ""
        _check_mapping(prefix, options)
        for key in options:
            if key not in keys and key != MEMORY_BUDGET:
                raise ConfigError(f"{prefix}{unknown_name('key', str(key), (MEMORY_BUDGET, *keys))}")
        given = {key: value for key, value in without_none(options).items() if key != MEMORY_BUDGET}
        try:
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error}") from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Make a Config from a TOML file: `torchdelta.toml`, or a `pyproject.toml` with a table `[tool.torchdelta]`.

        It has the keys that `from_dict` takes. A relative `swap_dir` begins at the file's directory.

        Raises:
            ConfigError: The file cannot be read, a key is unknown, or a value is not allowed; the message names the
                file.
        """
        return cls.from_dict(read_settings_file(path), source=str(os.fspath(path)))

    @property
    def host_budget_bytes(self) -> int | None:
        """The host budget as bytes; None is no limit."""
        return None if self.host_budget is None else parse_size(self.host_budget, name="host_budget")

    @property
    def disk_budget_bytes(self) -> int | None:
        """The disk budget as bytes; None is no limit."""
        return None if self.disk_budget is None else parse_size(self.disk_budget, name="disk_budget")


def _check_mapping(prefix: str, options: Any) -> None:
    if not isinstance(options, Mapping):
        raise ConfigError(f"{prefix}options={options!r} is not a mapping: use {{'tier': 'memory'}}")


def _check_choice(option: str, value: Any, allowed: tuple[str, ...], *, or_else: str = "") -> None:
    if isinstance(value, str) and value in allowed:
        return
    names = ", ".join(repr(name) for name in allowed)
    near = nearest(value, allowed) if isinstance(value, str) else None
    use = "use" if near is None else f"did you mean {near!r}? Use"
    raise ConfigError(f"{option}={value!r} is not allowed: {use} {names}{' or ' + or_else if or_else else ''}")


def _check_flag(option: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{option}={value!r} is not allowed: use True or False (in TOML: true or false)")


def _check_directory(swap_dir: Any) -> None:
    if swap_dir is not None and not isinstance(swap_dir, (str, os.PathLike)):
        raise ConfigError(f"swap_dir={swap_dir!r} is not allowed: use the path of a directory, or None")
    if swap_dir is not None and not os.path.isdir(swap_dir):  # noqa: PTH112 - os.PathLike of any kind
        raise ConfigError(f"swap_dir={os.fspath(swap_dir)!r} is not a directory: create it, or name another one")


def _check_size(option: str, size: Any) -> None:
    if size is None:
        return
    try:
        parse_size(size, name=option, takes_shares=False)
    except SizeError as error:
        raise ConfigError(str(error)) from None
