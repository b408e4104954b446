"""The CUDA path of the constrained log-prob against the plain definition in float64.

`test_cuda.py` runs it on a CPU, in a process where Triton interprets its kernels. On a GPU, which compiles them:
PYTHONPATH=workflow pytest --noconftest tests/unit/kernels/kernels_logprobs.py
"""

from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tailrl.kernels import cuda_passes
from tailrl.kernels.cuda import constrained_logprobs
from tailrl.kernels.triton_kernels import keep_safe, safe_sums
from tailrl.objective.safe_set import TokenLogprobs, safe_set, token_logprobs
from tailrl.runtime.errors import StudyError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
BLOCK, ALIGNED = 64, 8
ROWS, VOCABULARY, WIDTH = 11, 139, 9
ONE_PART, PARTS = 2**30, 2300  # bytes of a matrix: all of it, or 8 rows of logits and one block of their gradient


@dataclass(frozen=True)
class Case:
    hidden_TH: Tensor
    weight_VH: Tensor
    tokens_T: Tensor
    coefficient_T: Tensor
    log_rho: float | Tensor
    temperature: float
    paper_fill: bool

    def fast(self) -> TokenLogprobs:
        rest = (self.tokens_T, self.log_rho, self.temperature, self.paper_fill)
        return constrained_logprobs(self.hidden_TH, self.weight_VH, *rest)

    def gradients(self, found: TokenLogprobs | None = None) -> tuple[Tensor, ...]:
        loss = (self.coefficient_T * (found or self.fast()).logp_T).sum()
        return torch.autograd.grad(loss, (self.hidden_TH, self.weight_VH))

    def double(self) -> "Case":
        """The same on the CPU in float64."""
        tensors = (self.hidden_TH, self.weight_VH, self.tokens_T, self.coefficient_T)
        hidden, weight, tokens, coefficient = (tensor.detach().cpu() for tensor in tensors)
        log_rho = self.log_rho.cpu().double() if isinstance(self.log_rho, Tensor) else self.log_rho
        inputs = (hidden.double().requires_grad_(), weight.double().requires_grad_())
        return Case(*inputs, tokens, coefficient.double(), log_rho, self.temperature, self.paper_fill)

    def logits(self) -> Tensor:
        return self.hidden_TH @ self.weight_VH.T / self.temperature

    def safe(self) -> Tensor:
        return safe_set(self.double().logits().detach(), "min_p", self.double().log_rho)


def make_case(
    rows: int = ROWS,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
    log_rho: float | Tensor = -4.0,
    paper_fill: bool = False,
    temperature: float = 0.8,
) -> Case:
    """Random rows, logits of standard deviation √width / temperature; a third of the coefficients is zero."""
    generator = torch.Generator().manual_seed(rows * vocabulary + width)
    normal = partial(torch.randn, generator=generator)
    hidden_TH, weight_VH = normal(rows, width).to(dtype), normal(vocabulary, width).to(dtype)
    tokens_T = torch.randint(vocabulary, (rows,), generator=generator)
    # The most probable token is inside every set; random ones are mostly outside.
    tokens_T[::2] = (hidden_TH[::2].double() @ weight_VH.double().T).argmax(-1)
    coefficient_T = normal(rows).masked_fill(torch.rand(rows, generator=generator) < 1 / 3, 0.0)
    hidden_TH, weight_VH, tokens_T, coefficient_T = (
        tensor.to(DEVICE) for tensor in (hidden_TH, weight_VH, tokens_T, coefficient_T)
    )
    log_rho = log_rho.to(DEVICE) if isinstance(log_rho, Tensor) else log_rho
    inputs = (hidden_TH.requires_grad_(), weight_VH.requires_grad_())
    return Case(*inputs, tokens_T, coefficient_T, log_rho, temperature, paper_fill)


