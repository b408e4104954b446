"""The fast log-prob against the plain definition: values, both gradients, and what only the fast one can get wrong."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tailrl.kernels import cpu_chunks, logprobs
from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.objective.safe_set import TokenLogprobs, safe_set, token_logprobs
from tailrl.runtime.errors import StudyError

LOG_RHOS = [None, 0.0, -1.0, -4.0, -13.0, -1e9, -torch.inf]


def rule(log_rho: float | None) -> tuple[str, float]:
    return ("full", 0.0) if log_rho is None else ("min_p", log_rho)


@dataclass(frozen=True)
class Case:
    hidden_TH: Tensor
    weight_VH: Tensor
    tokens_T: Tensor
    coefficient_T: Tensor

    def plain(self, log_rho: float | None, temperature: float = 1.0, paper_fill: bool = False) -> TokenLogprobs:
        hidden, weight = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (self.hidden_TH, self.weight_VH))
        return token_logprobs(
            hidden @ weight.T / temperature,
            self.tokens_T,
            *rule(log_rho),
            paper_fill,
        )

    def fast(self, log_rho: float | None, temperature: float = 1.0, paper_fill: bool = False) -> TokenLogprobs:
        return constrained_logprobs(
            self.hidden_TH, self.weight_VH, self.tokens_T, *rule(log_rho), temperature, paper_fill
        )

    def gradients(self, found: TokenLogprobs) -> tuple[Tensor, ...]:
        loss = (self.coefficient_T * found.logp_T).sum()
        return torch.autograd.grad(loss, (self.hidden_TH, self.weight_VH))


def make_case(
    rows: int = 70, vocabulary: int = 300, width: int = 8, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> Case:
    """Random rows; scale 1 gives logits of standard deviation √width. A third of the coefficients is zero."""
    generator = torch.Generator().manual_seed(rows * vocabulary + width)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    tokens_T = torch.randint(vocabulary, (rows,), generator=generator)
    coefficient_T = normal(rows).masked_fill(torch.rand(rows, generator=generator) < 1 / 3, 0.0)
    hidden_TH, weight_VH = (scale * normal(rows, width)).to(dtype), normal(vocabulary, width).to(dtype)
    if rows:  # the most probable token is inside every set, random ones are mostly outside
        tokens_T[::2] = (hidden_TH[::2].float() @ weight_VH.float().T).argmax(-1)
    return Case(
        hidden_TH.requires_grad_(),
        weight_VH.requires_grad_(),
        tokens_T,
        coefficient_T.to(torch.promote_types(dtype, torch.float32)),
    )


def assert_same(
    case: Case, log_rho: float | None, tolerance: float = 1e-9, temperature: float = 1.0, paper_fill: bool = False
) -> None:
    assert_equal(
        case, case.plain(log_rho, temperature, paper_fill), case.fast(log_rho, temperature, paper_fill), tolerance
    )


def assert_equal(case: Case, plain: TokenLogprobs, fast: TokenLogprobs, tolerance: float = 1e-9) -> None:
    for field in fields(TokenLogprobs):
        expected, found = getattr(plain, field.name), getattr(fast, field.name)
        assert found.dtype == expected.dtype, field.name
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=field.name)
        assert found.requires_grad == (field.name == "logp_T")
    # A sum over rows is as exact as its largest term.
    unit = max([1.0, *case.hidden_TH.abs().flatten().tolist()])
    for expected, found in zip(case.gradients(plain), case.gradients(fast), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * unit)


@pytest.fixture(params=["one_chunk", "many_chunks", "nothing_kept", "everything_kept", "some_kept"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way through the code, on shapes that are small enough for a test."""
    if request.param != "one_chunk":
        monkeypatch.setattr(cpu_chunks, "CHUNK_ROWS", 16)
        monkeypatch.setattr(cpu_chunks, "BLOCK_TOKENS", 64)
        monkeypatch.setattr(cpu_chunks, "CACHED_TOKENS", 48)
    if request.param == "nothing_kept":
        monkeypatch.setattr(cpu_chunks, "KEPT_DENSITY", -1.0)
    if request.param == "everything_kept":
        monkeypatch.setattr(cpu_chunks, "KEPT_DENSITY", 1.0)
    if request.param == "some_kept":
        monkeypatch.setattr(logprobs, "KEPT_BYTES", 6000)
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("paper_fill", [False, True])
@pytest.mark.parametrize("log_rho", LOG_RHOS)
def test_it_is_the_plain_definition(log_rho: float | None, paper_fill: bool) -> None:
    assert_same(make_case(), log_rho, temperature=0.7, paper_fill=paper_fill)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("name", "low", "high"), [("min_p", -6.0, 0.0), ("entropy", -6.0, 0.0), ("top_k", 1.0, 40.0), ("top_p", 0.1, 1.0)]
)
def test_every_rule_with_a_threshold_for_each_row(name: str, low: float, high: float) -> None:
    case = make_case()
    threshold_T1 = torch.linspace(low, high, len(case.tokens_T), dtype=torch.float64)[:, None]
    plain = token_logprobs(case.hidden_TH @ case.weight_VH.T, case.tokens_T, name, threshold_T1)
    fast = constrained_logprobs(case.hidden_TH, case.weight_VH, case.tokens_T, name, threshold_T1)
    assert len(plain.kept_vocab_T.unique()) > 10
    assert_equal(case, plain, fast)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 530),
    vocabulary=st.integers(1, 400),
    width=st.integers(1, 9),
    scale=st.floats(0.01, 6.0),
    log_rho=st.none() | st.floats(-30.0, 0.0),
    temperature=st.floats(0.2, 3.0),
    paper_fill=st.booleans(),
)
def test_random_shapes(
    rows: int, vocabulary: int, width: int, scale: float, log_rho: float | None, temperature: float, paper_fill: bool
) -> None:
    assert_same(make_case(rows, vocabulary, width, scale), log_rho, 1e-8, temperature, paper_fill)


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257])
def test_any_number_of_rows(rows: int) -> None:
    case = make_case(rows)
    assert_same(case, -3.0)
    assert_same(case, None)
    for name, number in (("entropy", -3.0), ("top_k", 5.0), ("top_p", 0.5)):
        plain = token_logprobs(case.hidden_TH @ case.weight_VH.T, case.tokens_T, name, number)
        assert_equal(case, plain, constrained_logprobs(case.hidden_TH, case.weight_VH, case.tokens_T, name, number))


