"""Products of few rows with a weight of 16 bits or of codes: what their tests have in common."""

from __future__ import annotations

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")

from weft.operators.low_precision.quantized_weight import (  # noqa: E402
    FORMATS,
    GROUPS,
    dequantize_weight,
    prepare_weight,
)

FORMS = [(f, g) for f in FORMATS for g in ((0, *GROUPS) if f != "int4" else GROUPS)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


class FewRows:
    """A case with its ``x``, ``weight`` and ``bias``."""

    def _every_code(self):
        codes = (torch.arange(self.case.n * self.case.k) * 7 % 256).to(torch.uint8).view(self.case.n, -1)
        scale = (torch.arange(self.case.n) % 5 + 1).to(self.case.scale) / 4
        if self.case.format == "int4":
            packed = codes[:, : self.case.k // 2].contiguous()
            return prepare_weight(packed, scale[:, None].expand(-1, self.case.k // self.case.group).contiguous())
        if self.case.format == "fp8":
            return prepare_weight(codes.where(codes & 127 != 127, codes - 1).view(torch.float8_e4m3fn), scale)
        return prepare_weight(codes.view(torch.int8), scale)

    def wanted(self) -> torch.Tensor:
        weight = self.weight._replace(scale=self.weight.scale.double())
        dense = weight.words if weight.format == "wide" else dequantize_weight(weight, torch.float64)
        y = self.x.double() @ dense.double().t()
        return y + self.bias.double() if self.case.biased else y
