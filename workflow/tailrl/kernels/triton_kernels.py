"""Triton kernels: around the matrix products of the constrained log-prob, and the batch-invariant attention.

Each kernel of the log-prob reads or writes a matrix once. A program has one row and one block of BLOCK tokens. In the
forward the matrix is logits, float32 [C, V], of C of the T rows; z is a logit over the temperature, and e = exp(z − max
z) with the row's maximum. In the backward it is the gradient by the logits, [R, n], of R rows. Its columns are the n
tokens of a stretch of the vocabulary that are safe in some row.

Arrays of numbers per row and block are [C, B] or [T, B], B blocks. Offsets that grow with rows × vocabulary are int64.
"""

import triton
import triton.language as tl


@triton.jit
def block_sums(logits_ptr, max_ptr, sum_ptr, moment_ptr, vocabulary, inverse_temperature, BLOCK: tl.constexpr):
    """Each block's m = max z, Σ exp(z − m) and Σ (z − m) exp(z − m); all [C, B]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + token, mask=there, other=-float("inf"))
    z = logits * inverse_temperature
    largest = tl.max(z, 0)
    shifted = tl.where(there, z - largest, 0.0)
    exp = tl.where(there, tl.exp(shifted), 0.0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(max_ptr + at, largest)
    tl.store(sum_ptr + at, tl.sum(exp, 0))
    tl.store(moment_ptr + at, tl.sum(exp * shifted, 0))


@triton.jit
def safe_sums(
    logits_ptr,
    block_max_ptr,
    max_ptr,
    cut_ptr,
    sum_ptr,
    moment_ptr,
    count_ptr,
    vocabulary,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """Each block's Σ e, Σ e (z − max z) and count over safe tokens; all [C, B], initialised to zero.

    A block whose maximum is below its row's cut is not read again.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    cut = tl.load(cut_ptr + row)
    if tl.load(block_max_ptr + at) >= cut:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = token < vocabulary
        logits = tl.load(logits_ptr + row * vocabulary + token, mask=there, other=-float("inf"))
        z = logits * inverse_temperature
        safe = there & (z >= cut)
        shifted = tl.where(safe, z - tl.load(max_ptr + row), 0.0)
        exp = tl.where(safe, tl.exp(shifted), 0.0)
        tl.store(sum_ptr + at, tl.sum(exp, 0))
        tl.store(moment_ptr + at, tl.sum(exp * shifted, 0))
        tl.store(count_ptr + at, tl.sum(safe.to(tl.int32), 0))


