"""Products of few rows with a weight of 16 bits or of codes, played on a CPU: what their tests have in common."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weft.operators.matmul.quantized_weight import dequantize_weight, prepare_weight  # noqa: E402


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
