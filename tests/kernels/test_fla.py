"""Our ops and mixers, compared with the plain loops of flash-linear-attention for the same recurrences.

The tests were written against fla-core 0.6.0 and are skipped without it. They run only its `naive.py` files, each
loaded separately: those need only torch and einops, while the package needs Triton. The loops always compute in
float32. Our ops compute in float64, and the difference may be T float32 roundings, where T is the length of the longest
sum. If a convention differs, a comment at the case says so. For example, their loops scale queries by 1/sqrt(F) by
default, and ours never do.

The adapters to its kernels are tested with these loops in place of the kernels.

flash-linear-attention has no plain loops of Mamba, S4 and mLSTM. Its TTT and Titans have a layer norm inside.

Shapes: B batch, T tokens, H heads (G key-value heads where theirs can share them), F feature size, V value size, M
slots.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from runpy import run_path
from typing import Any

import gated_kernels
import pytest
import torch
import torch.nn.functional as nnf
from gated_kernels import chunk_delta_rule, chunk_elementwise, chunk_gla, chunk_momentum, chunk_slots, chunk_swa
from gated_kernels.check import error, run
from gated_kernels.delta_rule.cases import Case as DeltaCase
from gated_kernels.delta_rule.cases import gla as sizes
from gated_kernels.delta_rule.cases import inputs as delta_inputs
from gated_kernels.delta_rule.naive import naive_delta_rule as delta_reference
from torch import Tensor

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.kernel_maps import make_map
from liger_convert.mixers.linear.retnet import RetNet
from liger_convert.mixers.window_attention import with_forgetting

FLA = find_spec("fla")
pytestmark = pytest.mark.skipif(FLA is None or find_spec("einops") is None, reason="fla-core is not installed")

B, T, H, G, F, V, M = 2, 97, 6, 2, 16, 17, 5
Results = tuple[Tensor, ...]  # outputs, and states where both have them
Case = Callable[[], tuple[Results, Results]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@cache
def theirs(file: str, name: str) -> Callable[..., Any]:
    """The function `name` of fla/ops/`file`.py."""
    assert FLA is not None
    (folder,) = FLA.submodule_search_locations or ()
    return run_path(f"{folder}/ops/{file}.py")[name]


class Inputs:
    """Float32 for theirs; `x.d.q` is the same q in float64 for ours.

    u: keys of length 1. beta, eta: rates. log_m, step: of the momentum. w, log_a_M, keys, values: of slots.
    """

    def __init__(self, kv_heads: int = H, value_size: int = V):
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        self.q, self.k, self.p = normal(B, T, H, F), normal(B, T, kv_heads, F), normal(B, T, kv_heads, F)
        self.v = normal(B, T, kv_heads, value_size)
        self.u = nnf.normalize(self.k, dim=-1)
        self.log_a, self.log_m = (nnf.logsigmoid(normal(B, T, kv_heads)) for _ in range(2))
        self.log_a_F = nnf.logsigmoid(normal(B, T, kv_heads, F))
        self.beta, self.eta = (normal(B, T, kv_heads).sigmoid() for _ in range(2))
        self.beta_F = normal(B, T, kv_heads, F).sigmoid()
        self.w, self.log_a_M = normal(B, T, kv_heads, M), nnf.logsigmoid(normal(B, T, kv_heads, M)) / 4
        self.state, self.step = normal(B, kv_heads, F, value_size), normal(B, kv_heads, F, value_size)
        self.keys, self.values = normal(B, kv_heads, F, M), normal(B, kv_heads, M, value_size)

    @property
    def d(self) -> Inputs:
        wide = object.__new__(Inputs)
        wide.__dict__ = {name: x.double() for name, x in self.__dict__.items()}
        return wide


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@case
def gla() -> tuple[Results, Results]:
    x = Inputs()
    got = theirs("gla/naive", "naive_recurrent_gla")(x.q, x.k, x.v, x.log_a_F, x.state, True)
    x = x.d
    return got, chunk_gla(x.q * F**-0.5, x.k, x.v, x.log_a_F, initial_state=x.state)[::2]


@case
def simple_gla() -> tuple[Results, Results]:
    x = Inputs()
    got = theirs("simple_gla/naive", "naive_recurrent_simple_gla")(x.q, x.k, x.v, x.log_a, 1.0, x.state)
    x = x.d
    return got, chunk_gla(x.q, x.k, x.v, x.log_a[..., None], initial_state=x.state)[::2]


@case
def simple_gla_in_chunks() -> tuple[Results, Results]:
    x = Inputs()
    got = theirs("simple_gla/naive", "naive_chunk_simple_gla")(x.q, x.k, x.v, x.log_a, x.state, False, 32, 1.0)
    x = x.d
    return got[:1], chunk_gla(x.q, x.k, x.v, x.log_a[..., None], initial_state=x.state)[:1]


@case
def linear_attn() -> tuple[Results, Results]:
    x = Inputs()
    got = theirs("linear_attn/naive", "naive_recurrent_linear_attn")(x.q, x.k, x.v, 1.0, x.state, True)
    x = x.d
    return got, chunk_gla(x.q, x.k, x.v, None, initial_state=x.state)[::2]


@case
def normalized_linear_attn() -> tuple[Results, Results]:
    x = Inputs()
    q, k = x.q.sigmoid(), x.k.sigmoid()
    got = theirs("linear_attn/naive", "naive_recurrent_linear_attn")(q, k, x.v, 1.0, normalize=True)
    o, *_ = chunk_gla(q.double(), k.double(), nnf.pad(x.d.v, (0, 1), value=1.0), None)
    return got[:1], (o[..., :-1] / o[..., -1:],)


@case
def retention_of_the_retnet_mixer() -> tuple[Results, Results]:
    x = Inputs()
    got = theirs("retention/naive", "naive_retention")(*heads_first(x.q, x.k, x.v)).transpose(1, 2)
    log_a = -RetNet.rates(H)[:, None].expand(B, T, H, 1)
    return (got,), chunk_gla(x.d.q * F**-0.5, x.d.k, x.d.v, log_a)[:1]


@case
def rebased() -> tuple[Results, Results]:
    """Theirs squares the product. Our map takes pairs of channels, after the norm that is part of their layer. They add
    1e-6 to the denominator. The scale 1e4 makes that negligible and cancels in the quotient."""
    x, phi = Inputs(), make_map("products", H, F)
    phi.reset_parameters()
    y_q, y_k = (nnf.layer_norm(y, (F,)) for y in (x.q, x.k))
    got = theirs("rebased/naive", "naive_parallel_rebased")(*heads_first(y_q, y_k, x.v), 1e4).transpose(1, 2)
    o, *_ = chunk_gla(phi(x.q).double(), phi(x.k).double(), nnf.pad(x.d.v, (0, 1), value=1.0), None)
    return (got,), (o[..., :-1] / o[..., -1:],)


@case
def abc() -> tuple[Results, Results]:
    x = Inputs()
    got, _ = theirs("abc/naive", "naive_recurrent_abc")(*heads_first(x.q, x.k, x.v, x.w))
    x = x.d
    return (got.transpose(1, 2),), chunk_slots(x.q, x.k, x.v, x.w.exp(), None, scale=F**-0.5)[:1]


@case
def abc_as_sums() -> tuple[Results, Results]:
    x = Inputs()
    got, _ = theirs("abc/naive", "naive_cumsum_abc")(*heads_first(x.q, x.k, x.v, x.w))
    x = x.d
    return (got.transpose(1, 2),), chunk_slots(x.q, x.k, x.v, x.w.exp(), None, scale=F**-0.5)[:1]


@case
def gsa() -> tuple[Results, Results]:
    """Theirs does not divide a slot by its normalizer. From a state with normalizer 1, it stays 1, because each write
    has the weight 1 - a."""
    x = Inputs(G)
    w = -x.log_a_M.expm1()
    states = (x.keys, x.values)
    o, last = theirs("gsa/naive", "naive_recurrent_gsa")(x.q, x.k, x.v, w, x.log_a_M, None, states, True)
    x = x.d
    keys = nnf.pad(x.keys.mT, (0, 1), value=1.0)
    ours = chunk_slots(
        x.q, x.k, x.v, -x.log_a_M.expm1(), x.log_a_M, scale=F**-0.5, keys_BGMD=keys, values_BGMV=x.values
    )
    return (o, *last), (ours[0], ours[2][..., :-1].mT, ours[3])


@case
def rwkv6() -> tuple[Results, Results]:
    """The mixer's read: before the token is written, and the token itself with its bonus."""
    x, mixer = Inputs(value_size=F), build("rwkv6", scope="all")
    mixer.bonus_GF.requires_grad_(False).normal_()
    arguments = (*heads_first(x.q, x.k, x.v, x.log_a_F), mixer.bonus_GF, 1.0, x.state, True)
    o, last = theirs("rwkv6/recurrent_naive", "naive_recurrent_rwkv6")(*arguments)
    x = x.d
    options = {"initial_state": x.state, "segment_ids_BT": None, "exclusive": False}
    entries = x.k, x.v, x.log_a_F
    before, _, state = mixer.attend(x.q, entries, **options)
    read, _ = mixer.add_current(None, x.q, entries, before, None)
    return (o.transpose(1, 2), last), (read, state)


