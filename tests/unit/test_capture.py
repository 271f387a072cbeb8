"""A stage trains the same with compiled layers or captured graphs as without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from inspect import isfunction
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gated_kernels.common import gated_recurrence
from gated_kernels.common.tracing import is_exporting, outside_of_graphs, reads_no_values
from replays import replayed_on_a_cpu
from safetensors.torch import load_file
from stages import CPU, SEQ_LEN, every_stage, files_of, folders, make_stage, train
from tiny import save_tiny_base
from torch import Tensor
from torch._inductor.compile_fx import compile_fx

from liger_convert.config.stages import Lora
from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.mixers.window_attention import with_forgetting
from liger_convert.model.cuda_graphs import capture
from liger_convert.model.loading import linearize_base, load_base, load_pretrained
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.training.finetune import FinetuneObjective
from liger_convert.training.student import code_hash, compile_layers

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that torch.compile makes. They run as they are."""
    kept: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        kept.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, dynamic: real(call, backend=keep, dynamic=dynamic))
    yield kept
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["align", "distill", "finetune", pytest.param("lora", marks=pytest.mark.slow)])
def test_compiled_layers_train_as_they_are_and_alignment_compiles_what_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_convert.training import stage as module

    compiled: list[str] = []
    real = torch.compile

    def compile_without_a_backend(call: Any, dynamic: bool) -> Any:
        compiled.append(call.__qualname__ if isfunction(call) else f"{type(call.__self__).__name__}.{call.__name__}")
        return real(call, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_without_a_backend)
    # on a CPU a compiled op halves its chunks to the end, an eager one as far as it must; here both do the former
    monkeypatch.setattr(gated_recurrence, "reads_no_values", lambda: True)
    lora = {"lora": Lora(rank=4)} if name == "lora" else {}
    curves = []
    for on in (False, True):
        monkeypatch.setattr(module, "gains_by_compiling", lambda device, on=on: on)
        curves.append(train(make_stage(name, steps=3, **lora), tmp_path / str(on))["loss"])
    np.testing.assert_allclose(*curves, rtol=1e-5)
    parts = ["LlamaAttention.forward", "LlamaMLP.forward", *["LlamaRMSNorm.forward"] * 2]
    assert compiled == {
        # the linear layers, their error, and the base in parts
        "align": ["LinearizedAttention._call_impl"] * 2 + ["LinearizedForCausalLM.relative_error"] + parts * 3,
        "distill": ["LlamaDecoderLayer._call_impl"] * 6,  # of model and base
    }.get(name, ["LlamaDecoderLayer._call_impl"] * 3)
    before = len(compiled)
    train(make_stage(name, steps=1, compile=False, **lora), tmp_path / "off")
    assert len(compiled) == before


@torch._dynamo.config.patch(optimize_ddp=True)
def test_a_layer_is_compiled_whole_where_processes_share_rows(
    graphs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a layer is split wherever a bucket of gradients is full, which here is after each weight."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    base = load_base(folders()[0], CPU, torch.float32).train().requires_grad_()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shared = torch.nn.parallel.DistributedDataParallel(base, bucket_cap_mb=1e-5)
        compile_layers(base, FinetuneObjective(), False)
        ids = torch.arange(3, 3 + SEQ_LEN)[None]
        shared(input_ids=ids, use_cache=False).logits.sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert len(graphs) == 1, "one for all layers"


@pytest.mark.parametrize(
    ("accumulation", "lengths"),
    [pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)],
)
@every_stage
def test_replayed_passes_train_the_same_weights(
    name: str, accumulation: int, lengths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if a graph for rows of another length is captured between two micro-batches of a step."""
    only = {"align": {"calibrate": False}, "distill": {}}.get(name, {"loss_on": "all"})
    shorter = [{"seq_len": SEQ_LEN // 4, "fraction": 0.5}] * (lengths - 1)
    stage = make_stage(name, steps=3, accumulation=accumulation, concat_documents=True, mixed_seq_lens=shorter, **only)
    plain = train(stage, tmp_path / "plain")
    assert plain["fwd_bwd"] == "eager: there is no Nvidia GPU"
    with monkeypatch.context() as patches:
        done = replayed_on_a_cpu(patches)
        replayed = train(stage, tmp_path / "replayed")
    assert done.count("captured") == lengths
    assert done.count("replayed") == 3 * accumulation
    assert done.count("memory") == 1, "all graphs share it"
    assert replayed["fwd_bwd"] == "captured"
    np.testing.assert_allclose(replayed["loss"], plain["loss"], rtol=1e-5)
    before, after = (
        {k: v for f in files_of(out) for k, v in load_file(f).items()}
        for out in (tmp_path / "plain", tmp_path / "replayed")
    )
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("flat", [False, True])
def test_graphs_of_two_shapes_add_to_the_same_gradients(
    flat: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flat: the gradients are parts of one tensor."""
    from liger_convert.training.capture import CapturedFwdBwd

    if device == "cpu":
        replayed_on_a_cpu(monkeypatch)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device))

    def passes(batch: dict[str, Tensor]) -> Tensor:
        loss = (batch["x"] @ weight).tanh().square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    graphs = CapturedFwdBwd(passes, [weight], [], flat=flat)
    for rows in ((8, 32, 8), (32,), (32, 8), (8, 8, 32)):  # micro-batches of a step
        batches = [{"x": torch.randn(n, 64, device=device)} for n in rows]
        expected = [passes(batch).item() for batch in batches]
        expected_grad, weight.grad = weight.grad, None
        found = []
        for batch in batches:
            graphs.capture(batch)
            found.append(graphs(batch).item())
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        torch.testing.assert_close(weight.grad, expected_grad, rtol=1e-4, atol=1e-4)
        assert [whole.data_ptr() == weight.grad.data_ptr() for whole in graphs.flats] == [True] * flat
        assert bool(graphs.layout) == flat
        weight.grad = None


