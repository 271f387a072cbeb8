"""Test inputs for the fused step, and checks of its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gated_kernels.check import error
from gated_kernels.fused_step.arguments import Codes, Gate, MemoryWeight, StepCache, StepConfig, StepInputs
from gated_kernels.fused_step.naive import naive_fused_step as reference

Step = Callable[[StepInputs, StepCache, StepConfig], Tensor]
Given = tuple[StepInputs, StepCache, StepConfig]
NANS = 0x7FC07FC0  # a word that is NaN in fp32, and twice in bf16 and fp16
Kind = Literal["gla", "liger-paper"]


class Case(NamedTuple):
    kind: Kind = "gla"
    seen: int = 200  # tokens before this one
    padded: bool = False  # whether some of them are padding, and in the first row this one
    W: int = 64
    M: int = 4
    B: int = 2
    G: int = 2
    R: int = 2
    D: int = 64
    F: int = 128
    C: int | None = None  # rotated channels; None: all
    gate: Literal["head", "constant", "none"] = "head"
    turn: int = 7
    dtype: torch.dtype = torch.float32


CASES = {
    "SmolLM2": Case(B=1, G=3, R=3),
    "256 codes, bf16": Case(F=256, dtype=torch.bfloat16),
    "1024 codes": Case(G=1, F=1024),
    "heads of 128, bf16": Case(G=1, R=4, D=128, dtype=torch.bfloat16),
    "heads of 128": Case(G=1, R=4, D=128, F=256),
    "heads of 80, fp16": Case(G=1, D=80, C=32, F=100, dtype=torch.float16),
    "17 rows": Case(B=17, G=1, R=1, D=16, F=16, W=5, M=2),
    "17 query heads a group": Case(B=1, G=1, R=17, D=16, F=16, W=5, M=2),
    "small": Case(D=8, F=5, W=4, M=3),
    "no rotary": Case(D=16, F=16, C=0, W=9),
    "constant gate": Case(D=16, F=32, gate="constant", W=9),
    "no gate, no sinks": Case(D=16, F=32, gate="none", M=0, W=9),
    "window of 2": Case(D=16, F=16, W=2, M=1),
    "window of 150": Case(G=1, D=16, F=16, W=150, M=20, dtype=torch.bfloat16),
    "partly filled ring, nothing in memory": Case(seen=20, D=16, F=16),
    "sinks yet to come": Case(seen=2, D=16, F=16, W=9),
    "padding": Case(padded=True, D=16, F=16, W=9),
    "padding, bf16": Case(seen=40, padded=True, dtype=torch.bfloat16),
    "liger-paper, bf16": Case("liger-paper", M=0, G=1, R=4, D=128, dtype=torch.bfloat16),
    "liger-paper": Case("liger-paper", M=0, G=3, R=3, B=1),
    "liger-paper, heads of 80, padding": Case("liger-paper", M=0, D=80, padded=True, W=5),
    "liger-paper, nothing in memory": Case("liger-paper", M=0, D=16, seen=0),
}


def inputs(case: Case) -> Given:
    """The arguments of a step. The ring has wrapped around. The state is empty if no token has left the window yet."""
    B, G, R, D, M, P = case.B, case.G, case.R, case.D, case.M, case.W - 1
    H, C, E = G * R, D if case.C is None else case.C, D // 2
    random = torch.Generator().manual_seed(case.D)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    def head(*shape: int) -> Tensor:
        return normal(*shape, dtype=case.dtype)

    def sinks() -> Tensor | None:
        return head(B, M, G, D) if M else None

    codes, gla = None, case.kind == "gla"
    if gla:
        turns = (normal(n, D, E) / D**0.5 for n in (H, G))
        q_proj, k_proj = turns
        taus = (2 + 0.1 * normal(n) for n in (H, G))
        q_log_inv_temperature, k_log_inv_temperature = taus
        codes = Codes(
            q_proj,
            normal(H, E) / 9,
            q_log_inv_temperature,
            k_proj,
            normal(G, E) / 9,
            k_log_inv_temperature,
            normal(G, case.F, E) / max(E, 1) ** 0.5,
        )
    F = case.F if gla else D
    gate = None if gla else Gate("keys", None, 16.0)
    if gla and case.gate != "none":
        gate = Gate(case.gate, 2 + normal(G, 1 if case.gate == "head" else F), 16.0)
    memory_weight = MemoryWeight(1 + 0.1 * normal(H), normal(H, D), normal(H)) if gla else None
    valid = torch.ones(B, case.seen + 1, dtype=torch.bool)
    if case.padded:
        valid = torch.rand(B, case.seen + 1, generator=random) < 0.6
        valid[0, -1] = False
    position = torch.where(valid, valid.cumsum(1) - 1, -1)
    position_BS = torch.cat((position.new_full((B, P), -1), position), 1)[:, -case.W :]
    gone = position[:, : max(0, case.seen - P)]  # no longer in the window
    far = gone.amax(1, keepdim=True) if gone.shape[1] else position.new_full((B, 1), -1)
    visible = (torch.arange(M) <= far) if M else None
    angle = normal(B, max(C // 2, 1)).repeat(1, 2)[:, :C] if C else None
    token = StepInputs(
        head(B, H, D) * 2,
        head(B, G, D),
        head(B, G, D),
        None if angle is None else angle.cos().to(case.dtype),
        None if angle is None else angle.sin().to(case.dtype),
        position_BS.contiguous(),
        visible,
        D**-0.5,
    )
    written = case.seen > 0 if not gla else bool((far >= M).any())
    state = normal(B, G, F, D + 1)
    cache = StepCache(
        head(B, P, G, D),
        head(B, P, G, D),
        head(B, P, G, D) if gla else None,
        sinks(),
        sinks(),
        state[..., :D].contiguous() * written,
        state[..., D].abs() * written if gla else None,
        torch.tensor([case.turn + P]),
    )
    return token, cache, StepConfig(codes, gate, memory_weight)


def changed(x: Any, change: Any) -> Any:
    """The nested tuples that `inputs` returns, with `change` applied to every tensor."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple):
        parts = [changed(part, change) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def placed(given: Given, device: str, dtype: torch.dtype | None = None) -> Given:
    """A copy on the device, with floating-point tensors in `dtype` if it is given."""
    return changed(given, lambda x: x.to(device, dtype if x.is_floating_point() else None, copy=True))


def in_pages(cache: StepCache, gap: int = 3) -> tuple[Tensor, StepCache]:
    """A copy of a contiguous cache with every row in a page, and the pages, int32 words [pages,words].

    Pages are in another order than rows. Each row's ring begins in a slot of its own. All else is NaN in every dtype:
    what a page holds beside its tensors, `gap` words after each of them, and two pages that no row has.
    """
    random, (B, P), device = torch.Generator().manual_seed(0), cache.k_NPGD.shape[:2], cache.state_NGFD.device
    row_B = (torch.randperm(B + 2, generator=random)[:B]).to(device)
    turn_B = torch.randint(P, (B,), generator=random).to(device)
    order_BP = (torch.arange(P, device=device) - turn_B[:, None]) % P

    def words(x: Tensor) -> int:
        return math.ceil(x[0].numel() * x.element_size() / 4)

    kept: dict[str, Tensor] = {
        name: x for name, x in cache._asdict().items() if x is not None and x.is_floating_point()
    }
    size = sum(words(x) + gap for x in kept.values())
    pages, start, paged = torch.full((B + 2, size), NANS, dtype=torch.int32, device=device), 0, {}
    for name, x in kept.items():
        if "_NP" in name:
            x = x.gather(1, order_BP[:, :, None, None].expand_as(x))
        field = pages[:, start : start + words(x)].view(x.dtype)[:, : x[0].numel()]
        paged[name] = field.unflatten(1, x.shape[1:])
        paged[name][row_B] = x
        start += words(x) + gap
    return pages, cache._replace(**paged, ring_position=cache.ring_position + turn_B, row_B=row_B)


def over_pages(step: Step, gap: int = 3, swap: bool = False) -> Step:
    """A step of contiguous caches, which runs `step` on them in pages. If it writes outside of their fields, the output
    is NaN.

    swap: a fault, the first two rows have each other's pages.
    """

    def run(token: StepInputs, cache: StepCache, config: StepConfig) -> Tensor:
        pages, paged = in_pages(cache, gap)
        row_B, P = paged.row_B, cache.k_NPGD.shape[1]
        assert row_B is not None
        fields = {name: x for name, x in paged._asdict().items() if x is not None and x.is_floating_point()}

        def outside_of_fields() -> Tensor:
            kept = pages.clone()
            for field in fields.values():
                field[row_B] = 0
            found = pages.clone()
            pages.copy_(kept)
            return found

        before = outside_of_fields()
        swapped_B = torch.cat((row_B[:2].flip(0), row_B[2:])) if swap else row_B
        o_BHD = step(token, paged._replace(row_B=swapped_B), config)
        turn_B = paged.ring_position - cache.ring_position
        order_BP = (torch.arange(P, device=pages.device) + turn_B[:, None]) % P
        for name, field in fields.items():
            found = field[row_B]
            turned = found.gather(1, order_BP[:, :, None, None].expand_as(found)) if "_NP" in name else found
            getattr(cache, name).copy_(turned)
        return o_BHD if torch.equal(before, outside_of_fields()) else torch.full_like(o_BHD, math.nan)

    return run


def outcome(step: Step, given: Given, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A step's output and the floating-point tensors of the cache after it, by name."""
    token, cache, config = placed(given, str(given[0].q_BHD.device), dtype)
    found = {"output": step(token, cache, config)} | cache._asdict()
    return {name: x for name, x in found.items() if x is not None and x.is_floating_point()}


def errors(step: Step, given: Given) -> dict[str, tuple[float, float]]:
    """Same as `gated_kernels.check.errors`, for everything that a step changes.

    On a GPU, a product of fp32 operands is three TF32 products, which have 22 bits instead of 24: four times the error.
    So six times the error in fp32 is allowed in addition to twice that of the plain step.
    """
    exact, plain, ours = outcome(reference, given, torch.float64), outcome(reference, given), outcome(step, given)
    single = outcome(reference, given, torch.float32)
    found = {}
    for name, x in ours.items():
        allowed = 2 * error(plain[name], exact[name]) + 4 * torch.finfo(torch.float32).eps
        if x.is_cuda:
            allowed += 6 * error(single[name], exact[name])
        found[name] = error(x, exact[name]) if x.dtype == plain[name].dtype else math.inf, allowed
    return found


def faults(step: Step, given: Given) -> list[str]:
    """A sentence for every result whose error exceeds what `errors` allows."""
    found = errors(step, given)
    return [
        f"{name} errs by {ours:.1e}, allowed {most:.1e}" for name, (ours, most) in found.items() if not ours <= most
    ]