@case
def delta_rule() -> tuple[Results, Results]:
    x = Inputs()
    o, last = theirs("delta_rule/naive", "delta_rule_recurrence")(*heads_first(x.q, x.u, x.v, x.beta), x.state)
    x = x.d
    ours = chunk_delta_rule(x.q * F**-0.5, x.beta[..., None] * x.u, x.v, x.u, None, initial_state=x.state)
    return (o.transpose(1, 2), last), ours


@case
def gated_delta_rule() -> tuple[Results, Results]:
    x = Inputs()
    name = "naive_recurrent_gated_delta_rule"
    got = theirs("gated_delta_rule/naive", name)(x.q, x.u, x.v, x.beta, x.log_a, 1.0, x.state, True)
    x = x.d
    return got, chunk_delta_rule(x.q, x.beta[..., None] * x.u, x.v, x.u, x.log_a[..., None], initial_state=x.state)


@case
def gated_delta_rule_in_chunks() -> tuple[Results, Results]:
    x = Inputs()
    name = "naive_chunk_gated_delta_rule"
    got = theirs("gated_delta_rule/naive", name)(x.q, x.u, x.v, x.log_a, x.beta, 32, 1.0, x.state)
    x = x.d
    return got[:1], chunk_delta_rule(x.q, x.beta[..., None] * x.u, x.v, x.u, x.log_a[..., None], initial_state=x.state)[
        :1
    ]


