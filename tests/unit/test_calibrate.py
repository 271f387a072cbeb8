"""Calibration finds the pairs that attend to each other and the best weight of each head's memory, and makes no head
worse.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, D head size, F codes.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gated_kernels.check import error
from gated_kernels.fused_step.arguments import EMPTY, MIN_NORMALIZER
from gated_kernels.swa.chunk import chunk_swa, combine
from tiny import save_tiny_base
from torch import Tensor
from transformers import AutoModelForCausalLM

from liger_convert.mixers import build_mixer, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, Mixer
from liger_convert.mixers.feature_maps import Codebook
from liger_convert.mixers.window_attention import window_attention
from liger_convert.model import collect_align_targets
from liger_convert.model.loading import linearize_base
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.training import calibrate as module
from liger_convert.training.calibrate import calibrate, far_keys, fit_codes, fit_mix, fit_mix_weight
from liger_convert.utils.errors import LinearizeError

TOKENS = torch.randint(3, 101, (2, 40), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat((torch.arange(25), torch.arange(15))).expand(2, 40)
ODD_TOKENS = TOKENS[:, :37]
ODD_POSITIONS = torch.stack(  # documents of one token, of a window, and longer ones
    (torch.cat([torch.arange(n) for n in (1, 19, 17)]), torch.cat([torch.arange(n) for n in (23, 5, 9)]))
)


def base_and_model(folder: Path, spec: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Any]:
    save_tiny_base("llama", folder, tokenizer=False, **changes)
    plan = {"format": 2, "mixers": {"main": resolve_spec(spec or {"window": 5, "sinks": 2})}, "layers": ["main"] * 3}
    return AutoModelForCausalLM.from_pretrained(folder).eval(), linearize_base(folder, plan).eval()


def layer_errors(model: Any, base: Any, tokens: Tensor = TOKENS, positions: Tensor = POSITIONS) -> Tensor:
    targets = collect_align_targets(base, {"input_ids": tokens, "position_ids": positions}, [0, 1, 2])
    return model(align=targets, position_ids=positions).layer_losses_L


def state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# --- a whole model


@pytest.mark.parametrize(
    ("changes", "codes"),
    [({}, 256), ({"num_key_value_heads": 1}, 9), ({"num_key_value_heads": 4}, 9), ({"head_dim": 10}, 1)],
    ids=["more codes than points", "one key-value head", "one query head to a key-value head", "one code"],
)
@pytest.mark.parametrize("rows", [(TOKENS, POSITIONS), (ODD_TOKENS, ODD_POSITIONS)], ids=["even", "odd"])
def test_calibration_lowers_the_error_of_every_layer(
    rows: tuple[Tensor, Tensor], changes: dict[str, Any], codes: int, tmp_path: Path
) -> None:
    base, model = base_and_model(tmp_path / "base", {"window": 5, "sinks": 2, "codes": codes}, **changes)
    for layer in model.model.layers:  # a start from which the search can only go down
        layer.self_attn.mixer.log_share_H.data.fill_(12)
    before = layer_errors(model, base, *rows)
    calibrate(model, base, *rows)
    assert (layer_errors(model, base, *rows) < before).all()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_each_layer_is_fitted_on_what_the_calibrated_layers_before_it_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, model = base_and_model(tmp_path / "base")
    fitted_on = []

    def spy(attention: Any, x_BTC: Tensor, *args: Any) -> None:
        fitted_on.append(x_BTC)
        calibrate_layer(attention, x_BTC, *args)

    calibrate_layer = module.calibrate_layer
    monkeypatch.setattr(module, "calibrate_layer", spy)
    calibrate(model, base, TOKENS, POSITIONS)
    given = collect_align_targets(model, {"input_ids": TOKENS, "position_ids": POSITIONS}, [0, 1, 2]).hidden
    assert [torch.equal(x, y) for x, y in zip(fitted_on, given, strict=True)] == [True] * 3


LEARNED = ["retnet", "gateloop", "mamba2", "mlstm", "rwkv6", "decaying-fast-weights", "deltanet", "rwkv7", "titans"]
PIECES = {"type": "deltanet", "short_conv": 4, "output_norm": "rms", "output_gate": True}


@pytest.mark.parametrize("spec", [*({"type": name} for name in LEARNED), PIECES], ids=str)
def test_a_learned_mix_is_fitted_in_every_layer(spec: dict[str, Any], tmp_path: Path) -> None:
    base, model = base_and_model(tmp_path / "base", {**spec, "window": 5, "sinks": 2})
    for layer in model.model.layers:  # a start that trusts the memory, which knows nothing yet
        layer.self_attn.mixer.mix_H.data.fill_(2)
    before = layer_errors(model, base)
    calibrate(model, base, TOKENS, POSITIONS)
    assert (layer_errors(model, base) < before).all()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("mixer", ["retnet", "deltanet"], ids=["with sizes", "without"])
def test_the_fit_of_a_learned_mix_leaves_nothing_to_gain(mixer: str) -> None:
    mixing = build_mixer(resolve_spec({"type": mixer}), HeadDims(24, 4, 2, 6))
    random = torch.Generator().manual_seed(3)
    window_o, read, noise = (torch.randn(2, 30, 4, 6, generator=random) for _ in range(3))
    sizes = torch.rand(4, 6, generator=random) + 0.5 if mixer == "retnet" else 1
    target = 0.7 * window_o + 0.3 * sizes * read + 0.1 * noise
    parameters = [mixing.mix_H] + ([mixing.size_HV] if mixer == "retnet" else [])
    for parameter in parameters[1:]:
        parameter.data.fill_(1)

    def left_H() -> Tensor:
        o = read * (mixing.size_HV if mixer == "retnet" else 1)
        mixed, _ = combine(window_o, window_o[..., 0], *mixing.contribution(window_o, MemoryOutput(o, None)))
        return (mixed - target).square().sum((0, 1, 3))

    with torch.no_grad():
        fit_mix(mixing, MemoryOutput(read, None), window_o, target)
        best_H = left_H()
        assert (mixing.mix_H.sigmoid() - 0.3).abs().max() < 0.1
        for parameter in parameters:
            fitted = parameter.clone()
            for _ in range(20):
                parameter.copy_(fitted * (1 + 0.1 * torch.randn(fitted.shape, generator=random)))
                assert (left_H() >= best_H * (1 - 1e-5)).all()
            parameter.copy_(fitted)


def test_the_memory_of_each_group_lasts_as_long_as_its_heads_look_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = {"gate_bias": 6.0, "gate_normalizer": 1.0}  # a bias of 6 lasts 403 tokens, 3 lasts 20
    base, model = base_and_model(tmp_path / "base", {"window": 5, "sinks": 2, "codes": 16, **gates})
    tokens = torch.randint(3, 101, (2, 300), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(300).expand(2, 300)
    targets = collect_align_targets(base, {"input_ids": tokens, "position_ids": positions}, [0])
    x_BTC, embeddings = targets.hidden[0], targets.position_embeddings[0]
    metadata = SequenceMetadata.build(torch.empty(2, 300), positions, None)
    attention = model.model.layers[0].self_attn
    mixer = attention.mixer.requires_grad_(False)
    qkv, window_inputs = attention.prepare_inputs(x_BTC, embeddings, metadata, None)
    window_o_BTHV, window_lse_BTH = window_attention(window_inputs, None, None)
    # what softmax attention looks at is replaced by what a memory with these gates recalls
    mixer.log_share_H.fill_(1)
    for log_tau in (mixer.codebook.q_log_tau_H, mixer.codebook.k_log_tau_G):
        log_tau.fill_(torch.tensor(20.0).log())
    planted_G1 = torch.tensor([[3.0], [6.0]])
    mixer.gate_bias_GF.copy_(planted_G1)
    memory = mixer.remember(qkv, metadata, None)
    target_BTHV = combine(window_o_BTHV, window_lse_BTH, *mixer.contribution(qkv.q_BTHD, memory))[0]
    monkeypatch.setattr(module, "INV_TEMPERATURES", (20.0,))
    monkeypatch.setattr(module, "fit_codes", lambda *_: None)
    monkeypatch.setattr(module, "chunk_swa", lambda *_, **__: (target_BTHV, None))
    mixer.gate_bias_GF.fill_(6)
    module.calibrate_layer(attention, x_BTC, x_BTC, embeddings, metadata)
    assert torch.equal(mixer.gate_bias_GF, planted_G1)


@pytest.mark.parametrize("family", ["gemma2", "mistral", "ministral3", "stablelm"])
def test_a_layer_is_fitted_to_what_the_attention_of_the_base_gives(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_base(family, tmp_path, tokenizer=False)  # with a window of 24 of its own, or a bound on logits
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 5, "sinks": 2})}, "layers": ["main"] * 3}
    model = linearize_base(folder, plan)
    told = collect_align_targets(base, {"input_ids": TOKENS, "position_ids": POSITIONS}, [0, 1, 2])
    found: list[Tensor] = []

    def record(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o_BTHV, lse_BTH = chunk_swa(*args, **options)
        found.append(model.model.layers[len(found)].self_attn.o_proj(o_BTHV.flatten(2)))
        return o_BTHV, lse_BTH

    monkeypatch.setattr(module, "chunk_swa", record)
    monkeypatch.setattr(module, "in_two_lengths", lambda positions, model: positions)
    calibrate(model, base, TOKENS, POSITIONS)
    assert len(found) == 3
    for ours, theirs in zip(found, told.outputs):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=1e-4)


def test_a_fixed_mix_is_left_alone(tmp_path: Path) -> None:
    base, model = base_and_model(tmp_path / "base", {"type": "liger-paper"})
    before = state(model)
    calibrate(model, base, TOKENS, POSITIONS)
    assert same(before, model.state_dict())


def test_a_base_with_absurd_weights_ends_in_a_sentence(tmp_path: Path) -> None:
    base, model = base_and_model(tmp_path)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 1e30
    with pytest.raises(LinearizeError, match="not finite; is it damaged"):
        calibrate(model, base, TOKENS, POSITIONS)


def test_rows_whose_documents_end_inside_the_window_leave_a_model_as_it_was(tmp_path: Path) -> None:
    base, model = base_and_model(tmp_path / "base")
    before = state(model)
    calibrate(model, base, TOKENS, torch.arange(40).remainder(7).expand(2, 40))
    assert same(before, model.state_dict())
    calibrate(model, base, TOKENS, torch.arange(40).remainder(8).expand(2, 40))
    assert not same(before, model.state_dict())


def test_half_of_the_tokens_of_long_rows_are_read_as_short_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, model = base_and_model(tmp_path / "base")
    read: list[Tensor] = []
    monkeypatch.setattr(module, "calibrate_layer", lambda *given: read.append(given[-1].position_BT))

    def ranks(tokens: Tensor, positions: Tensor) -> Tensor:
        calibrate(model, base, tokens, positions)
        return read.pop()

    whole_T, short_T = torch.arange(41), torch.cat([torch.arange(n) for n in (20, 20, 1)])
    tokens = TOKENS[:1, :1].expand(3, 41)
    row, half, *_, last = ranks(tokens, whole_T.expand(3, 41))  # 41 tokens: one more than eight windows of 5
    assert torch.equal(row, whole_T)
    assert torch.equal(half, torch.cat((whole_T[:20], short_T[20:])))
    assert torch.equal(last, short_T)
    (documents,) = ranks(tokens[:1], torch.cat([torch.arange(n) for n in (30, 11)])[None])
    assert torch.equal(documents, torch.cat([torch.arange(n) for n in (20, 10, 10, 1)]))
    assert torch.equal(ranks(TOKENS, POSITIONS), POSITIONS)  # eight windows: not long


def test_calibration_is_deterministic_and_the_same_under_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, model = base_and_model(tmp_path / "base")
    start = state(model)
    # autocast may change what the base computes, but nothing of what is fitted to it
    targets = collect_align_targets(base, {"input_ids": TOKENS, "position_ids": POSITIONS}, [0, 1, 2])
    monkeypatch.setattr(module, "collect_align_targets", lambda *_: targets)
    found = []
    for autocast in (False, False, True):
        model.load_state_dict(start)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            calibrate(model, base, TOKENS, POSITIONS)
        found.append(state(model))
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert not same(found[0], start)


# --- the codes


def planted(groups: int, shared: int, noise: float) -> tuple[QKV, tuple[Tensor, Tensor], Tensor]:
    """QKV in which each query of the second half attends to one key of the first half. Also returns the result of
    `far_keys` and the index of that key. A query and its key share only a latent vector. Every head hides it behind a
    linear map of its own, a large mean, and noise."""
    batch, half, dim, latent = 2, 48, 16, 6
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    def hidden(z_BTNL: Tensor) -> Tensor:
        heads = z_BTNL.shape[2]
        mapped = torch.einsum("btnl,nld->btnd", z_BTNL, normal(heads, latent, dim))
        return mapped + 5 * normal(heads, dim) + noise * normal(*mapped.shape)

    z_BTGL = normal(batch, half, groups, latent)
    partner_BT = torch.stack([torch.randperm(half, generator=random) for _ in range(batch)])
    asked_BTGL = torch.stack([z[partner] for z, partner in zip(z_BTGL, partner_BT)])
    asked_BTHL = asked_BTGL.repeat_interleave(shared, 2)
    k_BTGD = hidden(torch.cat((z_BTGL, normal(*z_BTGL.shape)), 1))
    q_BTHD = hidden(torch.cat((normal(*asked_BTHL.shape), asked_BTHL), 1))
    found_BTGD = torch.stack([k[partner] for k, partner in zip(k_BTGD, partner_BT)])
    far_BTHD = torch.cat((torch.zeros_like(found_BTGD), found_BTGD), 1).repeat_interleave(shared, 2)
    weight_BTH = torch.cat((torch.zeros(batch, half), torch.ones(batch, half)), 1)[..., None].expand(far_BTHD.shape[:3])
    position_BT = torch.arange(2 * half).expand(batch, -1)
    return QKV(q_BTHD, k_BTGD, q_BTHD, k_BTGD, k_BTGD, position_BT, k_BTGD), (far_BTHD, weight_BTH), partner_BT


def found_partners_H(book: Codebook, qkv: QKV, partner_BT: Tensor) -> Tensor:
    """The share of queries, by head, whose nearest key by phi(q) . phi(k) is their partner."""
    half = partner_BT.shape[1]
    phi_k_BTGF, phi_q_BTHF = book.keys(qkv.k_BTGD[:, :half]), book.queries(qkv.q_BTHD[:, half:])
    phi_k_BTHF = phi_k_BTGF.repeat_interleave(phi_q_BTHF.shape[2] // phi_k_BTGF.shape[2], 2)
    nearest_BHT = torch.einsum("bthf,bshf->bhts", phi_q_BTHF, phi_k_BTHF).argmax(-1)
    return (nearest_BHT == partner_BT[:, None]).float().mean((0, 2))


@pytest.mark.parametrize(("codes", "noise"), [(64, 0.1), (256, 0.5)], ids=["fewer codes than points", "more"])
@pytest.mark.parametrize(("groups", "shared"), [(2, 1), (2, 3), (1, 3)])
def test_queries_find_the_keys_they_attend_to(groups: int, shared: int, codes: int, noise: float) -> None:
    qkv, far, partner_BT = planted(groups, shared, noise)
    torch.manual_seed(0)
    book = Codebook(codes, groups * shared, groups, qkv.k_BTGD.shape[-1]).requires_grad_(False)
    book.reset_parameters()
    assert (found_partners_H(book, qkv, partner_BT) < 0.1).all()  # one of 48 by chance
    fit_codes(book, qkv, far)
    assert (found_partners_H(book, qkv, partner_BT) > 0.5).all()
    torch.testing.assert_close(book.codes_GFE.norm(dim=-1), torch.ones(groups, codes))


def test_the_queries_of_every_head_take_part_in_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, far, _ = planted(2, 4, 0.1)
    points: list[Tensor] = []
    monkeypatch.setattr(module, "SAMPLES", 5 * 32)  # 32 of 4 heads' 192 queries: every 24th
    monkeypatch.setattr(module, "_clusters", lambda found, count: points.append(found) or found[:, :count])
    book = Codebook(8, 8, 2, qkv.k_BTGD.shape[-1]).requires_grad_(False)
    fit_codes(book, qkv, far)
    u_BTGRE = book.projected_queries(qkv.q_BTHD).unflatten(2, (2, 4))
    for g in range(2):
        taken_RP = (u_BTGRE[:, :, g].permute(2, 0, 1, 3).flatten(1, 2)[:, :, None] == points[0][g]).all(-1).any(1)
        assert taken_RP.any(1).all()


@pytest.mark.parametrize(("softcap", "base_window"), [(None, None), (0.5, None), (None, 9)])
def test_far_keys_are_those_beyond_window_and_sinks_by_their_attention(
    softcap: float | None, base_window: int | None
) -> None:
    window, sinks, scale = 5, 2, 0.7
    (batch, tokens), heads, groups, dim = ODD_POSITIONS.shape, 6, 2, 3
    random = torch.Generator().manual_seed(0)
    q, q_rot = torch.randn(2, batch, tokens, heads, dim, generator=random)
    k, k_rot = torch.randn(2, batch, tokens, groups, dim, generator=random)
    metadata = SequenceMetadata.build(ODD_POSITIONS, ODD_POSITIONS, None)
    attention: Any = SimpleNamespace(
        dims=HeadDims(heads * dim, heads, groups, dim),
        spec=SimpleNamespace(window=window, sinks=sinks),
        scaling=scale,
        softcap=softcap,
        base_window=base_window,
    )
    got = far_keys(attention, QKV(q, k, q_rot, k_rot, k, metadata.position_BT, k), metadata)

    def loop(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pulled, weight = torch.zeros(q.shape, dtype=dtype), torch.zeros(q.shape[:3], dtype=dtype)
        for b in range(batch):
            for t in range(tokens):
                document = t - int(ODD_POSITIONS[b, t])  # where it begins
                first = max(document, t - (base_window or tokens) + 1)
                far = range(max(document + sinks, first), t - window + 1)
                for h in range(heads):
                    g = h // (heads // groups)
                    seen = k_rot[b, first : t + 1, g].to(dtype)
                    logits = seen @ q_rot[b, t, h].to(dtype) * scale
                    weights = (logits if softcap is None else (logits / softcap).tanh() * softcap).softmax(0)
                    for j in far:
                        pulled[b, t, h] += weights[j - first] * k[b, j, g].to(dtype)
                        weight[b, t, h] += weights[j - first]
        return pulled, weight

    eps = torch.finfo(torch.float32).eps
    for ours, plain, exact in zip(got, loop(torch.float32), loop(torch.float64)):
        assert ours.shape == exact.shape
        assert error(ours, exact) <= 2 * error(plain, exact) + 4 * eps
        assert torch.equal(ours == 0, exact == 0)  # nothing far is nothing


# --- the share


def mixer_and_branches(lse: float) -> tuple[Mixer, Tensor, MemoryOutput, Tensor, Tensor]:
    """A mixer, queries, a memory, and a window's output and log-sum-exp about `lse`."""
    random = torch.Generator().manual_seed(0)
    dims = HeadDims(32, 6, 2, 8)
    mixer = build_mixer(resolve_spec({"codes": 8}), dims).requires_grad_(False)
    mixer.reset_parameters()
    q_BTHD, memory_BTHV, window_BTHV = torch.randn(3, 2, 150, dims.heads, dims.dim, generator=random)
    log_normalizer_BTH, spread_BTH = torch.randn(2, 2, 150, dims.heads, generator=random)
    return mixer, q_BTHD, MemoryOutput(memory_BTHV, log_normalizer_BTH), window_BTHV, lse + spread_BTH