def test_what_is_captured_is_compiled_once(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is compiled again wherever autocast's cache is on if it was off before."""
    from liger_convert.training.capture import CapturedFwdBwd

    replayed_on_a_cpu(monkeypatch)
    layer = torch.nn.Linear(4, 4)
    compiled = torch.compile(layer, dynamic=False)

    def passes(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(batch["x"]).sum()
        loss.backward()
        return loss.detach()

    CapturedFwdBwd(passes, list(layer.parameters()), []).capture({"x": torch.ones(3, 4)})
    assert len(graphs) == 1


@pytest.mark.parametrize("trained", ["adapters", "weights"])
def test_layers_of_a_kind_share_a_graph(trained: str, graphs: list[Any]) -> None:
    """Also the first one, if the embeddings are frozen so that its input would need no gradient."""
    base = load_base(folders()[0], CPU, torch.float32).train()
    base.get_input_embeddings().requires_grad_(trained == "weights")
    compile_layers(base, FinetuneObjective(), False)
    base(input_ids=torch.arange(3, 3 + SEQ_LEN)[None], use_cache=False).logits.sum().backward()
    assert len(graphs) == 1


def test_what_is_compiled_is_kept_for_the_next_run(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

    linear = load_pretrained(folders()[1], dtype=torch.float32).train()
    monkeypatch.setattr(gated_recurrence, "reads_no_values", lambda: True)  # as on a GPU
    compile_layers(linear, FinetuneObjective(), False)
    with torch.autocast("cpu", torch.bfloat16):
        linear(input_ids=torch.arange(3, 3 + SEQ_LEN)[None], use_cache=False)
    for graph in graphs:
        check_cacheable(graph)
    functions = [graph for graph in graphs if "autograd_function_apply" in graph.code]
    assert functions, "what torch would not keep by itself"
    with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=False):
        for graph in functions:
            with pytest.raises(BypassAOTAutogradCache):
                check_cacheable(graph)


def test_what_is_kept_is_not_used_for_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kept graph does in its backward pass is not part of its key otherwise."""
    module = ModuleType("new_mixer")
    module.__file__ = str(tmp_path / "new_mixer.py")
    monkeypatch.setitem(sys.modules, "new_mixer", module)
    model = load_pretrained(folders()[1])
    model.model.layers[0].self_attn.mixer.__class__ = type("New", (MIXERS["gla"],), {"__module__": "new_mixer"})
    tags = []
    for text in ("1", "2", "1"):
        (tmp_path / "new_mixer.py").write_text(text)
        compile_layers(model, FinetuneObjective(), False)
        tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]


def test_a_folders_hash_is_that_of_all_its_code(tmp_path: Path) -> None:
    hashes = set()
    for text in ("1", "2"):
        file = tmp_path / text / "op" / "kernel.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        hashes |= {code_hash(tmp_path / text), code_hash(file)}
    assert len(hashes) == 2
    assert code_hash(tmp_path) not in hashes


def test_gradients_beside_the_flat_ones_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of graphs for rows of another length; whose the flat ones are is told apart."""
    from liger_convert.training.capture import CapturedFwdBwd

    replayed_on_a_cpu(monkeypatch)
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]

    def passes(batch: dict[str, Tensor]) -> Tensor:
        used = weights[: 1 + (len(batch["x"]) > 3)] if len(batch["x"]) != 2 else weights[1:]
        loss = sum(weight.sum() for weight in used) * batch["x"].sum()
        loss.backward()
        return loss.detach()

    layouts = {}
    for rows in ((3,), (1, 3), (2,), (4,), (3, 4)):
        graphs = CapturedFwdBwd(passes, weights, [], flat=True)
        for number in rows:
            graphs.capture({"x": torch.ones(number)})
        layouts[rows] = graphs.layout
    assert layouts[3,] == layouts[1, 3] != 0
    assert len({layouts[3,], layouts[2,], layouts[4,], 0}) == 4
    assert layouts[3, 4] == 0


@pytest.mark.parametrize("successes", [0, 1])
def test_passes_that_cannot_be_captured_are_run_as_they_are(
    successes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there is a graph for rows of another length: it is dropped, and its memory is given back."""
    from liger_convert.training import capture

    shorter = [{"seq_len": SEQ_LEN // 4, "fraction": 0.5}]
    stage = make_stage("distill", steps=3, accumulation=2, concat_documents=True, mixed_seq_lens=shorter)
    plain = train(stage, tmp_path / "plain")
    replayed_on_a_cpu(monkeypatch)
    works, tried, graphs = capture.capture, [], []

    def fails(*given: Any) -> Any:
        tried.append(len(tried))
        if len(tried) <= successes:
            return works(*given)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def forget(self: capture.CapturedFwdBwd) -> None:
        graphs.append(len(self.replays))
        dropped(self)
        graphs.append((len(self.replays), self.memory))

    dropped = capture.CapturedFwdBwd.forget
    monkeypatch.setattr(capture, "capture", fails)
    monkeypatch.setattr(capture.CapturedFwdBwd, "forget", forget)
    stats = train(stage, tmp_path / "failed")
    assert graphs == [successes, (0, None)]
    assert stats["fwd_bwd"] == "eager: the capture failed: operation not permitted when stream is capturing"
    np.testing.assert_allclose(stats["loss"], plain["loss"], rtol=1e-5)


def test_what_keeps_a_stage_from_being_captured_is_said() -> None:
    from liger_convert.training.capture import why_not_captured

    def why(exchanges: bool = False, device: str = "cuda", base: Any = None, **changes: Any) -> str | None:
        stage = make_stage("distill", **({"concat_documents": True} | changes))
        return why_not_captured(
            stage, [base or load_base(folders()[0], CPU, torch.float32)], torch.device(device), exchanges
        )

    assert why() is None
    assert "no Nvidia GPU" in str(why(device="cpu"))
    assert why(concat_documents=False) is None
    assert "compile: false" in str(why(compile=False))
    assert "processes share" in str(why(exchanges=True))
    assert "checkpointing" in str(why(gradient_checkpointing=True))
    assert why(base=load_base(folders("mistral")[0], CPU, torch.float32)) is None
    eager = load_base(folders()[0], CPU, torch.float32)
    eager.set_attn_implementation("eager")
    assert "'eager'" in str(why(base=eager))


def test_only_an_export_is_taken_for_one() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if is_exporting() else x - 1

    zero = torch.zeros(1)
    assert Asks()(zero) == torch.compile(Asks(), backend="eager")(zero) == -1
    assert all(torch.export.export(Asks(), (zero,), strict=strict).module()(zero) == 1 for strict in (True, False))


def test_a_loop_over_chunks_is_left_out_of_a_gpus_graphs_and_stays_in_an_export() -> None:
    nodes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    def loop(x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            x = x.cos()
        return x

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, on_gpu: bool = True) -> Tensor:
            return outside_of_graphs(loop, x * 2, length=100, on_gpu=on_gpu) + 1

    layer, x = Layer(), torch.randn(3)
    assert torch.equal(torch.compile(layer, backend=backend)(x), layer(x))
    assert max(nodes) < 10
    torch.compile(layer, backend=backend)(x, on_gpu=False)
    assert max(nodes) > 100
    assert torch.equal(torch.export.export(layer, (x,), strict=False).module()(x), layer(x))


def test_before_and_in_a_capture_no_op_looks_at_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reads_no_values()
    mode, capturing = 2, False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert reads_no_values()
    mode, capturing = 0, True
    assert reads_no_values()
    capturing = False
    assert not reads_no_values()


@pytest.mark.parametrize("tokens", [1, 128, 200, 128 * 128])
def test_sums_of_forget_gates_are_compiled_in_pieces(tokens: int) -> None:
    """Compiled for a GPU, torch 2.11 crashes on a scan of more than 128 tokens of a tensor to which a bias was added,
    as in these gates. What the pieces sum up to is as exact as adding up token by token."""
    torch.compiler.reset()
    scanned: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            if "cumsum" in str(node.target):
                scanned.append(node.args[0].meta["example_value"].shape[node.args[1]])
        return graph.forward

    q, k = torch.randn(1, tokens, 4, 8), torch.randn(1, tokens, 2, 8)
    gates = torch.rand(1, tokens, 2).log()
    compiled = torch.compile(with_forgetting, backend=backend, dynamic=False)(q, k, None, gates)[1]
    exact, one_by_one = gates.double().cumsum(1), torch.stack(list(accumulate(gates.unbind(1))), 1)
    error, plain = ((sums - exact).abs().max() for sums in (-compiled[..., -1], one_by_one))
    assert error <= 2 * plain
    assert scanned
    assert max(scanned) <= 128


@needs_cuda
@pytest.mark.parametrize(
    "name", ["gla", "forgetting", "gsa", "abc", "deltanet", "gated-deltanet", "mamba", "s4", "titans"]
)
def test_a_layer_compiled_for_a_gpu_is_what_it_was_in_graphs_that_do_not_grow_with_the_row(
    name: str, tmp_path: Path
) -> None:
    torch.compiler.reset()  # a function is compiled so many times and no more
    base = save_tiny_base("llama", tmp_path, tokenizer=False)
    plan = {"format": 2, "mixers": {"main": resolve_spec({"type": name, "window": 8})}, "layers": ["main"] * 3}
    model = linearize_base(base, plan, dtype=torch.bfloat16).to("cuda")
    attention, sizes = model.model.layers[1].self_attn, []
    exact = deepcopy(attention).float()

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return compile_fx(graph, inputs)

    x_BTC = torch.randn(2, 512, 32, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(512, device="cuda")[None]
    metadata = SequenceMetadata.build(x_BTC, positions, None)
    rotary = model.model.rotary_emb(x_BTC, positions)
    expected = exact(x_BTC.float(), tuple(x.float() for x in rotary), metadata=metadata)[0]
    plain = (attention(x_BTC, rotary, metadata=metadata)[0] - expected).abs()
    attention.compile(backend=backend, dynamic=False)
    found = (attention(x_BTC, rotary, metadata=metadata)[0] - expected).abs()
    assert found.max() <= 2 * plain.max()
    assert found.mean() <= 2 * plain.mean()
    assert 0 < max(sizes) < 512


@needs_cuda
def test_a_second_graph_and_the_steps_before_it_need_no_memory_of_their_own() -> None:
    from liger_convert.training.capture import CapturedFwdBwd

    weight = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda") / 32)

    def passes(batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for _ in range(24):
            x = torch.tanh(x @ weight)
        loss = x.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    graphs, reserved = CapturedFwdBwd(passes, [weight], []), []
    for rows in ((8, 1024), (64, 128), (32, 256)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        graphs.capture({"x": torch.randn(*rows, 1024, device="cuda")})
        reserved.append(torch.cuda.max_memory_reserved())
    activations = 2 * 24 * 8 * 1024 * 1024 * 4
    assert reserved[0] > activations / 2
    assert max(reserved) < reserved[0] + activations / 4
    for rows in ((32, 256), (8, 1024)):  # each still computes what it did
        x = torch.randn(*rows, 1024, device="cuda")
        found = graphs({"x": x}).item()
        assert weight.grad is not None
        gradient, weight.grad = weight.grad.clone(), None
        assert found == pytest.approx(passes({"x": x}).item(), rel=1e-4)
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-3, atol=1e-2)
        weight.grad = None


@needs_cuda
def test_work_of_a_step_that_cannot_be_captured_is_done_before_its_inputs_are_given_back() -> None:
    table, heavy = torch.randn(64, 8, device="cuda"), torch.randn(4096, 4096, device="cuda")
    gradient = torch.zeros(8, device="cuda")

    def step(ids: Tensor) -> Tensor:
        x = heavy
        for _ in range(50):  # keeps the GPU busy while the host goes on
            x = torch.tanh(x @ heavy)
        found = table[ids + 0 * x[0, 0].long()]
        gradient.add_(found.sum(0))
        return found.sum() if found.sum() > 0 else found.mean()  # looks at a value

    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(step, (torch.zeros(1024, dtype=torch.long, device="cuda"),), lambda: [gradient])
    taken = [torch.full((1024,), 1 << 40, device="cuda") for _ in range(8)]  # where the ids were
    torch.cuda.synchronize()  # an index beyond the table would end the process here
    assert len(taken) == 8
    assert not gradient.any()