@case
def kda() -> tuple[Results, Results]:
    """The gated delta rule with a gate per channel."""
    x = Inputs()
    got = theirs("kda/naive", "naive_recurrent_kda")(x.q, x.u, x.v, x.log_a_F, x.beta, 1.0, x.state, True)
    x = x.d
    return got, chunk_delta_rule(x.q, x.beta[..., None] * x.u, x.v, x.u, x.log_a_F, initial_state=x.state)


@case
def comba() -> tuple[Results, Results]:
    """What is looked up under another key than it is written."""
    x = Inputs()
    p = nnf.normalize(x.p, dim=-1)
    got = theirs("comba/naive", "naive_recurrent_comba")(x.q, x.u, x.v, p, x.beta, x.log_a, 1.0, x.state, True)
    x = x.d
    return got, chunk_delta_rule(
        x.q, x.beta[..., None] * x.u, x.v, p.double(), x.log_a[..., None], initial_state=x.state
    )


@case
def iplr() -> tuple[Results, Results]:
    x = Inputs()
    alpha, beta = -x.u, x.beta_F * x.u
    arguments = (*heads_first(x.q, x.k, x.v, alpha, beta), x.state)
    o, last = theirs("generalized_delta_rule/iplr/naive", "iplr_recurrence")(*arguments)
    ours = chunk_delta_rule(
        x.d.q * F**-0.5, x.d.k, x.d.v, -alpha.double(), None, e_BTGF=beta.double(), initial_state=x.d.state
    )
    return (o.transpose(1, 2), last), ours


