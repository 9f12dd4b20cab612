"""Triton kernels for GroupNorm over x [B, C, S] of any strides: read once, written once.

S stands for all spatial dimensions; a group is CG = C / G channels of one batch entry, CG * S elements. A program holds whole
groups, [ROWS, CHANNELS, SPACE]. Reads are marked ``evict_last`` (why: docs/notes/softmax.md). Arguments that a flag switches
off are never read.
"""

import triton
import triton.language as tl

from weft.operators.normalization.kernels import reciprocal_root, write
from weft.operators.reduction.kernels import known_multiple as multiple

# ---- strides ---------------------------------------------------------------------------------------------------------


@triton.jit
def known_sizes(CG, S, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """UNIT divides the extent of the axis of stride 1, DENSE (1: channels, 2: space)."""
    if DENSE == 2:
        return CG, multiple(S, UNIT)
    elif DENSE == 1:
        return multiple(CG, UNIT), S
    else:
        return CG, S


@triton.jit
def known_strides(b, c, s, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """And the other axes' strides."""
    if DENSE == 2:
        return multiple(b, UNIT), multiple(c, UNIT), s
    elif DENSE == 1:
        return multiple(b, UNIT), c, multiple(s, UNIT)
    else:
        return b, c, s


@triton.jit
def quotient(a, b):
    """a / b. ``/`` errs by up to 2 ulp, which a group of equal elements would show; ``tl.div_rn`` branches."""
    q = a / b
    return tl.fma(tl.fma(-q, b, a), 1.0 / b, q)


# ---- groups held in registers ----------------------------------------------------------------------------------------


@triton.jit
def held_groups(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, G, CG, S, n, x_b, x_c, x_s, y_b, y_c, y_s, w_c, b_c, eps,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    SAVED: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * w + b for the ROWS groups from ``program * ROWS`` on; group m is group m % G of batch entry
    m // G. n = CG * S; with SAVED, mean and rstd (fp32 [M]) are written."""
    CG, S = known_sizes(CG, S, UNIT, DENSE)
    x_b, x_c, x_s = known_strides(x_b, x_c, x_s, UNIT, DENSE)
    y_b, y_c, y_s = known_strides(y_b, y_c, y_s, UNIT, DENSE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # int32: so the divisions are the cheaper ones
    c = tl.arange(0, CHANNELS)[None, :]
    s = tl.arange(0, SPACE)[None, None, :]
    there = (row < M)[:, None] & (c < CG)
    inside = there[:, :, None] & (s < S)
    channel = (row % G).to(tl.int64)[:, None] * CG + c  # [ROWS, CHANNELS]
    batch = (row // G).to(tl.int64)[:, None]
    at = x_ptr + (batch * x_b + channel * x_c)[:, :, None] + s * x_s
    x = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if WEIGHTED:
        w = tl.load(w_ptr + channel * w_c, mask=there, other=0.0).to(tl.float32)
    if BIASED:
        b = tl.load(b_ptr + channel * b_c, mask=there, other=0.0).to(tl.float32)
    mean = quotient(tl.sum(tl.sum(x, axis=2), axis=1), n)
    x = tl.where(inside, x - mean[:, None, None], 0.0)
    rstd = reciprocal_root(tl.sum(tl.sum(x * x, axis=2), axis=1) / n, eps)
    if SAVED:
        tl.store(mean_ptr + row, mean, mask=row < M)
        tl.store(rstd_ptr + row, rstd, mask=row < M)
    if WEIGHTED:
        y = x * (rstd[:, None] * w)[:, :, None]
    else:
        y = x * rstd[:, None, None]
    if BIASED:
        y += b[:, :, None]
    write(y_ptr + (batch * y_b + channel * y_c)[:, :, None] + s * y_s, y, inside)


@triton.jit
def held_gradients(
    x_ptr, dy_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, B, G, CG, S, n, x_b, x_c, x_s, dy_b, dy_c, dy_s,
    dx_b, dx_c, dx_s, w_c, ROWS: tl.constexpr, WALK: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr,
    WEIGHTED: tl.constexpr, SUMMED: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat)), means over a group. Program (block, g) takes group g of WALK
    times ROWS batch entries; with SUMMED it leaves its sums of dy xhat and of dy in row ``block`` of dw and db, each fp32
    [blocks, C]."""
    CG, S = known_sizes(CG, S, UNIT, DENSE)
    x_b, x_c, x_s = known_strides(x_b, x_c, x_s, UNIT, DENSE)
    dy_b, dy_c, dy_s = known_strides(dy_b, dy_c, dy_s, UNIT, DENSE)
    dx_b, dx_c, dx_s = known_strides(dx_b, dx_c, dx_s, UNIT, DENSE)
    g = tl.program_id(0) % G
    block = (tl.program_id(0) // G).to(tl.int64)
    c = tl.arange(0, CHANNELS)
    s = tl.arange(0, SPACE)[None, None, :]
    channel = g.to(tl.int64) * CG + c
    if WEIGHTED:
        w = tl.load(w_ptr + channel * w_c, mask=c < CG, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([CHANNELS], tl.float32)
    db = tl.zeros([CHANNELS], tl.float32)
    for i in range(0, WALK):
        batch = (block * WALK + i) * ROWS + tl.arange(0, ROWS)
        inside = ((batch < B)[:, None] & (c < CG)[None, :])[:, :, None] & (s < S)
        x_at = x_ptr + (batch[:, None] * x_b + channel[None, :] * x_c)[:, :, None] + s * x_s
        dy_at = dy_ptr + (batch[:, None] * dy_b + channel[None, :] * dy_c)[:, :, None] + s * dy_s
        x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        mean = tl.load(mean_ptr + batch * G + g, mask=batch < B, other=0.0)
        rstd = tl.load(rstd_ptr + batch * G + g, mask=batch < B, other=0.0)
        xhat = (x - mean[:, None, None]) * rstd[:, None, None]  # outside of the tensor anything: dy is 0 there
        along = tl.sum(dy * xhat, axis=2)  # [ROWS, CHANNELS]
        level = tl.sum(dy, axis=2)
        if SUMMED:
            dw += tl.sum(along, axis=0)
            db += tl.sum(level, axis=0)
        if WEIGHTED:
            along *= w
            level *= w
            dy *= (rstd[:, None] * w)[:, :, None]
        else:
            dy *= rstd[:, None, None]
        along = rstd * (tl.sum(along, axis=1) / n)
        level = rstd * (tl.sum(level, axis=1) / n)
        dx = dy - (xhat * along[:, None, None] + level[:, None, None])
        write(dx_ptr + (batch[:, None] * dx_b + channel[None, :] * dx_c)[:, :, None] + s * dx_s, dx, inside)
    if SUMMED:
        own = block * (G * CG) + channel
        tl.store(dw_ptr + own, dw, mask=c < CG)
        tl.store(db_ptr + own, db, mask=c < CG)


# ---- groups that registers do not hold ---------------------------------------------------------------------------------
#
# Groups are cut into PARTS. A part is first summed and later normalised, by two tasks of one launch: the second task of a
# part comes some AHEAD tasks after the first, soon enough to find the part in L2, late enough that all sums of its group
# are there. So device memory is read once here too. Parts publish their sums in words of 64 bits, and a task that needs
# them adds them up in one order: nothing depends on timing.
#
# First reads are marked ``evict_last``, second ones ``evict_first``. Arguments that a flag switches off are never read.


@triton.jit
def next_task(state_ptr, TASKS, AHEAD):
    """``(second, task)``: what this program does. Tasks are ordered by the programs' start, so that a task waits only for tasks
    that run already: AHEAD first tasks, then a second and a first one in turn, then the rest of the second ones."""
    # 32 bits: divisions of 64 take a hundred instructions
    ticket = tl.atomic_add(state_ptr, 1, sem="relaxed").to(tl.int32)
    late = ticket - AHEAD
    pairs = TASKS - AHEAD
    rest = late >= 2 * pairs
    second = (late >= 0) & (rest | (late % 2 == 0))
    in_turn = tl.where(late % 2 == 0, late // 2, AHEAD + late // 2)
    return second, tl.where(late < 0, ticket, tl.where(rest, late - pairs, in_turn))


@triton.jit
def place_of(task, G, CG, PARTS, PARTS_S, SPAN_C: tl.constexpr, SPAN_S: tl.constexpr):
    """Of a task: its part, batch entry, group, first channel of the group, and where in the group the part begins."""
    part = task % PARTS
    row = task // PARTS
    first_c = (part // PARTS_S).to(tl.int64) * SPAN_C
    first_s = (part % PARTS_S).to(tl.int64) * SPAN_S
    return part, (row // G).to(tl.int64), row.to(tl.int64), (row % G).to(tl.int64) * CG, first_c, first_s


@triton.jit
def publish(word_ptr, first, second):
    """Writes two fp32 values as one word that is not 0: where both are, the second becomes -0."""
    word = (bits(first) << 32) | (bits(second) & 0xFFFFFFFF)
    tl.atomic_xchg(word_ptr, word | ((word == 0).to(tl.int64) << 31), sem="relaxed")


@triton.jit
def bits(value):
    return value.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def await_all(words_ptr, PARTS, MOST: tl.constexpr):
    """The pairs of all parts, [MOST] each, zeros behind the last."""
    part = tl.arange(0, MOST)
    words = tl.load(words_ptr + part, mask=part < PARTS, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(words_ptr + part, mask=part < PARTS, other=1, volatile=True)
    first = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    second = words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(part < PARTS, first, 0.0), tl.where(part < PARTS, second, 0.0)


@triton.jit
def extent(first, size, SPAN: tl.constexpr):
    """How many of the SPAN elements from ``first`` on exist."""
    return tl.minimum(tl.maximum(size - first, 0), SPAN)


@triton.jit
def tile(
    i, first_c, first_s, CG, S, c, s, CHANNELS: tl.constexpr, SPACE: tl.constexpr, WALK_C: tl.constexpr,
    WALK_S: tl.constexpr,
):  # fmt: skip
    """Tile i of a part: where it begins, which of its channels exist, and which of its elements; none behind the last tile."""
    at_c = first_c + i // WALK_S * CHANNELS
    at_s = first_s + i % WALK_S * SPACE
    in_c = (c < CG - at_c) & (i < WALK_C * WALK_S)
    return at_c, at_s, in_c, in_c[:, None] & (s < S - at_s)[None, :]


@triton.jit
def weights(ptr, channel, stride, inside, GIVEN: tl.constexpr):
    """[CHANNELS]; anything where there are none."""
    if GIVEN:
        return tl.load(ptr + channel * stride, mask=inside, other=0.0).to(tl.float32)
    else:
        return channel.to(tl.float32)


@triton.jit
def streamed_groups(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, state_ptr, TASKS, AHEAD, G, CG, S, n, PARTS, PARTS_S,
    x_b, x_c, x_s, y_b, y_c, y_s, w_c, b_c, eps,
    CHANNELS: tl.constexpr, SPACE: tl.constexpr, WALK_C: tl.constexpr, WALK_S: tl.constexpr, MOST: tl.constexpr,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, SAVED: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The same as ``held_groups``. A part is WALK_C by WALK_S tiles [CHANNELS, SPACE], and its sums are its mean and its sum of
    squares about that mean (Chan, Golub & LeVeque 1979). state, zeroed int64: the tickets, then a word for each part."""
    CG, S = known_sizes(CG, S, UNIT, DENSE)
    x_b, x_c, x_s = known_strides(x_b, x_c, x_s, UNIT, DENSE)
    y_b, y_c, y_s = known_strides(y_b, y_c, y_s, UNIT, DENSE)
    SPAN_C: tl.constexpr = CHANNELS * WALK_C
    SPAN_S: tl.constexpr = SPACE * WALK_S
    second, task = next_task(state_ptr, TASKS, AHEAD)
    part, batch, row, channel, first_c, first_s = place_of(task, G, CG, PARTS, PARTS_S, SPAN_C, SPAN_S)
    words_ptr = state_ptr + 1 + row * PARTS
    x_ptr += batch * x_b + channel * x_c
    y_ptr += batch * y_b + channel * y_c
    c = tl.arange(0, CHANNELS)
    s = tl.arange(0, SPACE)
    x_lane = c.to(tl.int64)[:, None] * x_c + s.to(tl.int64)[None, :] * x_s
    y_lane = c.to(tl.int64)[:, None] * y_c + s.to(tl.int64)[None, :] * y_s
    at_c, at_s, in_c, inside = tile(0, first_c, first_s, CG, S, c, s, CHANNELS, SPACE, WALK_C, WALK_S)
    x_at = x_ptr + at_c * x_c + at_s * x_s + x_lane
    if second:
        x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_first")
        w = weights(w_ptr, channel + at_c + c, w_c, in_c, WEIGHTED)
        b = weights(b_ptr, channel + at_c + c, b_c, in_c, BIASED)
        means, squares = await_all(words_ptr, PARTS, MOST)
        p = tl.arange(0, MOST)
        of_part = extent(p // PARTS_S * SPAN_C, CG, SPAN_C).to(tl.float32)
        of_part *= extent((p % PARTS_S).to(tl.int64) * SPAN_S, S, SPAN_S).to(tl.float32)
        of_part = tl.where(p < PARTS, of_part, 0.0)
        near = tl.sum(tl.where(p == 0, means, 0.0), axis=0)  # far from 0, a sum of means would lose their last places
        mean = near + tl.sum(of_part * (means - near), axis=0) / n
        off = means - mean
        rstd = reciprocal_root(tl.sum(squares + of_part * off * off, axis=0) / n, eps)
        if SAVED:
            tl.store(mean_ptr + row, mean, mask=part == 0)
            tl.store(rstd_ptr + row, rstd, mask=part == 0)
        for i in range(0, WALK_C * WALK_S):
            if WEIGHTED:
                y = (x.to(tl.float32) - mean) * (rstd * w)[:, None]
            else:
                y = (x.to(tl.float32) - mean) * rstd
            if BIASED:
                y += b[:, None]
            write(y_ptr + at_c * y_c + at_s * y_s + y_lane, y, inside)
            if WALK_C * WALK_S > 1:  # the next tile; behind the last one nothing is inside
                at_c, at_s, in_c, inside = tile(i + 1, first_c, first_s, CG, S, c, s, CHANNELS, SPACE, WALK_C, WALK_S)
                x_at = x_ptr + at_c * x_c + at_s * x_s + x_lane
                x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_first")
                w = weights(w_ptr, channel + at_c + c, w_c, in_c, WEIGHTED)
                b = weights(b_ptr, channel + at_c + c, b_c, in_c, BIASED)
    else:
        count = 0.0
        middle = 0.0
        total = 0.0
        x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_last")
        for i in range(0, WALK_C * WALK_S):
            more = (extent(at_c, CG, CHANNELS) * extent(at_s, S, SPACE)).to(tl.float32)
            wide = x.to(tl.float32)
            of_tile = tl.sum(tl.sum(wide, axis=1), axis=0) / tl.maximum(more, 1.0)
            wide = tl.where(inside, wide - of_tile, 0.0)
            apart = of_tile - middle
            share = more / (count + more)
            total += tl.sum(tl.sum(wide * wide, axis=1), axis=0) + apart * apart * (count * share)
            middle += apart * share
            count += more
            if WALK_C * WALK_S > 1:
                at_c, at_s, in_c, inside = tile(i + 1, first_c, first_s, CG, S, c, s, CHANNELS, SPACE, WALK_C, WALK_S)
                x_at = x_ptr + at_c * x_c + at_s * x_s + x_lane
                x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_last")
        publish(words_ptr + part, middle, total)


@triton.jit
def streamed_gradients(
    x_ptr, dy_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, state_ptr, TASKS, AHEAD, G, CG, S, n, PARTS,
    PARTS_S, TILES_S, x_b, x_c, x_s, dy_b, dy_c, dy_s, dx_b, dx_c, dx_s, w_c,
    CHANNELS: tl.constexpr, SPACE: tl.constexpr, WALK_C: tl.constexpr, WALK_S: tl.constexpr, MOST: tl.constexpr,
    WEIGHTED: tl.constexpr, SUMMED: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The same as ``held_gradients``. The sums of a part are those of w dy and w dy xhat; with SUMMED each tile leaves its
    channels' sums in dw and db, fp32 [B * TILES_S, C], TILES_S tiles along space."""
    CG, S = known_sizes(CG, S, UNIT, DENSE)
    x_b, x_c, x_s = known_strides(x_b, x_c, x_s, UNIT, DENSE)
    dy_b, dy_c, dy_s = known_strides(dy_b, dy_c, dy_s, UNIT, DENSE)
    dx_b, dx_c, dx_s = known_strides(dx_b, dx_c, dx_s, UNIT, DENSE)
    SPAN_C: tl.constexpr = CHANNELS * WALK_C
    SPAN_S: tl.constexpr = SPACE * WALK_S
    second, task = next_task(state_ptr, TASKS, AHEAD)
    part, batch, row, channel, first_c, first_s = place_of(task, G, CG, PARTS, PARTS_S, SPAN_C, SPAN_S)
    words_ptr = state_ptr + 1 + row * PARTS
    x_ptr += batch * x_b + channel * x_c
    dy_ptr += batch * dy_b + channel * dy_c
    dx_ptr += batch * dx_b + channel * dx_c
    c = tl.arange(0, CHANNELS)
    s = tl.arange(0, SPACE)
    x_lane = c.to(tl.int64)[:, None] * x_c + s.to(tl.int64)[None, :] * x_s
    dy_lane = c.to(tl.int64)[:, None] * dy_c + s.to(tl.int64)[None, :] * dy_s
    dx_lane = c.to(tl.int64)[:, None] * dx_c + s.to(tl.int64)[None, :] * dx_s
    at_c, at_s, in_c, inside = tile(0, first_c, first_s, CG, S, c, s, CHANNELS, SPACE, WALK_C, WALK_S)
    x_at = x_ptr + at_c * x_c + at_s * x_s + x_lane
    dy_at = dy_ptr + at_c * dy_c + at_s * dy_s + dy_lane
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    w = weights(w_ptr, channel + at_c + c, w_c, in_c, WEIGHTED)
    if second:
        x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_first")
        dy = tl.load(dy_at, mask=inside, other=0.0, eviction_policy="evict_first")
        levels, alongs = await_all(words_ptr, PARTS, MOST)
        level = rstd * (tl.sum(levels, axis=0) / n)
        along = rstd * (tl.sum(alongs, axis=0) / n)
        for i in range(0, WALK_C * WALK_S):
            if WEIGHTED:
                dx = dy.to(tl.float32) * (rstd * w)[:, None]
            else:
                dx = dy.to(tl.float32) * rstd
            dx -= (x.to(tl.float32) - mean) * rstd * along + level
            write(dx_ptr + at_c * dx_c + at_s * dx_s + dx_lane, dx, inside)
            if WALK_C * WALK_S > 1:  # the next tile; behind the last one nothing is inside
                at_c, at_s, in_c, inside = tile(i + 1, first_c, first_s, CG, S, c, s, CHANNELS, SPACE, WALK_C, WALK_S)
                x_at = x_ptr + at_c * x_c + at_s * x_s + x_lane
                dy_at = dy_ptr + at_c * dy_c + at_s * dy_s + dy_lane
                x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_first")
                dy = tl.load(dy_at, mask=inside, other=0.0, eviction_policy="evict_first")
                w = weights(w_ptr, channel + at_c + c, w_c, in_c, WEIGHTED)
    else:
        total = 0.0
        total_along = 0.0
        x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_at, mask=inside, other=0.0, eviction_policy="evict_last")
        for i in range(0, WALK_C * WALK_S):
            wide = dy.to(tl.float32)
            dw = tl.sum(wide * ((x.to(tl.float32) - mean) * rstd), axis=1)  # [CHANNELS]
            db = tl.sum(wide, axis=1)
            if SUMMED:
                of_tile = (batch * TILES_S + at_s // SPACE) * (G * CG) + channel + at_c + c
                real = in_c & (at_s < S)
                tl.store(dw_ptr + of_tile, dw, mask=real)
                tl.store(db_ptr + of_tile, db, mask=real)
            if WEIGHTED:
                dw *= w
                db *= w
            total += tl.sum(db, axis=0)
            total_along += tl.sum(dw, axis=0)
            if WALK_C * WALK_S > 1:
                at_c, at_s, in_c, inside = tile(i + 1, first_c, first_s, CG, S, c, s, CHANNELS, SPACE, WALK_C, WALK_S)
                x_at = x_ptr + at_c * x_c + at_s * x_s + x_lane
                dy_at = dy_ptr + at_c * dy_c + at_s * dy_s + dy_lane
                x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_last")
                dy = tl.load(dy_at, mask=inside, other=0.0, eviction_policy="evict_last")
                w = weights(w_ptr, channel + at_c + c, w_c, in_c, WEIGHTED)
        publish(words_ptr + part, total, total_along)
