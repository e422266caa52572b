"""Profiles as torch.profiler writes them, built by hand."""

from __future__ import annotations

import json
from typing import Any


class Written:
    """A profile while it is written: a main thread, a thread for backward, one stream. Times are in microseconds."""

    def __init__(self, *, addresses: bool = True, first_total_bytes: int | None = 1000) -> None:
        self.events: list[dict[str, Any]] = []
        self.clock = 1_000.0
        self._addresses = addresses
        self._total_bytes = first_total_bytes
        self._correlation = 0

    def op(
        self,
        name: str,
        shapes: list[Any] = (),
        *,
        kernel_us: float = 0.0,
        memory: list[tuple[int, int]] = (),
        node: str = "",
        inner: str = "",
    ) -> None:
        """Run an op, within another one or within a node of autograd if these are named."""
        start = self.clock
        thread = 2 if node else 1
        types = ["float"] * len(shapes)
        if node:
            self._complete("cpu_op", f"autograd::engine::evaluate_function: {node}", start, 100.0, thread)
            self._complete("cpu_op", node, start + 1, 98.0, thread)
        named = {"Input Dims": shapes, "Input type": types, "External id": len(self.events)}
        self._complete("cpu_op", name, start + 2, 90.0, thread, named)
        if inner:
            self._complete("cpu_op", inner, start + 3, 80.0, thread, named)
        if kernel_us:
            self._correlation += 1
            self._complete(
                "cuda_runtime", "cudaLaunchKernel", start + 5, 2.0, thread, {"correlation": self._correlation}
            )
            self._complete("kernel", "k", start + 500, kernel_us, 7, {"correlation": self._correlation, "stream": 7})
        for place, (address, size_bytes) in enumerate(memory):
            self.memory(address, size_bytes, at=start + 10 + place)
        self.clock += 200.0

    def memory(self, address: int, size_bytes: int, *, at: float | None = None) -> None:
        """Allocate, or free where the size is below 0."""
        args: dict[str, Any] = {"Bytes": size_bytes, "Device Type": 1, "Device Id": 0}
        if self._addresses:
            args["Addr"] = address
        if self._total_bytes is not None:
            self._total_bytes += size_bytes
            args["Total Allocated"] = self._total_bytes
        time_us = self.clock - 50.0 if at is None else at
        self.events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": time_us, "s": "t", "args": args})

    def step(self, number: int, start: float) -> None:
        """Mark all since a time as a step."""
        self._complete("user_annotation", f"ProfilerStep#{number}", start, self.clock - start, 1)

    def text(self) -> str:
        """Return the file."""
        return json.dumps(
            {
                "schemaVersion": 1,
                "deviceProperties": [{"id": 0, "name": "Test GPU"}],
                "traceEvents": [{"name": "process_name", "ph": "M", "args": {"labels": "CPU"}}, *self.events],
            }
        )

    def _complete(
        self, kind: str, name: str, start: float, dur: float, thread: int, args: dict[str, Any] | None = None
    ) -> None:
        pid = 0 if kind == "kernel" else 1
        event = {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": thread, "ts": start, "dur": dur}
        self.events.append(event | {"args": args or {}})


def two_layers(num_steps: int = 3, *, addresses: bool = True, first_total_bytes: int | None = 1000) -> str:
    """Write steps of a product, a ReLU, and their backward."""
    written = Written(addresses=addresses, first_total_bytes=first_total_bytes)
    for number in range(num_steps):
        start = written.clock
        written.op("aten::linear", [[4, 8], [16, 8]], kernel_us=30.0, memory=[(1, 1024)], inner="aten::addmm")
        written.op("aten::relu", [[4, 64]], kernel_us=10.0, memory=[(2, 1536)])
        written.op("aten::view", [[4, 64]])
        written.op("aten::threshold_backward", [[4, 96]], kernel_us=20.0, memory=[(3, 2048)], node="ReluBackward0")
        written.memory(2, -1536)
        written.op("aten::mm", [[4, 64]], kernel_us=40.0, memory=[(4, 512), (4, -512)], node="AddmmBackward0")
        written.memory(1, -1024)
        written.memory(3, -2048)
        written.step(number, start)
    return written.text()