@case
def rwkv7() -> tuple[Results, Results]:
    """The mixer's entries. Theirs, as RWKV-7, looks up before the decay, our op after it: `write` makes up for it."""
    x, mixer = Inputs(value_size=F), build("rwkv7")
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        k, v, r, log_w, e = mixer.write((x.k,), x.v)
        u = nnf.normalize(x.k * mixer.get_parameter("xi_GD"), dim=-1)
    arguments = (*heads_first(x.q, k, v, -u, e, log_w), x.state)
    o, last = theirs("generalized_delta_rule/dplr/naive", "dplr_recurrence")(*arguments)
    k, v, r, log_w, e = (entry.double() for entry in (k, v, r, log_w, e))
    ours = chunk_delta_rule(x.d.q * F**-0.5, k, v, r, log_w, e_BTGF=e, initial_state=x.d.state)
    return (o.transpose(1, 2), last), ours


@case
def momentum_delta_rule() -> tuple[Results, Results]:
    """Titans without norms. Theirs carries the step with the other sign, and has a second rate, eta, on the keys."""
    x, name = Inputs(), "recurrent_momentum_delta_rule_ref"
    got, last = theirs("momentum_delta_rule/naive", name)(
        x.q, x.u, x.v, x.log_a, x.log_m, x.u, x.beta, x.eta, 1.0, x.state, -x.step, True
    )
    x = x.d
    gates = (x.log_a[..., None], x.log_m[..., None], x.beta[..., None])
    state = torch.cat((x.state, x.step), 2)
    o, ours = chunk_momentum(x.q, x.eta[..., None] * x.u, x.v, x.u, *gates, initial_state=state)
    return (got, last[0], -last[1]), (o, *ours.chunk(2, 2))


@case
def hgrn() -> tuple[Results, Results]:
    """A recurrence of single numbers: ours with one feature a channel, which queries and keys of 1 read and write."""
    x = Inputs()
    v, g, start = x.v.flatten(2), nnf.logsigmoid(x.v.flip(1)).flatten(2), x.state[:, :, 0].flatten(1)
    got = theirs("hgrn/naive", "naive_recurrent_hgrn")(v, g, start, True)
    one = torch.ones(B, T, H, 1, dtype=torch.float64)
    dt, log_A = -g.double().unflatten(2, (H, V)), -torch.ones(H, 1, V, dtype=torch.float64)
    o, last = chunk_elementwise(one, one, x.d.v, dt, log_A, initial_state=x.d.state[:, :, :1])
    return got, (o.flatten(2), last.flatten(1))


@case
def attention_in_a_window() -> tuple[Results, Results]:
    x = Inputs(G)
    got = theirs("attn/naive", "naive_parallel_attn")(x.q, x.k, x.v, 0.3, 11)
    return got[:1], chunk_swa(x.d.q, x.d.k, x.d.v, window_size=11, scale=0.3)[:1]


def forgetting(size: int | None) -> tuple[Results, Results]:
    """Theirs has a gate per query head and ours one per key-value head, so theirs gets each of ours R times."""
    x = Inputs(G)
    log_f = x.log_a.repeat_interleave(H // G, 2)
    got = theirs("forgetting_attn/naive", "naive_forgetting_attn")(x.q, x.k, x.v, log_f, 0.3, size)
    x = x.d
    q, k, _ = with_forgetting(x.q, x.k, None, x.log_a / 0.3)
    return (got,), chunk_swa(q, k, x.v, window_size=size or T, scale=0.3)[:1]


@case
def forgetting_attention() -> tuple[Results, Results]:
    return forgetting(None)


@case
def forgetting_attention_in_a_window() -> tuple[Results, Results]:
    return forgetting(11)


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec({"type": name, **options}), HeadDims(4, H, H, F))
    mixer.reset_parameters()
    return mixer