def squared_error_H(
    mixer: Mixer, q: Tensor, memory: MemoryOutput, window_o: Tensor, lse: Tensor, target: Tensor
) -> Tensor:
    return (combine(window_o, lse, *mixer.contribution(q, memory))[0] - target).square().sum((0, 1, 3))


@pytest.mark.parametrize("lse", [-90.0, -30.0, 0.0, 90.0])
@pytest.mark.parametrize("memory_scale", [1.0, 20.0])
def test_no_head_is_left_worse_than_its_window_alone(memory_scale: float, lse: float) -> None:
    mixer, q_BTHD, memory, window_o, window_lse = mixer_and_branches(lse)
    memory = memory._replace(read_BTHV=memory_scale * memory.o_BTHV)  # of what the target knows nothing
    target = window_o + 0.1 * torch.randn(window_o.shape, generator=torch.Generator().manual_seed(1))
    left_H = fit_mix_weight(mixer, q_BTHD, memory, window_o, window_lse, target)
    torch.testing.assert_close(left_H, squared_error_H(mixer, q_BTHD, memory, window_o, window_lse, target))
    # the search goes down to shares of at most s = sigmoid(-8): |gap + s step| <= |gap| + s |step|
    gap_H = (window_o - target).square().sum((0, 1, 3)).sqrt()
    step_H = (memory.o_BTHV - window_o).square().sum((0, 1, 3)).sqrt()
    assert (left_H.sqrt() <= gap_H + torch.tensor(-8.0).sigmoid() * step_H).all()


