"""A `.gguf` base in parts gives the same as one in a single file. Every tensor type is read as by the package gguf."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_models import SAMPLE, write_gguf
from safetensors.torch import load_file
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_convert.io import gguf_fields, gguf_header
from liger_convert.io.checkpoint import base_config, load_tokenizer, resolve_base
from liger_convert.io.gguf_parts import join, parts_of
from liger_convert.pipeline.recorded_inputs import parts_by_field
from liger_convert.utils.errors import BadInput

UNREADABLE = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_tiny_base("llama", tmp_path_factory.mktemp("llama"))).eval()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One whose rows are as long as a block of the types with the longest."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_pretrained(save_tiny_base("llama", tmp_path_factory.mktemp("wide"), **sizes))


@contextlib.contextmanager
def edited(weight: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """Lets the block change a weight, which is restored afterwards."""
    before = weight.detach().clone()
    try:
        yield weight.data
    finally:
        weight.data.copy_(before)


@pytest.mark.parametrize("named", [1, 3])
def test_a_model_in_parts_is_the_model_in_one_file(model: Any, named: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", model)
    write_gguf(tmp_path / "whole.gguf", model, parts=3)
    part = str(tmp_path / f"whole-0000{named}-of-00003.gguf")
    one = resolve_base(str(tmp_path / "whole.gguf"), tmp_path / "one")
    joined = resolve_base(part, tmp_path / "parts")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (one / name).read_bytes() == (joined / name).read_bytes()
    load_tokenizer(joined)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["base"]
    whole = str(tmp_path / "whole.gguf")
    assert base_config(part).to_diff_dict() == base_config(whole).to_diff_dict()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_file_of_the_same_name_in_the_working_directory_is_not_read_instead(
    model: Any, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given").mkdir()
    write_gguf(tmp_path / "given/m.gguf", model, parts=parts)
    other = AutoModelForCausalLM.from_pretrained(save_tiny_base("llama", tmp_path / "other", seed=1))
    write_gguf(tmp_path / "m.gguf", other, parts=parts)
    monkeypatch.chdir(tmp_path)
    name = "m.gguf" if parts == 1 else "m-00001-of-00003.gguf"
    made = AutoModelForCausalLM.from_pretrained(resolve_base(f"given/{name}", tmp_path / "work"))
    assert all(made.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_all_parts_are_inputs_of_a_run(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", model, parts=3)
    parts = sorted(tmp_path.iterdir())
    assert list(parts_by_field("base", parts[1]).values()) == parts == parts_of(parts[0])
    assert parts_by_field("base", tmp_path) == {"base": tmp_path}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda parts: parts[1].unlink(), r"m-00002-of-00003\.gguf: this part of m-00001-of-00003\.gguf is missing"),
        (lambda parts: parts[2].rename(parts[1]), r"m-00003-of-00003\.gguf: this part .* is missing; put all 3"),
        (
            lambda parts: parts[1].write_bytes(parts[2].read_bytes()),
            r"m-00002-of-00003\.gguf: says that it is part 3 of 3, but its name says 2 of 3; .*gguf-split --merge",
        ),
        (lambda parts: parts[2].write_bytes(b"GGUF"), r"m-00003-of-00003\.gguf: cannot be read as a GGUF model"),
    ],
    ids=["missing", "renamed", "exchanged", "broken"],
)
def test_parts_that_do_not_make_a_model_are_refused(model: Any, tmp_path: Path, change: Any, says: str) -> None:
    write_gguf(tmp_path / "m.gguf", model, parts=3)
    change(sorted(tmp_path.iterdir()))
    for use in (lambda s: resolve_base(s, tmp_path / "work"), base_config):
        with pytest.raises(BadInput, match=says):
            use(str(tmp_path / "m-00001-of-00003.gguf"))
    assert not (tmp_path / "work").exists()


def test_a_part_under_another_name_is_refused(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model, parts=2)
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "m.gguf")
    with pytest.raises(BadInput, match=r"m\.gguf: says that it is part 1 of 2, but its name says 1 of 1; restore its"):
        resolve_base(str(tmp_path / "m.gguf"), tmp_path / "work")


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_every_type_is_read_or_refused_before_any_work(wide: Any, kind: Kind, tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "model.gguf", wide, kind=kind)
    if kind.name in UNREADABLE:
        for use in (lambda s: resolve_base(s, tmp_path / "work"), base_config):
            with pytest.raises(
                BadInput, match=rf"tensor blk\.0\.\S+ is of type {kind.name}, which .*; give one of F32, "
            ):
                use(str(tmp_path / "model.gguf"))
        assert not (tmp_path / "work").exists()
        return
    made = load_file(resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work") / "model.safetensors")
    expected = torch.from_numpy(gguf.dequantize(stored[SAMPLE], kind).copy())
    assert made[SAMPLE].dtype == torch.float32
    assert torch.equal(made[SAMPLE], expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_package_gguf_does_not_read_the_tokens(
    model: Any, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf", model, parts=parts)
    source = str(tmp_path / ("m.gguf" if parts == 1 else "m-00001-of-00002.gguf"))
    read: list[bool] = []

    class Reader(gguf.GGUFReader):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            read.append("tokenizer.ggml.tokens" in self.fields)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    base_config(source)
    assert True not in read
    resolve_base(source, tmp_path / "work")
    assert read.count(True) <= transformers.__version__.startswith("5.17.")  # which has it read them for a tokenizer


@pytest.mark.parametrize("fields", [{}, {"starcoder2.vocab_size": 7}])
def test_a_config_has_as_many_tokens_as_the_header(fields: dict[str, int], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "starcoder2")  # of which transformers does not read vocab_size
    writer.add_block_count(1)
    writer.add_token_list([f"t{i}" for i in range(9)])
    for name, value in fields.items():
        writer.add_uint32(name, value)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert base_config(str(tmp_path / "m.gguf")).vocab_size == fields.get("starcoder2.vocab_size", 9)


def test_a_config_that_is_made_of_the_number_of_tokens_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "lfm2")  # as transformers 5.23 reads this architecture
    sizes = {"block_count": 2, "embedding_length": 8, "feed_forward_length": 8, "attention.head_count": 1}
    for name, value in (sizes | {"context_length": 64, "shortconv.l_cache": 3}).items():
        writer.add_uint32(f"lfm2.{name}", value)
    writer.add_array("lfm2.attention.head_count_kv", [0, 1])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_token_list([f"t{i}" for i in range(9)])
    for i in range(2):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert base_config(str(tmp_path / "m.gguf")).vocab_size == 9


def test_a_part_that_shrinks_while_it_is_read_is_refused(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model, parts=2)
    headers = gguf_header.check(parts_of(tmp_path / "m-00001-of-00002.gguf"))
    with open(headers[1].path, "r+b") as file:
        file.truncate(headers[1].data_begin + 8)
    with pytest.raises(BadInput, match=r"m-00002-of-00002\.gguf: has become shorter while it was read"):
        join(headers, tmp_path / "joined.gguf")


def test_a_llama_that_is_called_mistral_is_a_llama(model: Any, tmp_path: Path) -> None:
    for name in ("other", "mistral"):
        write_gguf(tmp_path / f"{name}.gguf", model, fields={"general.name": name})
        resolve_base(str(tmp_path / f"{name}.gguf"), tmp_path / name)
    assert base_config(str(tmp_path / "mistral.gguf")).model_type == "llama"
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "mistral/base" / file).read_bytes() == (tmp_path / "other/base" / file).read_bytes()


def mixtral(model: Any) -> Any:
    """What llama.cpp makes of a Mixtral: a llama whose layers have experts."""
    state = {name: tensor for name, tensor in model.state_dict().items() if ".mlp." not in name}
    for i in range(model.config.num_hidden_layers):
        moe = f"model.layers.{i}.block_sparse_moe"
        state |= {f"{moe}.gate.weight": torch.ones(4, 32)}
        state |= {f"{moe}.experts.w{n}.weight": torch.ones(4, *((32, 48) if n == 2 else (48, 32))) for n in (1, 2, 3)}
    return SimpleNamespace(config=model.config, state_dict=lambda: state)


@pytest.mark.parametrize("architecture", ["mistral", "mistral3", "mixtral", "llama"])
def test_an_architecture_that_transformers_cannot_read_is_one_sentence(
    model: Any, architecture: str, tmp_path: Path
) -> None:
    experts = {"llama.expert_count": 4, "llama.expert_used_count": 2} if architecture == "llama" else None
    made = mixtral(model) if experts else model
    write_gguf(tmp_path / "m.gguf", made, architecture=architecture, fields=experts)
    which = "with experts, as of Mixtral, " if experts else ""
    says = (
        rf"^base: \S+/m\.gguf: transformers {transformers.__version__} cannot read the architecture '{architecture}' "
        rf"{which}from a \.gguf file; give the safetensors folder that it was made from$"
    )
    for use in (lambda s: resolve_base(s, tmp_path / "work"), base_config):
        with pytest.raises(BadInput, match=says):
            use(str(tmp_path / "m.gguf"))
    assert not (tmp_path / "work").exists()


# --- what the library's reader leaves out


def rotary(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | changes}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None], use_cache=False).logits


def factors_of(model: Any) -> np.ndarray:
    """What llama.cpp stores of a rotary of Llama 3: by what its frequencies are divided."""
    D = model.config.head_dim
    plain = model.config.rope_parameters["rope_theta"] ** -(torch.arange(0, D, 2) / D)
    return (plain / model.model.rotary_emb.inv_freq).float().numpy()


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64.0,
            },
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
            | {"beta_fast": 6.0, "beta_slow": 0.25},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64.0,
                "llama.rope.scaling.yarn_beta_fast": 6.0,
                "llama.rope.scaling.yarn_beta_slow": 0.25,
                "llama.rope.scaling.yarn_ext_factor": 1.0,
                "llama.rope.scaling.yarn_attn_factor": 1.0,
                "llama.rope.scaling.yarn_log_multiplier": 0.0,
            },
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 8192},
            {},
        ),
    ],
    ids=["linear", "yarn", "yarn-betas", "llama3"],
)
def test_the_scaling_of_a_rotary_is_read(scaling: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    changes = rotary(rope_theta=5e5, **scaling) | {"head_dim": 64}
    model = AutoModelForCausalLM.from_pretrained(save_tiny_base("llama", tmp_path / "base", **changes)).eval()
    factors = factors_of(model) if scaling["rope_type"] == "llama3" else None
    write_gguf(tmp_path / "model.gguf", model, fields=fields, factors=factors)
    write_gguf(tmp_path / "model.gguf", model, fields=fields, factors=factors, parts=2)
    made = AutoModelForCausalLM.from_pretrained(resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")).eval()
    torch.testing.assert_close(logits(made), logits(model), atol=1e-3, rtol=1e-3)
    for name in ("model.gguf", "model-00001-of-00002.gguf"):
        assert base_config(str(tmp_path / name)).rope_parameters["rope_type"] == scaling["rope_type"]
    made.model.rotary_emb.inv_freq.copy_(5e5 ** -(torch.arange(0, 64, 2) / 64))  # as without the scaling
    assert not torch.allclose(logits(made), logits(model), atol=1e-2)


@pytest.mark.parametrize(
    ("fields", "factors", "says"),
    [
        (
            {"llama.rope.scaling.type": "longrope"},
            None,
            "its rotary embedding is scaled by 'longrope', which is not supported",
        ),
        (
            {},
            np.array([1, 2, 3, 5], np.float32),
            r"rope_freqs\.weight scales its rotary embedding in an unsupported way",
        ),
        *(
            (
                {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0, f"llama.{name}": value},
                None,
                rf"{name} is {value}, which is not supported",
            )
            for kind, name, value in [
                ("yarn", "rope.scaling.yarn_attn_factor", 0.5),
                ("yarn", "rope.scaling.attn_factor", 1.25),
                ("yarn", "rope.scaling.yarn_log_multiplier", 1.0),
                ("yarn", "rope.scaling.yarn_ext_factor", 0.5),
                ("linear", "rope.scaling.yarn_ext_factor", 1.0),
                ("linear", "rope.scaling.alpha", 2.0),
            ]
        ),
    ],
)
def test_a_scaling_that_the_config_cannot_say_is_refused(
    model: Any, fields: dict[str, Any], factors: Any, says: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", model, fields=fields, factors=factors)
    for use in (lambda s: resolve_base(s, tmp_path / "work"), base_config):
        with pytest.raises(BadInput, match=rf"model\.gguf: {says}; give the safetensors folder"):
            use(str(tmp_path / "model.gguf"))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("kind", "before", "fields", "expected"),
    [
        ("starcoder2", {}, {"rope.freq_base": 1e5}, {"rope_parameters.rope_theta": 1e5}),
        ("stablelm", {}, {"rope.dimension_count": 4}, {"rope_parameters.partial_rotary_factor": 0.5}),
        ("stablelm", {}, {"rope.dimension_count": 8}, {"rope_parameters.partial_rotary_factor": 1.0}),
        (
            "gemma2",
            {},
            {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 9.0},
            {"final_logit_softcapping": 9.0},
        ),
        ("gemma2", {"num_hidden_layers": 46}, {}, {"query_pre_attn_scalar": 8}),
        ("gemma2", {"num_hidden_layers": 42}, {}, {"query_pre_attn_scalar": 256}),
        ("qwen3_moe", {}, {"expert_feed_forward_length": 24}, {"moe_intermediate_size": 24}),
        ("phi3", {}, {}, {"pad_token_id": None, "eos_token_id": None, "sliding_window": None}),
        (
            "gemma3_text",
            {},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6},
            {"rope_parameters.full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
        ),
    ],
)
def test_other_fields_are_put_into_the_config(
    kind: str, before: dict[str, Any], fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[kind](hidden_size=32, num_attention_heads=4, **before)
    if hasattr(config, "head_dim"):
        config.head_dim = 8
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", kind.removesuffix("_text"))
    for name, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{kind.removesuffix('_text')}.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf_fields.complete(config, gguf.GGUFReader(tmp_path / "m.gguf"), tmp_path / "m.gguf")
    for path, value in expected.items():
        found = config
        for name in path.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        assert found == value


def test_a_file_of_which_transformers_makes_a_tokenizer_that_splits_its_words_is_refused(tmp_path: Path) -> None:
    words = tuple(f"Ġ{a}{b}all" for a in "bcft" for b in "aeiou")
    base = save_tiny_base("llama", tmp_path / "llama", vocab_size=101 + len(words))
    write_gguf(file := tmp_path / "model.gguf", AutoModelForCausalLM.from_pretrained(base), words=words)
    says = (
        rf"model\.gguf: transformers {transformers.__version__} makes a tokenizer that splits words of its .*'baall'; "
    )
    with pytest.raises(BadInput, match=says):
        resolve_base(str(file), tmp_path / "work")
    assert not list(tmp_path.glob("work/*"))


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("qwen3", {"head_dim": 16}, {}),
        ("phi3", {"sliding_window": 24, "partial_rotary_factor": 1.0}, {"phi3.attention.sliding_window": 24}),
    ],
)
def test_what_the_reader_leaves_at_a_default_is_read(
    family: str, changes: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_base(family, tmp_path / "base", **changes)).eval()
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_()
    write_gguf(tmp_path / "model.gguf", model, fields=fields)
    made = AutoModelForCausalLM.from_pretrained(resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")).eval()
    torch.testing.assert_close(logits(made), logits(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [None, Kind.Q8_0])
def test_a_weight_that_is_not_finite_is_named_by_its_file_and_tensor(
    wide: Any, value: float, parts: int, kind: Kind | None, tmp_path: Path
) -> None:
    with edited(wide.get_parameter(SAMPLE)) as weight, np.errstate(all="ignore"):
        weight[1, 2] = value
        write_gguf(tmp_path / "m.gguf", wide, parts=parts, kind=kind)
    files = sorted(tmp_path.glob("*.gguf"))
    (damaged,) = [file for file in files if "blk.0.ffn_down.weight" in gguf_header.Header(file).tensors]
    says = rf"^base: {damaged}: tensor blk\.0\.ffn_down\.weight contains NaN or infinity; the file is damaged$"
    with pytest.raises(BadInput, match=says):
        resolve_base(str(files[0]), tmp_path / "work")
    assert not list(tmp_path.glob("work/*"))


def test_tensors_that_the_reader_would_leave_out_are_refused(model: Any, tmp_path: Path) -> None:
    model.model.layers[0].mlp.gate = torch.nn.Linear(8, 1, bias=False)  # as of experts
    try:
        write_gguf(tmp_path / "model.gguf", model)
    finally:
        del model.model.layers[0].mlp.gate
    with pytest.raises(
        BadInput, match=r"model\.gguf: transformers would leave out 8 of the [\d,]+ values of its tensors"
    ):
        resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"llama.rope.freq_base": -1.0}, r"rope_parameters\.rope_theta should be a number above 0, not -1\.0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps should be a finite number, not nan"),
    ],
)
def test_numbers_of_a_header_are_checked_as_those_of_a_config(
    model: Any, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", model, fields=fields)
    for use in (lambda s: resolve_base(s, tmp_path / "work"), base_config):
        with pytest.raises(BadInput, match=rf"^base: \S+/model\.gguf: {says}"):
            use(str(tmp_path / "model.gguf"))


def test_a_tokenizer_without_its_tokens_is_refused(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", model)
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.nekots"))
    with pytest.raises(
        BadInput, match=r"model\.gguf: a field tokenizer\.ggml of its tokenizer is missing or wrong: 'tok"
    ):
        resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")