def assert_same(case: Case) -> None:
    """Values to float32, gradients to the rounding of the inputs' dtype."""
    exact, found = case.double(), case.fast()
    logits = exact.logits()
    above = logits - logits.amax(-1, keepdim=True) - exact.log_rho
    assert not ((above != 0) & (above.abs() < 1e-5)).any(), "a logit within rounding of its cut"
    expected = token_logprobs(logits, exact.tokens_T, "min_p", exact.log_rho, exact.paper_fill)
    for field in fields(TokenLogprobs):
        value, wanted = getattr(found, field.name), getattr(expected, field.name)
        assert value.dtype == (torch.float32 if wanted.is_floating_point() else wanted.dtype), field.name
        assert value.requires_grad == (field.name == "logp_T")
        torch.testing.assert_close(value.cpu(), wanted.to(value.dtype), rtol=1e-5, atol=2e-5, msg=field.name)
    loss = (exact.coefficient_T * expected.logp_T).sum()
    *wanted, by_logits = torch.autograd.grad(loss, (exact.hidden_TH, exact.weight_VH, logits))
    # In bfloat16 an entry of the gradient by the logits is rounded twice, and the sum over entries once. A GPU rounds
    # by 2⁻⁸, the interpreter, which truncates, by 2⁻⁷. In float32 every exp(z) has the error of its logit.
    narrow = case.hidden_TH.dtype == torch.bfloat16
    relative = (2.0**-7 if DEVICE == "cuda" else 2.0**-6) if narrow else 1e-5
    entries = by_logits.abs() / case.temperature
    bounds = (entries @ exact.weight_VH.abs(), entries.T @ exact.hidden_TH.abs())
    for gradient, value, bound in zip(case.gradients(found), wanted, bounds, strict=True):
        assert gradient.dtype == case.hidden_TH.dtype
        error = (gradient.cpu().double() - value).abs()
        assert (error <= relative * (bound + value.abs()) + 1e-6).all(), error.max()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and matrices, so that a small vocabulary has several."""
    monkeypatch.setattr(cuda_passes, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(cuda_passes, "ENTRIES_STEP", 16)
    monkeypatch.setattr(cuda_passes, "ALIGNED", ALIGNED)
    monkeypatch.setattr(cuda_passes, "KEPT_DENSITY", 1.0)
    monkeypatch.setattr(cuda_passes, "MATRIX_BYTES", PARTS)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The M, K, N of every matrix product, in order."""
    seen: list[tuple[int, int, int]] = []
    product = cuda_passes.product

    def watched(left_MK: Tensor, right_KN: Tensor) -> Tensor:
        seen.append((*left_MK.shape, right_KN.shape[1]))
        return product(left_MK, right_KN)

    monkeypatch.setattr(cuda_passes, "product", watched)
    return seen


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[cuda_passes.KeptEntries]:
    """What each forward kept."""
    seen: list[cuda_passes.KeptEntries] = []
    trimmed = cuda_passes._trimmed

    def watched(found: cuda_passes.KeptEntries, used: int) -> cuda_passes.KeptEntries:
        seen.append(trimmed(found, used))
        return seen[-1]

    monkeypatch.setattr(cuda_passes, "_trimmed", watched)
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paper_fill", [False, True])
@pytest.mark.parametrize("log_rho", [-torch.inf, 0.0, -4.0, -1e9])
def test_it_is_the_plain_definition(log_rho: float, paper_fill: bool, dtype: torch.dtype) -> None:
    assert_same(make_case(dtype=dtype, log_rho=log_rho, paper_fill=paper_fill))


@pytest.mark.parametrize("log_rho", [-torch.inf, -4.0])
def test_matrices_in_one_part(log_rho: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_passes, "MATRIX_BYTES", ONE_PART)
    assert_same(make_case(log_rho=log_rho))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paper_fill", [False, True])
def test_each_row_its_own_threshold(dtype: torch.dtype, paper_fill: bool) -> None:
    log_rho_T1 = torch.tensor([-torch.inf, 0.0, -3.0, -1e9, -6.0, -0.5, -2.0]).repeat(2)[:ROWS, None]
    case = make_case(dtype=dtype, log_rho=log_rho_T1, paper_fill=paper_fill)
    assert_same(case)
    kept_T = case.fast().kept_vocab_T
    assert (kept_T[::7] == VOCABULARY).all() and (kept_T[1::7] == 1).all() and kept_T.unique().numel() > 5


@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"),
    [(1, 1, 1), (1, 300, 3), (3, BLOCK, 5), (9, BLOCK + 1, 8), (17, 7, 2), (2, 5 * BLOCK - 1, 16)],
)
@pytest.mark.parametrize("log_rho", [-torch.inf, -3.0])
def test_any_shape(rows: int, vocabulary: int, width: int, log_rho: float) -> None:
    assert_same(make_case(rows, vocabulary, width, log_rho=log_rho))