def test_a_share_that_depends_on_the_query_is_found() -> None:
    mixer, q_BTHD, memory, window_o, window_lse = mixer_and_branches(0.0)
    mixer.share_query_HD.copy_(2 * torch.randn(6, 8, generator=torch.Generator().manual_seed(1)))
    mixer.share_power_H.copy_(torch.linspace(0.5, 1.5, 6))
    mixer.log_share_H.copy_(torch.linspace(-1, 1, 6))
    planted_BTH = (mixer.memory_logit(q_BTHD, memory) - window_lse).sigmoid()
    target = combine(window_o, window_lse, *mixer.contribution(q_BTHD, memory))[0]
    mixer.reset_parameters()
    left_H = fit_mix_weight(mixer, q_BTHD, memory, window_o, window_lse, target)
    found_BTH = (mixer.memory_logit(q_BTHD, memory) - window_lse).sigmoid()
    assert (found_BTH - planted_BTH).abs().max() < 0.15  # a ridge keeps the fit from being exact
    mixer.share_query_HD.zero_()
    assert (squared_error_H(mixer, q_BTHD, memory, window_o, window_lse, target) > 50 * left_H).all()


def test_tokens_whose_memory_is_empty_have_no_say_in_the_share() -> None:
    mixer, q_BTHD, memory, window_o, window_lse = mixer_and_branches(0.0)
    assert memory.log_normalizer_BTH is not None
    empty_T = torch.arange(150) % 3 == 0
    memory = MemoryOutput(
        memory.o_BTHV, memory.log_normalizer_BTH.masked_fill(empty_T[:, None], torch.tensor(MIN_NORMALIZER).log())
    )
    found = []
    for share in (0.2, 0.9):  # of the memory in what is wanted at the empty tokens
        share_T = torch.where(empty_T, share, 0.5)[:, None, None]
        fit_mix_weight(mixer, q_BTHD, memory, window_o, window_lse, window_o + share_T * (memory.o_BTHV - window_o))
        found.append(state(mixer))
    assert same(*found)