@pytest.mark.parametrize("name", CASES)
def test_a_recurrence_is_that_of_flash_linear_attention(name: str) -> None:
    their, our = CASES[name]()
    assert len(their) == len(our)
    for a, b in zip(their, our, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= T * torch.finfo(torch.float32).eps * b.double().norm()


# What runs of theirs where our kernels leave a call: the adapter, with a plain form in the place of their kernel.

adapter = import_module("gated_kernels.delta_rule.fla")
SMALL = {"G": 2, "R": 3, "F": 16, "V": 17}
ADAPTED = {
    "one gate per head": DeltaCase(sizes.Case(70, per_head=True, **SMALL)),
    "no gate, segments": DeltaCase(sizes.Case(70, gate="none", segments=True, **SMALL)),
    "one gate per head, -200 and 0, segments": DeltaCase(sizes.Case(70, gate="mixed", per_head=True, segments=True)),
    "a gate per channel": DeltaCase(sizes.Case(33, **SMALL)),
    "a gate per channel, -200 and 0, segments": DeltaCase(sizes.Case(40, gate="mixed", segments=True, **SMALL)),
    "erases elsewhere": DeltaCase(sizes.Case(33, per_head=True, **SMALL), erases_elsewhere=True),
    "erases elsewhere, segments": DeltaCase(sizes.Case(40, segments=True, **SMALL), erases_elsewhere=True),
}


def by_documents(function: Callable[..., Any]) -> Callable[..., Any]:
    """As their kernels take packed rows."""

    def call(*tensors: Tensor, initial_state: Tensor, cu_seqlens: Tensor | None = None, **options: Any) -> Any:
        if cu_seqlens is None:
            return function(*tensors, initial_state=initial_state, **options)
        found = [
            function(*(x[:, start:end] for x in tensors), initial_state=initial_state[n : n + 1], **options)
            for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist()))
        ]
        o, last = zip(*found)
        return torch.cat(o, 1), torch.cat(last)

    return call


def plain_low_rank(*tensors: Tensor, scale: float, **options: Any) -> Any:
    q, *others = heads_first(*tensors)
    recurrence = theirs("generalized_delta_rule/dplr/naive", "dplr_recurrence")
    o, last = recurrence(q * scale * q.shape[-1] ** 0.5, *others, **options)
    return o.transpose(1, 2), last


@pytest.mark.parametrize("case", ADAPTED)
def test_the_adapter_of_their_delta_kernel_gives_our_results_and_gradients(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "kernel", lambda: by_documents(plain_low_rank))
    x = delta_inputs(ADAPTED[case])
    del x["exclusive"]
    exact, got = run(delta_reference, x, torch.float64), run(adapter.by_kernel, x)
    tolerance = T * torch.finfo(torch.float32).eps
    assert {name: e for name in exact if (e := error(got[name], exact[name])) > tolerance} == {}


def test_what_their_delta_kernel_cannot_do_is_named() -> None:
    half, gate = torch.bfloat16, torch.full((1,), -5.0)
    assert adapter._problem({half}, 64, 64, gate) is None
    assert adapter._problem({half, torch.float32}, 64, 64, gate) == "torch.float32"
    assert adapter._problem({half}, 512, 64, None) == "512 features and 64 values a head"
    assert "gradient of gates" in adapter._problem({half}, 64, 64, gate.requires_grad_())


def test_a_process_without_a_gpu_never_imports_theirs() -> None:
    script = """if True:
        import sys, torch, gated_kernels
        gated_kernels.use("triton+fla")
        assert gated_kernels.in_use() == "triton+fla"
        x = torch.randn(1, 5, 2, 16, dtype=torch.bfloat16)
        gated_kernels.chunk_delta_rule(x, x, x, x, None)
        assert "fla" not in sys.modules
    """
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.parametrize("path", ["fla", "triton+fla"])
def test_their_kernels_need_the_package(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_kernels, "has_fla", lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'liger-convert\[fla\]'"):
        gated_kernels.use(path)