@pytest.mark.parametrize("log_rho", [None, -1.0, -6.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_narrow_inputs_make_float32_logits(dtype: torch.dtype, tolerance: float, log_rho: float | None) -> None:
    case = make_case(dtype=dtype)
    assert_same(case, log_rho, tolerance)
    # The values do not know that the inputs were narrow: nothing was rounded on the way.
    torch.testing.assert_close(case.fast(log_rho).logp_T, case.plain(log_rho).logp_T, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("paper_fill", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1e2, 1e6])
def test_extreme_logits(scale: float, paper_fill: bool) -> None:
    case = make_case(scale=scale)
    for log_rho in (None, -13.0):
        assert_same(case, log_rho, 1e-7, paper_fill=paper_fill)


def test_thousands_of_equal_terms_are_added_precisely() -> None:
    """One row keeps 4,096 tokens of equal probability, the others one each: few enough for sums over kept entries."""
    weight = torch.tensor([[0.0, 0.0]] + [[-1.22e-4, float(token == 7)] for token in range(1, 4096)])
    case = Case(torch.tensor([[0.0, 60.0], [0.0, 60.0], [1.0, 0.0]]), weight, torch.tensor([7, 7, 11]), torch.ones(3))
    found, exact = case.fast(-13.0), replace(case, hidden_TH=case.hidden_TH.double()).fast(-13.0)
    assert found.kept_vocab_T.tolist() == [1, 1, 4096] and found.log_kept_T.max() <= 0
    assert max((found.logp_T - exact.logp_T).abs().max(), (found.entropy_T - exact.entropy_T).abs().max()) < 1e-6


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offset", [-400.0, 400.0])
def test_a_shift_of_all_logits_matters_only_to_the_papers_fill(offset: float) -> None:
    case = make_case()
    ones_T1, offset_V1 = torch.ones(70, 1, dtype=torch.float64), torch.full((300, 1), offset, dtype=torch.float64)
    shifted = replace(
        case,
        hidden_TH=torch.cat([case.hidden_TH.detach(), ones_T1], 1).requires_grad_(),
        weight_VH=torch.cat([case.weight_VH.detach(), offset_V1], 1).requires_grad_(),
    )
    torch.testing.assert_close(shifted.fast(-3.0).logp_T, case.fast(-3.0).logp_T)
    # Far below −50 the filled tokens take all the mass, far above none: neither may overflow.
    assert_same(shifted, -3.0, 1e-8, paper_fill=True)


@pytest.mark.usefixtures("way")
def test_one_token_safe_everywhere() -> None:
    case = make_case()
    assert (case.fast(0.0).kept_vocab_T == 1).all() and (case.fast(0.0).logp_T == 0).all()
    assert all(gradient.abs().max() < 1e-14 for gradient in case.gradients(case.fast(0.0)))


@pytest.mark.usefixtures("way")
def test_pruned_tokens_have_exactly_zero_gradient() -> None:
    case = make_case(rows=40, scale=3.0, dtype=torch.float32)
    safe_TV = safe_set((case.hidden_TH @ case.weight_VH.T).detach(), "min_p", -1.5)
    active_T = (case.coefficient_T != 0) & safe_TV.gather(1, case.tokens_T[:, None])[:, 0]
    d_hidden, d_weight = case.gradients(case.fast(-1.5))
    never_V = ~safe_TV[active_T].any(0)
    assert 0 < never_V.sum() < 300
    assert (d_weight[never_V] == 0).all()
    assert (d_hidden[~active_T] == 0).all()


def test_an_all_safe_set_is_the_full_vocabulary_to_the_bit() -> None:
    case = make_case(dtype=torch.float32)
    for found, expected in zip(case.gradients(case.fast(-1e9)), case.gradients(case.fast(None)), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(case.fast(-1e9).logp_T, case.fast(None).logp_T)
    assert (case.fast(None).log_kept_T == 0).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("log_rho", [None, -2.0])
def test_rows_without_a_coefficient_cost_and_send_nothing(log_rho: float | None) -> None:
    case = make_case()
    half, nothing = (
        replace(case, coefficient_T=case.coefficient_T * mask_T)
        for mask_T in (torch.arange(70) // 10 % 2, torch.zeros(70))
    )
    assert_same(half, log_rho)
    assert all((gradient == 0).all() for gradient in nothing.gradients(nothing.fast(log_rho)))


@pytest.mark.parametrize("log_rho", [None, -2.0])
def test_only_the_needed_gradients_are_computed(log_rho: float | None) -> None:
    case = make_case()
    d_hidden, d_weight = case.gradients(case.fast(log_rho))
    for hidden, weight in ((True, False), (False, True)):
        part = replace(
            case,
            hidden_TH=case.hidden_TH.detach().requires_grad_(hidden),
            weight_VH=case.weight_VH.detach().requires_grad_(weight),
        )
        (part.fast(log_rho).logp_T * part.coefficient_T).sum().backward()
        for tensor, gradient, wanted in ((part.hidden_TH, d_hidden, hidden), (part.weight_VH, d_weight, weight)):
            assert torch.equal(tensor.grad, gradient) if wanted else tensor.grad is None


def test_without_gradients_the_values_are_the_same() -> None:
    case = make_case()
    with torch.no_grad():
        found = case.fast(-2.0).logp_T
    assert not found.requires_grad
    assert torch.equal(found, case.fast(-2.0).logp_T.detach())


def test_twice_in_one_graph_and_a_coefficient_made_from_the_log_probs() -> None:
    case = make_case()

    def loss(score: Callable[..., TokenLogprobs]) -> Tensor:
        first, second = score(-2.0), score(None, 0.5)
        weight_T = (first.logp_T.detach() - 1.0).exp().clamp(max=0.5)
        return (weight_T * case.coefficient_T * first.logp_T).sum() + (second.logp_T**2).sum()

    inputs = (case.hidden_TH, case.weight_VH)
    expected, found = torch.autograd.grad(loss(case.plain), inputs), loss(case.fast)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(found, inputs, retain_graph=True), expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("paper_fill", [False, True])
@pytest.mark.parametrize("log_rho", [-1.0, *(pytest.param(rho, marks=pytest.mark.slow) for rho in (None, -5.0))])
def test_finite_differences(log_rho: float | None, paper_fill: bool) -> None:
    case = make_case(rows=20, vocabulary=30, width=3)
    logits = (case.hidden_TH @ case.weight_VH.T).detach()
    if log_rho is not None:  # no logit may cross the cut under the differences
        assert (logits - logits.amax(-1, keepdim=True) - log_rho).abs().min() > 1e-4

    def score(hidden: Tensor, weight: Tensor) -> Tensor:
        return constrained_logprobs(hidden, weight, case.tokens_T, *rule(log_rho), paper_fill=paper_fill).logp_T

    assert torch.autograd.gradcheck(score, (case.hidden_TH, case.weight_VH), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("log_rho", [None, -13.0])
@pytest.mark.parametrize("where", ["hidden states", "weight"])
def test_inputs_that_are_not_finite_are_refused(bad: float, log_rho: float | None, where: str) -> None:
    case = make_case(dtype=torch.float32)
    with torch.no_grad():
        (case.weight_VH if where == "weight" else case.hidden_TH)[3, 2] = bad
    with pytest.raises(StudyError, match=where):
        case.fast(log_rho)


def test_logits_that_overflow_are_refused() -> None:
    case = make_case(dtype=torch.float32)
    with torch.no_grad():
        case.hidden_TH[5].mul_(1e36)
        case.weight_VH.mul_(1e4)
    for log_rho in (None, -13.0):
        with pytest.raises(StudyError, match="logit"):
            case.fast(log_rho)


def saved_bytes(case: Case, log_rho: float | None) -> int:
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        case.fast(log_rho)
    return sum(sizes)


def test_the_kept_entries_are_the_safe_set_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(rows=512, vocabulary=4000, dtype=torch.float32)
    kept, rest, counts = int(case.plain(-6.0).kept_vocab_T.sum()), saved_bytes(case, None), 2 * 4 * 4000
    assert 0.02 < kept / (512 * 4000) < 0.4
    assert saved_bytes(case, -6.0) == rest + 5 * kept + counts
    monkeypatch.setattr(logprobs, "KEPT_BYTES", (5 * kept + counts) * 2 // 3)
    assert saved_bytes(case, -6.0) < rest + (5 * kept + counts) * 2 // 3
    assert_same(case, -6.0, 1e-4)


class NewStorage(TorchDispatchMode):
    """Bytes of every storage that an operation makes, views and results in place left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = {t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)}
        self.sizes += [storage.nbytes() for storage in made if storage.data_ptr() not in given]
        return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("log_rho", [None, -13.0, -2.0])
def test_the_hidden_states_are_never_copied_whole(
    monkeypatch: pytest.MonkeyPatch, log_rho: float | None, temperature: float
) -> None:
    """Of all that is as large, only their gradient; kept entries, found again or not, have a bound of their own."""
    monkeypatch.setattr(cpu_chunks, "CHUNK_ROWS", 16)
    monkeypatch.setattr(logprobs, "KEPT_BYTES", 4000)
    case = make_case(rows=640, vocabulary=100, width=32, dtype=torch.float32)
    with NewStorage() as made:
        case.gradients(case.fast(log_rho, temperature))
    assert sum(size >= 640 * 32 * 4 for size in made.sizes) == 1
    assert sorted(made.sizes)[-2] < 640 * 32 * 4 / 2


def test_the_kept_entries_are_freed_after_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    kept: list[weakref.ref[Tensor]] = []

    class Watched(cpu_chunks.KeptEntries):
        def __init__(self, rows: int, weight_VH: Tensor, most_bytes: int) -> None:
            super().__init__(rows, weight_VH, most_bytes)
            kept.append(weakref.ref(self.exp_m.untyped_storage()))

    monkeypatch.setattr(logprobs, "KeptEntries", Watched)
    found = case.fast(-1.0)
    assert len(kept) == 1 and kept[0]() is not None
    found.logp_T.sum().backward()
    gc.collect()
    assert kept[0]() is None, "the diagnostics hold the log-probs until the end of a step"
