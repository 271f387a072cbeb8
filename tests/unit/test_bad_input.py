"""Every mistake of a user ends with one sentence, the right exit code, and nothing new on the disk."""

import json

import pytest
import torch
from tiny import save_tiny_base
from worlds import World, after, case, edited, files, remove, wrote

from liger_convert.cli import main

Q = "model.layers.1.self_attn.q_proj.weight"
RATES = "stages[0].learning_rates={mixer: 1e-3, lora: 1e-3}"
convert = World.convert
RECIPES = [
    case("misspelled key", "mixr: unknown key; did you mean 'mixer'?", lambda w: w.run("mixr={}")),
    case(
        "misspelled key in a stage", "stages[0].learning_rates.mixr", lambda w: w.run("stages[0].learning_rates.mixr=1")
    ),
    case("misplaced key", "belongs to mixer.window", lambda w: w.run("window=64")),
    case("wrong type", "seed: should be a whole number", lambda w: w.run("seed=x")),
    case("unknown stage kind", "did you mean 'align'?", lambda w: w.run("stages[0].kind=alin")),
    case("unknown source kind", "did you mean 'file'?", lambda w: w.run("data.text.source=fil")),
    case("unknown source name", "stages[0].data: 'books'", lambda w: w.run("stages[0].data=books")),
    case("a path that is empty", "data.text.path: ", lambda w: w.run("data.text.path=''")),
    case(
        "a validation file without a name",
        "data.text.validation: ",
        lambda w: w.run("data.text={source: file, path: text.jsonl, validation: ''}"),
    ),
    case("nothing to train", "every group is frozen", lambda w: w.run("stages[0].learning_rates={}")),
    *(
        case(
            f"nothing to train in {name}",
            "stages[0].learning_rates: nothing in this model is of the group mixer, so the stage has nothing to train",
            lambda w, command=command, mixer=mixer: command(w, f"mixer={mixer}"),
        )
        for command in (World.run, World.plan)
        for name, mixer in {
            "a window": "{type: window, window: 8}",
            "fixed gates": "{type: forgetting, gate: fixed}",
        }.items()
    ),
    *(
        case(
            f"a layer with nothing to train, layer by layer, in {command.__name__}",
            "stages[0].layerwise: the mixer of layer 1 has no parameters",
            lambda w, command=command: command(
                w,
                "stages[0].layerwise=true",
                "stages[0].learning_rates={mixer: 1e-3}",
                "mixers={plain: {type: window, window: 8}}",
                "layers=[main, plain, main]",
            ),
        )
        for command in (World.run, World.plan)
    ),
    case(
        "an adapter on the embeddings",
        "stages[0].lora.targets: no projection is called 'embed_tokens'",
        lambda w: w.plan("stages[0].lora={targets: [lm_head, embed_tokens]}", RATES),
    ),
    case("unknown variant of adapters", "lora.variant", lambda w: w.run("stages[0].lora={variant: dorra}", RATES)),
    case(
        "adapters of more vectors than there are",
        "stages[0].lora.rank: pissa takes 99 singular vectors",
        lambda w: w.plan("stages[0].lora={variant: pissa, rank: 99}", RATES),
    ),
    case(
        "a base that is dropped in part",
        "stages[0].lora.dropout: would drop parts of the base",
        lambda w: w.plan("stages[0].lora={variant: pissa, dropout: 0.5}", RATES),
    ),
    case("less than one step", "stages[0].tokens", lambda w: w.run("stages[0].tokens=3")),
    case("bad precision", "use one of auto, float32", lambda w: w.run("precision=half")),
    case("unknown device", "'tpu' is not a device", lambda w: w.run("device=tpu")),
    case("a device that nothing was written for", "'mps' is not supported; use auto", lambda w: w.run("device=mps")),
    case("a plan on such a device", "device: 'meta' is not supported", lambda w: w.plan("device=meta")),
    case("a plan on an unknown device", "'gpu' is not a device", lambda w: w.plan("device=gpu")),
    case("absent device", "GPU that does not exist", lambda w: w.run("device=cuda:7")),
    case("unknown suite", "did you mean quick?", lambda w: w.run("eval.suite=quik")),
    case("unknown mixer", "mixer.type: mixer 'gle' is unknown", lambda w: w.run("mixer.type=gle")),
    case("unknown mixer option", "mixer.feature_mp", lambda w: w.run("mixer.feature_mp=relu")),
    case("bad mixer option", "mixer.feature_map", lambda w: w.run("mixer.feature_map=3")),
    case(
        "combine without a normalizer",
        "mixer.combine: shared",
        lambda w: w.run("mixer={type: deltanet, combine: shared}"),
    ),
    case("step that overshoots", "mixer.learning_rate", lambda w: w.run("mixer={type: ttt, learning_rate: 2}")),
    case("no slots", "mixer.slots: 0 is too small", lambda w: w.plan("mixer={type: gsa, slots: 0}")),
    case("slots that keys cannot fill", "slots: keys of size 8", lambda w: w.plan("mixer={type: gsa, slots: 5}")),
    case(
        "unknown inner mixer",
        "mixer.inner.type: mixer 'gle'",
        lambda w: w.plan("mixer={type: mom, inner: {type: gle}}"),
    ),
    case(
        "memories that are none",
        "mixer.inner.type: window",
        lambda w: w.plan("mixer={type: mom, inner: {type: window}}"),
    ),
    case("a window a memory", "mixer.inner.window: is", lambda w: w.plan("mixer={type: mom, inner: {window: 3}}")),
    case("too many active memories", "mixer.active: 5", lambda w: w.plan("mixer={type: mom, active: 5}")),
    case(
        "to forget nothing",
        "mixer.forget: this mixer always forgets",
        lambda w: w.plan("mixer={type: forgetting, forget: false}"),
    ),
    case("no states", "mixer.states: 0 is too small", lambda w: w.plan("mixer={type: mamba, states: 0}")),
    case("negative sinks", "mixer.sinks", lambda w: w.run("mixer.sinks=-1")),
    case("empty window", "mixer.window: 0 is too small", lambda w: w.run("mixer.window=0")),
    case("negative window", "mixer.window", lambda w: w.run("mixer.window=-1")),
    case(
        "sinks of all tokens",
        "mixer.sinks: an unlimited window",
        lambda w: w.plan("mixer={type: forgetting, sinks: 2}"),
    ),
    case("bad pattern", "layers: 'LXL' is not a pattern", lambda w: w.run("layers=LXL")),
    case("layer out of range", "layers.linear: layer 9 does not exist", lambda w: w.run("layers={linear: [9]}")),
    case("unknown repeated name", "layers.repeat[1]: 'min'", lambda w: w.plan("layers={repeat: [main, min]}")),
    case("nothing repeated", "layers.repeat", lambda w: w.plan("layers={repeat: []}")),
    case("list of wrong length", "layers: names 1 layer, but", lambda w: w.run("layers=[main]")),
    case("too many layers kept", "layers.softmax_auto: 3 is too many", lambda w: w.run("layers={softmax_auto: 3}")),
    case("one layer or all", "1.0 may mean one layer or all of them", lambda w: w.run("layers={softmax_auto: 1.0}")),
    case("half a layer kept", "between 0 and 1, not 1.5", lambda w: w.run("layers={softmax_auto: 1.5}")),
    case("neither a recipe nor a base", "RECIPE: is missing", lambda w: ["run"]),
    case("a base as a recipe", "to convert a base, use --base base", lambda w: ["run", "base"]),
    case("a file of weights as a recipe", "to convert a base, use --base m.gguf", lambda w: ["plan", "m.gguf"]),
    case(
        "a hub id as a recipe", "to convert a base, use --base Qwen/Qwen3-1.7B", lambda w: ["plan", "Qwen/Qwen3-1.7B"]
    ),
    case("no layer kept", "layers.softmax_auto: should be a whole number", lambda w: w.run("layers={softmax_auto: 0}")),
    case(
        "layers chosen on no text",
        "add another source under `data:`",
        lambda w: w.plan("layers={softmax_auto: 1}", "data={}", "stages=[]", "eval.text=null"),
    ),
    case("no linear layer", "nothing to linearize", lambda w: w.run("layers={softmax: [0, 1, 2]}")),
    case("unknown layer name", "layers[0]: 'man'", lambda w: w.run("layers=[man, main, main]")),
    case("override without value", "write it as field=value", lambda w: w.run("seed")),
    case("override into nothing", "[4] does not exist", lambda w: w.run("stages[4].tokens=1")),
    case("repeated key", "line 2: not valid YAML", after(wrote("recipe.yaml", "name: a\nname: b\n"), World.run)),
    case("no YAML", "line 2: not valid YAML", after(wrote("recipe.yaml", "name: [a\n"), World.run)),
    case("empty recipe", "a recipe is a mapping", after(wrote("recipe.yaml", ""), World.run)),
    case("binary recipe", "cannot be read as text", after(wrote("recipe.yaml", b"\xff\xfe\x00"), World.run)),
    case("missing fields", "required and missing", after(wrote("recipe.yaml", "version: 1\n"), World.run)),
    case("missing recipe", "there is no such file", after(remove("recipe.yaml"), World.run)),
    case(
        "shipped recipe by a path of the pages",
        "the shipped recipe is called smollm2-135m-quick",
        lambda w: ["plan", "recipes/smollm2-135m-quick.yaml"],
    ),
    case("unknown shipped recipe", "did you mean smollm2-135m-quick?", lambda w: ["plan", "smollm-135m-quick"]),
    case("plan of a bad recipe", "did you mean 'mixer'?", lambda w: w.plan("mixr={}")),
    case("plan with a bad layer", "layer 9 does not exist", lambda w: w.plan("layers={softmax: [9]}")),
]
BASES = [
    case("no such base", "there is no such file or folder", lambda w: w.run("base=/nowhere/at/all")),
    case("no such package", "package is not installed", lambda w: w.run("base=package:no_such_thing/x.gguf")),
    case(
        "garbage gguf",
        "cannot be read as a GGUF model",
        after(wrote("x.gguf", b"nope"), lambda w: w.run("base=x.gguf")),
    ),
    case("no config", "config.json", after(remove("base/config.json"), World.run)),
    *(
        case(f"{name} for {command.__name__}", says, after(*prepare, command))
        for command in (convert, World.plan)
        for name, says, *prepare in (
            (
                "adapter",
                "it is an adapter for org/model: merge the two",
                remove("base/config.json"),
                wrote("base/adapter_config.json", '{"base_model_name_or_path": "org/model"}'),
            ),
            (
                "original weights",
                "its folder original/ has another format",
                remove("base/config.json"),
                lambda w: (w.base / "original").mkdir(),
            ),
        )
    ),
    case("folder above", "did you mean", lambda w: ["plan", "--base", str(w.folder)]),
    case(
        "weights file", "give the folder that contains it", lambda w: ["plan", "--base", f"{w.base}/model.safetensors"]
    ),
    *(
        case(
            f"git-lfs pointer {name}",
            f"{name}: is a placeholder for a file that git-lfs has not fetched",
            after(wrote(f"base/{name}", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), convert),
        )
        for name in ("model.safetensors", "tokenizer.json")
    ),
    case(
        "quantized, for generate",
        "base: transformers cannot load it: ",
        after(
            lambda w: w.config(quantization_config={"quant_method": "gptq", "bits": 4}),
            lambda w: ["generate", str(w.base), "--prompt", "hi"],
        ),
    ),
    case("broken config", "cannot be read as JSON", after(wrote("base/config.json", "{"), World.run)),
    case("unknown family", "supported: llama", after(lambda w: w.config(model_type="gpt2"), World.run)),
    case("quantized", "is quantized", after(lambda w: w.config(quantization_config={"bits": 4}), World.run)),
    case(
        "rotary embeddings without a base",
        "rope_parameters.rope_theta should be a number above 0, not 0",
        after(lambda w: w.config(rope_parameters={"rope_type": "default", "rope_theta": 0}), World.convert),
    ),
    case(
        "rotary embeddings scaled by a negative factor",
        "rope_parameters.factor should be a number above 0, not -2.0",
        after(
            lambda w: w.config(rope_parameters={"rope_type": "linear", "factor": -2.0, "rope_theta": 1e4}), World.run
        ),
    ),
    case(
        "unknown activation",
        "hidden_act 'silly' is unknown to transformers",
        after(lambda w: w.config(hidden_act="silly"), World.convert),
    ),
    case(
        "unknown rotary",
        "rope_type 'magic' is unknown to transformers; use one of default, linear,",
        after(lambda w: w.config(rope_parameters={"rope_type": "magic", "rope_theta": 1e4}), World.run),
    ),
    case(
        "null for a size",
        "Validation error for field 'max_position_embeddings': TypeError",
        after(lambda w: w.config(max_position_embeddings=None), World.run),
    ),
    case("remote code", "brings its own code", after(lambda w: w.config(model_type="x", auto_map={}), World.run)),
    case("no tokenizer", "has no tokenizer", after(remove("base/tokenizer.json"), World.run)),
    case("broken tokenizer", "tokenizer cannot be used", after(wrote("base/tokenizer.json", "{"), World.run)),
    case("no weights", "has no weights", after(remove("base/model.safetensors"), convert)),
    case(
        "pickle only",
        "pickles, which can run code",
        after(lambda w: (w.base / "model.safetensors").rename(w.base / "pytorch_model.bin"), convert),
    ),
    case("missing tensor", Q, after(edited(lambda t: t.pop(Q)), convert)),
    case("extra tensor", "extra.weight", after(edited(lambda t: t.update({"extra.weight": torch.ones(1)})), convert)),
    case("misshaped tensor", Q, after(edited(lambda t: t.update({Q: torch.ones(2, 2)})), convert)),
    case("NaN tensor", Q, after(edited(lambda t: t[Q].view(-1)[5:6].fill_(float("nan"))), convert)),
    case("integer tensor", Q, after(edited(lambda t: t.update({Q: t[Q].to(torch.int8)})), convert)),
    case(
        "truncated weights",
        "truncated",
        after(
            lambda w: (p := w.base / "model.safetensors").write_bytes(p.read_bytes()[:-100]),
            convert,
        ),
    ),
    case(
        "missing shard",
        "this shard is missing",
        after(
            lambda w: (w.base / "model.safetensors").unlink(),
            wrote("base/model.safetensors.index.json", json.dumps({"weight_map": {Q: "model-00001.safetensors"}})),
            convert,
        ),
    ),
    case("config contradicts shapes", "config.json", after(lambda w: w.config(intermediate_size=40), convert)),
    case(
        "linearized already",
        "linearized already",
        lambda w: ["convert", str(w.linearized()), str(w.out)],
    ),
]
DATA = [
    case(
        "missing data file", "data.text.path: text.jsonl: there is no such file", after(remove("text.jsonl"), World.run)
    ),
    case("empty data file", "text.jsonl: is empty", after(wrote("text.jsonl", "\n"), World.run)),
    case("bad row", "text.jsonl line 2: is not JSON", after(wrote("text.jsonl", '{"text": "a"}\n{\n'), World.run)),
    case("row without text", "line 1: has no field 'text'", after(wrote("text.jsonl", '{"txt": "a"}\n'), World.run)),
    case("row that is no object", "line 1: is a JSON int", after(wrote("text.jsonl", "3\n"), World.run)),
    case("unknown data format", "a data file ends in", lambda w: w.run("data.text.path=recipe.yaml")),
    case(
        "cut archive",
        "x.jsonl.xz: cannot be read",
        after(wrote("x.jsonl.xz", b"\xfd7zXZ\x00"), lambda w: w.run("data.text.path=x.jsonl.xz")),
    ),
    case(
        "prompt that fills a document",
        "takes 9 tokens of a document of 9",
        lambda w: w.run("data.own={source: teacher, tokens: 99, document_tokens: 9, prompt: [some text]}"),
    ),
    case(
        "too little text of the base held out",
        "data.text: 511 tokens are held out, but suite quick needs 512",
        lambda w: w.run("data.text={source: teacher, tokens: 4e3, held_out: 0.1}"),
    ),
    case("chat rows without chat", "line 1: has no field 'instruction'", lambda w: w.run("data.text.format=alpaca")),
]
RUNS = [
    case("OUT exists", "already exists", after(lambda w: w.out.mkdir(), World.run)),
    case("resume of nothing", "has no run to resume", World.resume),
    case("resume of something else", "has no run to resume", after(lambda w: w.out.mkdir(), World.resume)),
    case("changed recipe", "seed was 0, is 1", after(World.start, lambda w: w.resume("seed=1"))),
    case(
        "changed stage",
        "stages[0].tokens was 64, is 96",
        after(World.start, lambda w: w.resume("stages[0].tokens=96")),
    ),
    case(
        "changed base",
        "model.safetensors: has changed since the run began",
        after(World.start, edited(lambda t: t[Q].add_(1)), World.resume),
    ),
    case(
        "changed data",
        "text.jsonl: has changed since the run began",
        after(World.start, World.stopped_in_training, wrote("text.jsonl", '{"text": "a"}\n'), World.resume),
    ),
    case(
        "vanished base",
        "this input of the run is missing",
        after(World.start, remove("base/config.json"), World.resume),
    ),
    case("run under way", "another process is working on this run", after(World.start, World.lock, World.resume)),
    case(
        "run of an older version",
        "was started by an older version of liger-convert, which gave recipes and steps other names; finish it with",
        after(World.start, World.older, World.resume),
    ),
    case(
        "manifest of another version",
        "was not written by this version",
        after(World.start, wrote("out/manifest.json", '{"format": 99}'), World.resume),
    ),
    case("no held-out text for the suite", "eval.text: suite quick", lambda w: w.run("eval.text=null")),
    case("too little held-out text", "hold out more", lambda w: w.run("data.text.held_out=0.1")),
    case("rows of no task", "has no piqa.jsonl", lambda w: w.run(f"eval.data={w.base}", "eval.suite=paper")),
]
COMMANDS = [
    case("unknown command", "No such command 'rum'", lambda w: ["rum"]),
    case("unknown option", "No such option: --layer", lambda w: w.convert("--layer", "all")),
    case("missing argument", "Missing argument", lambda w: ["convert", str(w.base)]),
    case("convert over a folder", "already exists; name", after(lambda w: w.out.mkdir(), convert)),
    *(
        case(f"{command} into the model that it reads", "already exists and holds a model; name", words)
        for command, words in {
            "export": lambda w: ["export", str(w.linearized()), str(w.folder / "linearized")],
            "merge": lambda w: ["merge", str(w.linearized()), "trained", "--out", str(w.folder / "linearized")],
            "calibrate": lambda w: [*w.calibrate()[:2], str(w.folder / "linearized"), *w.calibrate(model=w.base)[3:]],
        }.items()
    ),
    case("convert to unknown mixer", "mixer 'glu' is unknown", lambda w: w.convert("--mixer", "glu")),
    case("convert with unknown option", "no such option", lambda w: w.convert("--set", "gat=none")),
    case(
        "convert with layers to be measured",
        "let `linearize select-layers RECIPE` choose them",
        lambda w: w.convert("--layers", "{softmax_auto: 1}"),
    ),
    case(
        "convert with windows to be measured",
        "--layers: long_windows measures layers on the text of a recipe",
        lambda w: w.convert("--layers", "{softmax: [0], long_windows: {layers: 1, window: 99}}"),
    ),
    case("selecting without a number", "--softmax-layers: is missing", lambda w: ["select-layers", *w.plan()[1:]]),
    case(
        "select-layers of too many",
        "3 is too many",
        lambda w: ["select-layers", *w.plan()[1:], "--softmax-layers", "3"],
    ),
    case(
        "selecting on too little text",
        "data.text: 11 training tokens are too few for the two spans of 128",
        after(
            wrote("short.jsonl", '{"text": "hello there"}\n'),
            lambda w: [
                "select-layers",
                *w.plan("data.text={source: file, path: short.jsonl}", "eval.text=null")[1:],
                "--softmax-layers=1",
            ],
        ),
    ),
    case(
        "select-layers of none", "--softmax-layers", lambda w: ["select-layers", *w.plan()[1:], "--softmax-layers", "0"]
    ),
    *(
        case(f"an empty name in {name}", f"error: {option}: the name of a file is empty; name a data file", words)
        for name, option, words in (
            ("eval", "--text", lambda w: ["eval", str(w.base), "--text", ""]),
            ("eval, as another text", "--other-text", lambda w: ["eval", str(w.base), "--other-text", ""]),
            ("calibrate", "--text", lambda w: w.calibrate("--text", "")),
        )
    ),
    case("calibrate into a folder", "out: already exists", after(lambda w: w.out.mkdir(), World.calibrate)),
    case("calibrate a base", "not a linearized model", lambda w: w.calibrate(model=w.base)),
    case("calibrate without a base", "Missing option '--base'", lambda w: ["calibrate", "a", "b", "--text", "pydoc"]),
    case(
        "calibrate mixers without a share",
        "nothing to calibrate",
        lambda w: w.calibrate(model=w.linearized("--mixer", "liger-paper")),
    ),
    case(
        "calibrate to a base of other sizes",
        "its num_hidden_layers is 2, but",
        lambda w: w.calibrate("--base", str(save_tiny_base("llama", w.folder / "other", num_hidden_layers=2))),
    ),
    case(
        "calibrate to another family",
        "its model_type is qwen3, but",
        lambda w: w.calibrate("--base", str(save_tiny_base("qwen3", w.folder / "other"))),
    ),
    case(
        "calibrate to itself",
        "its model_type is linearized_llama, but",
        lambda w: w.calibrate("--base", str(w.folder / "linearized")),
    ),
    case("calibrate to no base", "no such file or folder", lambda w: w.calibrate("--base", "/nowhere/at/all")),
    case("calibrate on no text", "no.txt: there is no such file", lambda w: w.calibrate("--text", "no.txt")),
    case(
        "calibrate on too little text",
        "--text text.jsonl: has 1350 tokens, but --tokens asks for 8192",
        lambda w: w.calibrate("--tokens", "8192"),
    ),
    case("calibrate on less than a row", "is less than one row of", lambda w: w.calibrate("--seq-len", "65")),
    case("calibrate on rows inside the window", "no document is longer", lambda w: w.calibrate("--seq-len", "12")),
    case(
        "calibrate on documents inside the window",
        "no document is longer than the window and its sinks (12 tokens)",
        after(wrote("short.jsonl", '{"text": "hello there"}\n' * 20), lambda w: w.calibrate("--text", "short.jsonl")),
    ),
    case("convert with a bad dtype", "export.dtype", lambda w: w.convert("--dtype", "int4")),
    case(
        "train without such a stage",
        "--stage",
        lambda w: ["train", *w.run()[1:], "--stage", "2", "--model", str(w.base)],
    ),
    case(
        "train a base",
        "not a linearized model",
        lambda w: ["train", *w.run()[1:], "--stage", "1", "--model", str(w.base)],
    ),
    case(
        "train a model without new parameters",
        "nothing in this model is of the group mixer",
        lambda w: ["train", *w.run()[1:], "--stage", "1", "--model", str(w.linearized("--mixer", "window"))],
    ),
    case("merge nothing", "base", lambda w: ["merge", str(w.linearized()), str(w.base), "--out", str(w.out)]),
    case("export a base", "is not a linearized model but a llama", lambda w: ["export", str(w.base), str(w.out)]),
    case("eval without the rows", "piqa.jsonl", lambda w: ["eval", str(w.base), "--data", str(w.folder)]),
    case("eval of nothing", "no such file or folder", lambda w: ["eval", "/nowhere/at/all"]),
    case("eval by unknown suite", "did you mean quick?", lambda w: ["eval", str(w.base), "--suite", "quik"]),
    case("diagnose a base", "not a linearized model", lambda w: ["diagnose", str(w.base)]),
    case("diagnose a folder around a model", "/base?)", lambda w: ["diagnose", str(w.folder)]),
    case(
        "diagnose without the rows", "piqa.jsonl", lambda w: ["diagnose", str(w.linearized()), "--data", str(w.folder)]
    ),
    case("compare one run", "1 is too few to compare", lambda w: ["compare", str(w.folder)]),
    case("compare a run without a report", "has no report.json", lambda w: ["compare", str(w.folder), str(w.base)]),
    case("compare nothing", "/nowhere/at/all: there is no such file", lambda w: ["compare", "/nowhere/at/all", "b"]),
    case(
        "compare what is no report",
        "report.json: name: this field is required and missing",
        after(wrote("report.json", "{}"), lambda w: ["compare", str(w.folder), str(w.folder)]),
    ),
    case("bench a shape that is nearly one", "did you mean llama-3-8b?", lambda w: ["bench", "llama-3-8"]),
    case("bench nothing", "/nowhere/at/all: there is no such file", lambda w: ["bench", "/nowhere/at/all"]),
    case("bench lengths that are none", "--lengths: '1k,2'", lambda w: ["bench", str(w.base), "--lengths", "1k,2"]),
    case("bench a length of nothing", "--lengths: '0'", lambda w: ["bench", str(w.base), "--lengths", "0"]),
    case("bench with an unknown mixer", "did you mean gla?", lambda w: ["bench", "smollm2-135m", "--mixer", "glaa"]),
    case("bench a model with a mixer", "applies only to shapes", lambda w: ["bench", str(w.base), "--mixer", "gla"]),
    case("bench beside nothing", "no such file", lambda w: ["bench", str(w.base), "--baseline", "/nowhere/at/all"]),
    case(
        "bench into a folder that exists",
        "already exists",
        lambda w: ["bench", str(w.base), "--out", str(w.folder / "base")],
    ),
    case("generate from an empty prompt", "the prompt is empty", lambda w: ["generate", str(w.base), "--prompt", " "]),
    case(
        "generate on a device that nothing was written for",
        "device: 'mps' is not supported; use auto, cpu, cuda or cuda:N",
        lambda w: ["generate", str(w.base), "--prompt", "hi", "--device", "mps"],
    ),
    case("generate from nothing", "/nowhere", lambda w: ["generate", "/nowhere/at/all", "--prompt", "hi"]),
]


@pytest.mark.parametrize(("words", "says", "code"), [*RECIPES, *BASES, *DATA, *RUNS, *COMMANDS])
def test_bad_input_ends_in_one_sentence_and_leaves_nothing(world, words, says, code, capsys):
    arguments = words(world)
    before = files(world.folder)
    capsys.readouterr()
    assert main.main(arguments) == code
    output = capsys.readouterr()
    complaints = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1, output.err
    assert output.err.rstrip().endswith(complaints[0])
    assert says in complaints[0]
    assert "Traceback" not in output.err + output.out
    assert files(world.folder) == before