@pytest.mark.parametrize("log_rho", [-torch.inf, -3.0])
def test_no_rows_at_all(log_rho: float) -> None:
    case = make_case(rows=0, log_rho=log_rho)
    assert case.fast().logp_T.shape == (0,)
    assert all((gradient == 0).all() for gradient in case.gradients())


def test_inputs_of_two_dtypes_are_multiplied_in_float32() -> None:
    case = make_case(dtype=torch.bfloat16)
    wide = replace(case, weight_VH=case.weight_VH.detach().float().requires_grad_())
    torch.testing.assert_close(wide.fast().logp_T, case.fast().logp_T)
    assert [gradient.dtype for gradient in wide.gradients()] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_rows_without_room_are_computed_again(
    share: float, dtype: torch.dtype, kept: list[cuda_passes.KeptEntries], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(dtype=dtype, rows=2 * ALIGNED + 1)
    entry_bytes = 4 if dtype == torch.bfloat16 else 8
    monkeypatch.setattr(cuda_passes, "KEPT_BYTES", int(share * entry_bytes * int(case.safe()[: 2 * ALIGNED].sum())))
    assert_same(case)
    again_T = kept[-1].again_T != 0
    assert again_T.any() and again_T.all() == (share == 0.0)


def test_the_kept_entries_are_the_safe_set(kept: list[cuda_passes.KeptEntries]) -> None:
    case = make_case()
    case.fast()
    assert len(kept[-1].entry_n) == case.safe().sum() and not kept[-1].again_T.any()
    assert torch.equal(kept[-1].active_V.cpu() != 0, case.safe().any(0))
    with torch.no_grad():
        case.fast()
    assert len(kept[-1].entry_n) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_no_row_keeps_is_in_no_product(
    dtype: torch.dtype, products: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_passes, "MATRIX_BYTES", 1)  # a block at a time
    case = make_case(dtype=dtype, log_rho=-2.0)
    with torch.no_grad():  # a block and a few more that no row keeps
        case.hidden_TH[:, 0] = 4.0
        case.weight_VH[BLOCK : 2 * BLOCK + 5, 0] = -20.0
    case = replace(case, tokens_T=case.logits().argmax(-1))
    safe_V = case.safe().any(0)
    found = case.fast()
    products.clear()
    d_hidden, d_weight = case.gradients(found)
    counts = [int(block_V.sum()) for block_V in safe_V.split(BLOCK)]
    assert 0 in counts
    columns = [-(-count // ALIGNED) * ALIGNED for count in counts if count > 0]
    assert [k for _, k, _ in products[::2]] == columns == [m for m, _, _ in products[1::2]]
    assert (d_weight[~safe_V.to(DEVICE)] == 0).all() and (d_weight[safe_V.to(DEVICE)] != 0).any()
    assert (d_hidden[case.coefficient_T == 0] == 0).all()


def test_a_block_under_the_cut_is_not_read() -> None:
    """It holds nan here, which would show."""
    logits_CV = torch.zeros(2, 3 * BLOCK, device=DEVICE)
    logits_CV[:, BLOCK : 2 * BLOCK] = torch.nan
    block_max_CB = torch.tensor([[0.0, -9.0, 0.0]], device=DEVICE).repeat(2, 1)
    max_C, cut_C = torch.zeros(2, device=DEVICE), torch.full((2,), -1.0, device=DEVICE)
    safe_CB, moment_CB = torch.zeros(2, 2, 3, device=DEVICE)
    count_CB = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    sums = (safe_CB, moment_CB, count_CB)
    safe_sums[2, 3](logits_CV, block_max_CB, max_C, cut_C, *sums, 3 * BLOCK, 1.0, BLOCK=BLOCK)
    assert count_CB.tolist() == [[BLOCK, 0, BLOCK]] * 2 and safe_CB.tolist() == [[BLOCK, 0.0, BLOCK]] * 2
    start_CB, again_C = torch.zeros_like(count_CB), torch.zeros(2, dtype=torch.uint8, device=DEVICE)
    again_C[1] = 1
    start_CB[0, 2] = BLOCK
    active_V = torch.zeros(3 * BLOCK, dtype=torch.uint8, device=DEVICE)
    entry_n = torch.full((2 * BLOCK,), -1, dtype=torch.int64, device=DEVICE)
    places = (count_CB, start_CB, again_C, active_V, entry_n)
    keep_safe[2, 3](logits_CV, max_C, cut_C, *places, 3 * BLOCK, 1.0, BLOCK=BLOCK)
    assert active_V.view(3, BLOCK).tolist() == [[1] * BLOCK, [0] * BLOCK, [1] * BLOCK]
    assert (entry_n & 0xFFFF).tolist() == [*range(BLOCK)] * 2
    assert (entry_n >> 16).int().view(torch.float32).tolist() == [1.0] * 2 * BLOCK


@pytest.mark.parametrize("log_rho", [-torch.inf, -5.0])
def test_rows_without_a_coefficient_are_in_no_product(log_rho: float, products: list[tuple[int, int, int]]) -> None:
    case = make_case(log_rho=log_rho)
    found = case.fast()
    half_T = torch.arange(ROWS, device=DEVICE) % 2 == 0
    products.clear()
    d_hidden, _ = torch.autograd.grad(
        found.logp_T, (case.hidden_TH, case.weight_VH), half_T.float() * case.coefficient_T, retain_graph=True
    )
    pushed_T = half_T & (case.coefficient_T != 0) & ~found.outside_T
    assert 0 < pushed_T.sum() < ROWS
    by_inputs = [shape for shape in products if shape[2] == WIDTH]  # others make logits again
    assert {m for m, _, _ in by_inputs[::2]} == {k for _, k, _ in by_inputs[1::2]} == {int(pushed_T.sum())}
    assert (d_hidden[~pushed_T] == 0).all() and (d_hidden[pushed_T] != 0).any()
    products.clear()
    for gradient in torch.autograd.grad(found.logp_T, (case.hidden_TH, case.weight_VH), torch.zeros_like(found.logp_T)):
        assert (gradient == 0).all()
    assert products == []


@pytest.mark.parametrize("log_rho", [-torch.inf, -2.0])
def test_only_the_needed_gradients_are_computed(log_rho: float) -> None:
    case = make_case(log_rho=log_rho)
    d_hidden, d_weight = case.gradients()
    for hidden, weight in ((True, False), (False, True)):
        part = replace(
            case,
            hidden_TH=case.hidden_TH.detach().requires_grad_(hidden),
            weight_VH=case.weight_VH.detach().requires_grad_(weight),
        )
        (part.fast().logp_T * part.coefficient_T).sum().backward()
        for tensor, gradient, wanted in ((part.hidden_TH, d_hidden, hidden), (part.weight_VH, d_weight, weight)):
            assert torch.equal(tensor.grad, gradient) if wanted else tensor.grad is None
    with torch.no_grad():
        values = case.fast().logp_T
    assert not values.requires_grad and torch.equal(values, case.fast().logp_T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_each_time_and_twice_through_one_graph(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype)
    loss = (case.coefficient_T * case.fast().logp_T).sum()
    first = torch.autograd.grad(loss, (case.hidden_TH, case.weight_VH), retain_graph=True)
    second = torch.autograd.grad(loss, (case.hidden_TH, case.weight_VH))
    for gradients in (second, case.gradients()):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients, strict=True))


def test_an_all_safe_set_is_the_full_vocabulary() -> None:
    """A mask that prunes nothing goes another way, through entries; the sums are the same to the bit."""
    all_safe, full = make_case(log_rho=-1e9), make_case(log_rho=-torch.inf)
    assert torch.equal(all_safe.fast().logp_full_T, full.fast().logp_full_T)
    for found, expected in zip(all_safe.gradients(), full.gradients(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_confident_rows_gradient_survives_bfloat16() -> None:
    """1 − p of the sampled token is not made from a rounded p."""
    case = make_case(dtype=torch.bfloat16, log_rho=-13.0)
    with torch.no_grad():
        case.hidden_TH[:, 0] = 8.0
        case.weight_VH[7, 0] = 4.0
    case = replace(case, tokens_T=torch.full_like(case.tokens_T, 7))
    assert (case.fast().logp_T.exp() > 0.999).sum() > 3
    assert_same(case)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("log_rho", [-torch.inf, -13.0])
def test_logits_that_overflow_are_refused(log_rho: float) -> None:
    case = make_case(log_rho=log_rho)
    with torch.no_grad():
        case.hidden_TH[5].mul_(1e36)
        case.weight_VH.mul_(1e4)
    with pytest.raises(StudyError, match="logit"):
        case.fast()
