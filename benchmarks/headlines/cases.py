"""The models of the headlines: whose multiples they are, and from which batch they are counted.

ResNet-50 at 2.04 and ResNet-101 at 2.25 times the batch are DELTA's (2022), GPT-2 at 5.5 and 6 times that of its
successor (2024). Pictures have 64 pixels a side and the GPT-2 is small, so that everything runs in minutes on two
cores: the papers' own sizes are simulated by `python -m benchmarks papers`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model.

    Attributes:
        model: A name of `models.MODELS`.
        plain_batch: Plain's largest batch: its peak is the limit.
        multiples: Batches to train under the limit, of `plain_batch`.
        cut_batch: The batch whose peak is cut by `CUT_SHARE`: large enough that parameters and their gradients, which
            stay, are less than the rest.
    """

    model: str
    plain_batch: int
    multiples: tuple[float, ...]
    cut_batch: int

    def batch(self, multiple: float) -> int:
        """Return the batch of a multiple, rounded up."""
        return -int(-self.plain_batch * multiple // 1)


CUT_SHARE = 0.70
CASES = {
    case.model: case
    for case in (
        Case(model="resnet50-64px", plain_batch=25, multiples=(2.04,), cut_batch=256),
        Case(model="resnet101-64px", plain_batch=28, multiples=(2.25,), cut_batch=224),
        Case(model="gpt2-12x256", plain_batch=4, multiples=(5.5, 6.0), cut_batch=16),
    )
}