def test_an_empty_memory_has_no_weight_whatever_the_query_says() -> None:
    mixer, q_BTHD, memory, window_o, window_lse = mixer_and_branches(-90.0)
    mixer.share_query_HD.fill_(100)
    mixer.log_share_H.fill_(100)
    empty = memory._replace(log_BTH=torch.zeros_like(window_lse).clamp_min(MIN_NORMALIZER).log())
    assert empty.log_normalizer_BTH is not None
    assert (empty.log_normalizer_BTH <= EMPTY).all()
    assert torch.equal(combine(window_o, window_lse, *mixer.contribution(100 * q_BTHD, empty))[0], window_o)
    assert not torch.equal(combine(window_o, window_lse, *mixer.contribution(100 * q_BTHD, memory))[0], window_o)


def test_a_step_of_the_regression_survives_a_float32_sum_that_is_not_positive_definite() -> None:
    generator = torch.Generator().manual_seed(0)
    along_N, noise_NX = torch.randn(4096, generator=generator), torch.randn(4096, 258, generator=generator)
    known_HNX = (60 * along_N[:, None] + 1e-4 * noise_NX)[None]  # columns that are all but equal, as of heads of 256
    bend_HXX = known_HNX.mT @ known_HNX / 4096
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(bend_HXX.double())
    slope_HX = bend_HXX @ torch.ones(258)
    step_HX = module._solve(bend_HXX, slope_HX)
    assert (bend_HXX @ step_HX[..., None])[0, :, 0].allclose(slope_HX[0], rtol=1e-3)
    assert step_HX.abs().amax() < 2
