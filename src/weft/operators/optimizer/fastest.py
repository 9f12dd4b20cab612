"""Which table's kernels a step is made with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.operators.launch import target_sm
from weft.operators.optimizer.adam_cuda import AdamTable
from weft.operators.optimizer.adam_rule import ADAM
from weft.operators.optimizer.adamw_8bit_cuda import CodedTable
from weft.operators.optimizer.cuda_table import CudaTable
from weft.operators.optimizer.entry import Entry
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Table

FROM = 2**22  # elements in all; below, launching is what counts


def kind_of(rule: Rule, entries: Sequence[Entry]) -> type[Table]:
    """The table whose kernels are the fastest here, by the tables of the family's README."""
    many = sum(e.param.numel() for e in entries) >= FROM
    if rule is not ADAM or not many or target_sm(entries[0].param.device) != 90:
        return Table
    kind: type[CudaTable] = CodedTable if any(e.codes for e in entries) else AdamTable
    taken = [e for e, mine in zip(entries, kind.taken_of(entries), strict=True) if mine]
    if kind is AdamTable and any(e.param.element_size() == 4 for e in taken):
        return Table  # of fp32 Triton's is the faster one
    return kind if sum(e.param.numel() for e in taken) >= FROM else Table


def table(rule: Rule, entries: Sequence[Entry], groups: int = 1, control: Tensor | None = None) -> Table:
    """See :class:`weft.operators.optimizer.table.Table`."""
    return kind_of(rule, entries)(rule, entries, groups, control)