@triton.jit
def keep_safe(
    logits_ptr,
    max_ptr,
    cut_ptr,
    count_ptr,
    start_ptr,
    again_ptr,
    active_ptr,
    entry_ptr,
    vocabulary,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """Mark the tokens that are safe in some row, uint8 [V]; keep the entries of rows that are not computed again.

    Entries of a row and block begin at its `start`, int32 [C, B]. An entry is one integer: the bits of e above the 16
    bits of the token's offset in its block; e is bfloat16 in int32, float32 in int64. (Two stores of two widths would
    make the compiler rearrange all their addresses through shared memory.)
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    if tl.load(count_ptr + at) > 0:
        offset = tl.arange(0, BLOCK)
        token = tl.program_id(1) * BLOCK + offset
        there = token < vocabulary
        logits = tl.load(logits_ptr + row * vocabulary + token, mask=there, other=-float("inf"))
        z = logits * inverse_temperature
        safe = there & (z >= tl.load(cut_ptr + row))
        # Read first: it is nearly always marked already, and programs that write to one address wait for each other.
        active = tl.load(active_ptr + token, mask=safe, other=1)
        tl.store(active_ptr + token, 1, mask=safe & (active == 0))
        if tl.load(again_ptr + row) == 0:
            exp = tl.exp(z - tl.load(max_ptr + row))
            start = tl.load(start_ptr + at)
            slot = tl.cumsum(safe.to(tl.int32), 0) - 1
            if entry_ptr.dtype.element_ty == tl.int32:
                bits = exp.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
            else:
                bits = exp.to(tl.int32, bitcast=True).to(tl.int64)
            tl.store(entry_ptr + start + slot, (bits << 16) | offset, mask=safe)


@triton.jit
def spread_kept(
    gradient_ptr,
    row_ptr,
    count_ptr,
    start_ptr,
    entry_ptr,
    column_ptr,
    bound_ptr,
    scale_ptr,
    chosen_ptr,
    chosen_gradient_ptr,
    width,
    first_block,
    blocks,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """scale × e at the columns of the row's kept entries, `chosen_gradient` at the sampled token's, zero elsewhere.

    The gradient's rows are `width` apart; `row_ptr`, [R], says which of the T they are. The stretch of the vocabulary
    begins with block `first_block` of `blocks`; its block b has the columns from bound[b] to bound[b + 1].
    """
    out_ptr = gradient_ptr + tl.program_id(0).to(tl.int64) * width
    row = tl.load(row_ptr + tl.program_id(0))
    block = tl.program_id(1)
    column = tl.load(bound_ptr + block) + tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], gradient_ptr.dtype.element_ty)
    tl.store(out_ptr + column, zeros, mask=column < tl.load(bound_ptr + block + 1))
    tl.debug_barrier()  # other threads of the program write the entries over the zeros
    count = tl.load(count_ptr + row * blocks + first_block + block)
    start = tl.load(start_ptr + row * blocks + first_block + block)
    scale = tl.load(scale_ptr + row)
    chosen = tl.load(chosen_ptr + row) - (first_block + block) * BLOCK
    chosen_gradient = tl.load(chosen_gradient_ptr + row)
    for first in range(0, count, STEP):
        at = first + tl.arange(0, STEP)
        there = at < count
        entry = tl.load(entry_ptr + start + at, mask=there, other=0)
        offset = (entry & 0xFFFF).to(tl.int32)
        if entry_ptr.dtype.element_ty == tl.int32:
            exp = (entry >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
        else:
            exp = (entry >> 16).to(tl.int32).to(tl.float32, bitcast=True)
        gradient = tl.where(offset == chosen, chosen_gradient, scale * exp)
        to = tl.load(column_ptr + block * BLOCK + offset, mask=there, other=0)
        tl.store(out_ptr + to, gradient.to(gradient_ptr.dtype.element_ty), mask=there)


@triton.jit
def spread_computed(
    gradient_ptr,
    logits_ptr,
    row_ptr,
    cut_ptr,
    norm_ptr,
    scale_ptr,
    chosen_ptr,
    chosen_gradient_ptr,
    count,
    width,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """scale × exp(z − norm) where z reaches the row's cut, `chosen_gradient` at the column `chosen`, zero elsewhere.

    Logits and gradient have `width` columns; the first `count` are tokens. `chosen_ptr` and `row_ptr` are [R], other
    numbers per row [T]; a column of −1 is none.
    """
    out = tl.program_id(0).to(tl.int64) * width
    row = tl.load(row_ptr + tl.program_id(0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    z = tl.load(logits_ptr + out + column, mask=there, other=-float("inf")) * inverse_temperature
    safe = (column < count) & (z >= tl.load(cut_ptr + row))
    gradient = tl.where(safe, tl.load(scale_ptr + row) * tl.exp(z - tl.load(norm_ptr + row)), 0.0)
    # Not by its logit, which rounding may put on the other side of the cut than in the forward.
    chosen = tl.load(chosen_ptr + tl.program_id(0))
    gradient = tl.where(column == chosen, tl.load(chosen_gradient_ptr + row), gradient)
    tl.store(gradient_ptr + out + column, gradient.to(gradient_ptr.dtype.element_ty), mask=there)


# Sizes that would be compiled apart where they are 1 or a multiple of 16.
ANY_SIZE = (
    *("rows", "keys", "bias_sequence"),
    *("key_sequence", "key_head", "key_size", "value_sequence", "value_head", "value_key"),
)


@triton.jit(do_not_specialize=ANY_SIZE)
def attend(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    out_ptr,
    rows,
    keys,
    bias_sequence,
    key_sequence,
    key_head,
    key_size,
    value_sequence,
    value_head,
    value_key,
    scaling,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of QUERIES rows of one sequence and key head over its keys, KEYS at a time, by the running softmax.

    `query_ptr` and `out_ptr` are [N, HEADS, rows, SIZE], the keys [N, HEADS, SIZE, keys], the values [N, HEADS, keys,
    SIZE], and `bias_ptr`, which is added to the scores, float32 [N, 1, rows, keys]. WIDTH is SIZE up to a power of 2.
    """
    sequence = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    row = tl.program_id(1).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, WIDTH)
    block = tl.arange(0, KEYS)
    wide = column < SIZE
    there = (row < rows)[:, None] & wide[None, :]
    at = (tl.program_id(0).to(tl.int64) * rows + row)[:, None] * SIZE + column[None, :]
    query = tl.load(query_ptr + at, mask=there, other=0.0)
    key_ptr += sequence * key_sequence + head * key_head
    value_ptr += sequence * value_sequence + head * value_head
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(0, keys, KEYS):
        now = start + block
        key = tl.load(key_ptr + column[:, None] * key_size + now[None, :], mask=wide[:, None], other=0.0)
        bias_at = sequence * bias_sequence + row[:, None] * keys + now[None, :]
        bias = tl.load(bias_ptr + bias_at, mask=(row < rows)[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scaling + bias
        above = tl.maximum(largest, tl.max(score, 1))
        shrunk = tl.exp(largest - above)
        probability = tl.exp(score - above[:, None])
        total = total * shrunk + tl.sum(probability, 1)
        value = tl.load(value_ptr + now[:, None] * value_key + column[None, :], mask=wide[None, :], other=0.0)
        result = result * shrunk[:, None] + tl.dot(probability.to(value.dtype), value, input_precision="ieee")
        largest = above
    tl.store(out_ptr + at, (result / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)
