"""vLLM answers as `generate` does, whatever else is in a batch. A fault in a request's state changes the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reminding import LAYERS, make_prompts, random_rows, reminders_due, trained_export
from served import LENGTHS, NEW, Reference, answers, assert_same, broken, engine, lose, prompt_logprobs, run, sampling
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from liger_convert.serving import batch
from liger_convert.serving.attention import ServedAttention
from liger_convert.serving.rows import Rows, make_rows

TEXTS = make_prompts(LENGTHS)


class Case:
    """A trained export, and the answers and tolerances of the project's own code for TEXTS."""

    def __init__(self, layers: str, mixer: str):
        self.export, self.grows = trained_export(layers, mixer), layers == "hybrid"
        self.reference = Reference(self.export)
        self.wanted = [self.reference.generate(text) for text in TEXTS]
        self.tolerance = [self.reference.tolerance(text) for text in TEXTS]

    def check(self, outputs: list[Any]) -> None:
        assert len(outputs) == len(TEXTS)
        for output, wanted, tolerance in zip(outputs, self.wanted, self.tolerance):
            for answer in answers(output):
                assert_same(answer, wanted, tolerance)

    def check_texts(self, texts: list[list[int]], outputs: list[Any], new: int = NEW) -> None:
        """The same for other prompts."""
        for text, output in zip(texts, outputs):
            assert_same(answers(output)[0], self.reference.generate(text, new), self.reference.tolerance(text))


@pytest.fixture(scope="module", params=["linear-gla", "hybrid-gla", "hybrid-liger-paper"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param.split("-", 1))


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[Any]:
    with engine(case.export) as llm:
        yield llm


def test_many_requests_at_once_are_answered_as_by_generate(case: Case, llm: Any) -> None:
    case.check(run(llm, TEXTS))


def test_requests_that_arrive_late_are_answered_as_by_generate(case: Case, llm: Any) -> None:
    case.check(run(llm, TEXTS, every=3, name="late"))
    case.check(run(llm, TEXTS[::-1], every=2, name="reverse")[::-1])


def test_parallel_answers_of_one_prompt(case: Case, llm: Any) -> None:
    def sampled(name: str) -> list[Any]:
        return run(llm, TEXTS[:6], sampling(n=3, temperature=2.0), name=name)

    def check(outputs: list[Any]) -> None:
        for output in outputs:
            for answer in answers(output):
                scores = case.reference.score(output.prompt_token_ids, answer.tokens)
                at_tokens = scores.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
                tolerance = case.reference.tolerance(output.prompt_token_ids + answer.tokens)
                assert (at_tokens - torch.tensor(answer.logprobs)).abs().max() <= tolerance

    outputs = sampled("sampled")
    check(outputs)
    assert all(len(output.outputs) == 3 for output in outputs)
    assert any(len({tuple(answer.tokens) for answer in answers(output)}) > 1 for output in outputs)
    with broken(lose("states")), pytest.raises(AssertionError):
        check(sampled("sampled-lost"))


def test_aborted_requests_leave_no_trace(case: Case, llm: Any) -> None:
    def abort(step: int, core: Any) -> None:
        if step in (2, 5):
            core.abort_request([f"abort{step}"])

    outputs = run(llm, TEXTS, between=abort, name="abort")
    assert outputs.count(None) > 0
    for output, wanted, tolerance in zip(outputs, case.wanted, case.tolerance):
        if output is not None:
            assert_same(answers(output)[0], wanted, tolerance)
    case.check(run(llm, TEXTS, name="after"))


def test_prompt_logprobs(case: Case, llm: Any) -> None:
    """The log-probabilities of a prompt's own tokens, which are read in pieces."""
    text = TEXTS[8]

    def farthest(name: str) -> float:
        (output,) = run(llm, [text], sampling(prompt_logprobs=0), name=name)
        return float((prompt_logprobs(output) - case.reference.score_prompt(text)).abs().max())

    assert farthest("prompt") <= case.tolerance[8]
    with broken(lose("states")):
        assert farthest("prompt-lost") > case.tolerance[8]


def test_the_best_tokens_and_their_logprobs(case: Case, llm: Any) -> None:
    """Tokens within the tolerance of the fifth best may take its place, so the log-probabilities are compared."""

    def check(name: str) -> None:
        for output, tolerance in zip(run(llm, TEXTS, sampling(logprobs=5), name=name), case.tolerance):
            (answer,) = answers(output)
            scores = case.reference.score(output.prompt_token_ids, answer.tokens)
            for found, wanted in zip(output.outputs[0].logprobs, scores, strict=True):
                best = sorted((item.logprob for item in found.values()), reverse=True)[:5]
                assert (torch.tensor(best) - wanted.topk(5).values).abs().max() <= tolerance
                assert all(abs(item.logprob - float(wanted[token])) <= tolerance for token, item in found.items())

    check("best")
    with broken(lose("states")), pytest.raises(AssertionError):
        check("best-lost")


def _swap(past: Any) -> bool:
    for group in (past.states, past.ring, past.sinks):
        for key in group:
            group[key] = group[key].roll(1, 0)
    return True


FAULTS: dict[str, Callable[[Any], bool]] = {
    "state lost": lose("states"),
    "deferred tokens lost": lose("ring", "deferred0"),
    "keys of the ring lost": lose("ring", "k"),
    "values of the ring lost": lose("ring", "v"),
    "sinks lost": lose("sinks"),
    "requests swapped": _swap,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_state_changes_the_answers(fault: str, case: Case, llm: Any) -> None:
    with broken(FAULTS[fault]) as broke:
        outputs = run(llm, TEXTS, name=fault.replace(" ", "-"))
    if not any(broke):
        pytest.skip("a layer of this mixer keeps no such tensors")
    with pytest.raises(AssertionError):
        case.check(outputs)


def test_a_new_request_reads_nothing_of_what_others_left(case: Case, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page holds numbers when the requests come. As a control, new requests are taken for running ones."""
    load, layers = Rows.load, llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()

    def leave_numbers() -> None:
        with torch.inference_mode():
            for layer in layers:
                if isinstance(layer, ServedAttention):
                    layer.pages.pages.fill_(1)

    def trusting(self: Rows, *args: Any) -> Any:
        kept, self.is_new = self.is_new, False
        past = load(self, *args)
        self.is_new = kept
        return past

    leave_numbers()
    case.check(run(llm, TEXTS, name="careful"))
    leave_numbers()
    monkeypatch.setattr(Rows, "load", trusting)
    outputs = run(llm, TEXTS, name="trusting")
    with pytest.raises(AssertionError):
        case.check(outputs)


def test_repeated_tokens_are_predicted_better_with_the_state(case: Case, llm: Any) -> None:
    """Compares the log-probability of repeated tokens in unseen rows, which are read in chunks. With the state, the
    right one must be at least twice as likely."""
    rows = random_rows(8, 120, seed=-1)

    def at_reminders(name: str) -> float:
        outputs = run(llm, rows, sampling(1, prompt_logprobs=0), name=name)
        found = [prompt_logprobs(output)[i - 1] for row, output in zip(rows, outputs) for i in reminders_due(row)]
        return float(sum(found) / len(found))

    kept = at_reminders("kept")
    with broken(lose("states")):
        lost = at_reminders("lost")
    print(f"log-probability of a reminder: {kept:.2f} with the state, {lost:.2f} without")
    assert kept - lost > math.log(2)


# An engine that ends takes what others in its process share with it: these come after all tests of `llm`.


def test_prompts_of_unequal_length_in_a_step_with_requests_that_decode(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[Rows]] = []

    def watched(*args: Any) -> list[Rows]:
        steps.append(make_rows(*args))
        return steps[-1]

    monkeypatch.setattr(batch, "make_rows", watched)
    with engine(case.export, max_num_seqs=10, max_num_batched_tokens=512) as llm:
        case.check(run(llm, TEXTS, every=4, together=5))
    lengths = [[sorted(rows.length_R.tolist()) for rows in step] for step in steps]
    assert [[1, 1, 1, 1, 1], [19, 33], [64], [97], [150]] in map(sorted, lengths), lengths


def test_prefix_hits(case: Case) -> None:
    """Prompts share a prefix. The second round uses the state of the first one, and a third round does not have it."""
    with engine(case.export, enable_prefix_caching=True, max_model_len=512, max_num_batched_tokens=512) as llm:
        block = llm.llm_engine.vllm_config.cache_config.block_size
        (whole,) = make_prompts([block + 40], seed=3)
        texts = [whole[: block + 5], whole[: block + 33], [*whole[:block], whole[0]]]
        for round_ in range(2):
            outputs = run(llm, texts, name=f"round{round_}-")
            case.check_texts(texts, outputs)
        cached = [output.num_cached_tokens for output in outputs]
        assert all(block <= n < len(text) for n, text in zip(cached, texts)), cached
        with broken(lose("states")):
            outputs = run(llm, texts, name="lost")
        with pytest.raises(AssertionError):
            case.check_texts(texts, outputs)


def test_preempted_requests_start_again(case: Case) -> None:
    """There are fewer blocks than the requests come to need, so some requests are preempted and read again. As a
    control, the states are lost from the first pre-emption on."""
    options = {"max_num_batched_tokens": 512, "max_model_len": 384, "num_gpu_blocks_override": 8}
    with engine(case.export, **options) as llm:
        block = llm.llm_engine.vllm_config.cache_config.block_size if case.grows else 100
        texts = make_prompts([block - 8, block - 20, block - 3, block - 9], seed=5)

        def preempted() -> float:
            return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")

        case.check_texts(texts, run(llm, texts, sampling(40), name="scarce"), 40)
        before = preempted()
        assert (before > 0) == case.grows  # a request of linear layers alone never needs more
        if case.grows:
            with broken(lambda past: preempted() > before and lose("states")(past)) as broke:
                outputs = run(llm, texts, sampling(40), name="lost")
            assert not all(broke)
            with pytest.raises(AssertionError):
                case.check_texts(texts, outputs, 40)


def test_a_seed_gives_the_same_answer_however_a_prompt_is_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in parts, or whole. Without our part in it, vLLM's engine fails on a CPU for those in parts."""
    found: list[list[list[int]]] = []
    for tokens in (48, 512):
        with engine(case.export, max_num_batched_tokens=tokens) as llm:
            for seed in (1, 2):
                outputs = run(llm, TEXTS, sampling(temperature=2.0, seed=seed), every=2 * seed, name=f"seed{seed}-")
                found.append([answers(output)[0].tokens for output in outputs])
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    with engine(case.export) as llm:
        monkeypatch.setattr(CPUModelRunner, "sample_tokens", CPUModelRunner.sample_tokens.__wrapped__)
        with pytest.raises(RuntimeError, match="offset"):
            run(llm, TEXTS, sampling(temperature=2.0, seed=1))


@pytest.mark.parametrize("layers", LAYERS)
def test_vllm_in_bfloat16_is_as_close_as_rounding_allows(layers: str) -> None:
    """The project's own bfloat16 result differs from float32 by the error of that format. vLLM may differ from the
    project's result by at most twice as much. Without its state, it differs by more.

    This holds for the mean and the 95th percentile of the log-probabilities. The largest difference occurs at a token
    with a low probability. Its logits are rounded to steps of 1/32 or 1/16, up or down by chance, and these errors do
    not cancel in a log-probability. So the largest difference has a bound of its own, computed from E, the largest
    error of a logit. If the logits of vLLM and of the project are each within E of float32, they are within 2 E of each
    other. A probability p then changes most if its own logit moves by 2 E and all others by 2 E the other way. That
    multiplies its odds by e^(4 E) and changes log p by log(1 + (1 - p) (e^(4 E) - 1)).
    """
    export = trained_export(layers, "gla")
    exact, rounded = Reference(export), Reference(export, torch.bfloat16)

    def distances(outputs: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the log-probability of every token: how far the project's bfloat16 is from float32, how far vLLM is from
        the project's, and the upper bound of the latter."""
        errors, faults, doubts, of_logits = [], [], [], 0.0
        for text, output in zip(TEXTS, outputs):
            (answer,) = answers(output)
            at = torch.tensor(answer.tokens)[:, None]
            logits = [model.logits(text, answer.tokens) for model in (rounded, exact)]
            of_bf16, of_fp32 = (x.log_softmax(-1).gather(1, at)[:, 0] for x in logits)
            errors.append((of_bf16 - of_fp32).abs())
            faults.append((torch.tensor(answer.logprobs) - of_bf16).abs())
            doubts.append(-of_bf16.expm1())
            of_logits = max(of_logits, float((logits[0] - logits[1]).abs().max()))
        bounds = (torch.cat(doubts) * math.expm1(4 * of_logits)).log1p()
        return torch.cat(errors), torch.cat(faults), bounds

    with engine(export, dtype="bfloat16") as llm:
        errors, faults, bounds = distances(run(llm, TEXTS))
        with broken(lose("states")):
            _, lost, bounds_lost = distances(run(llm, TEXTS, name="lost"))
    assert NEW * len(TEXTS) == len(faults)
    print(f"largest {faults.max():.4f}, nearest to its bound {(faults / bounds).max():.2f}, lost {lost.max():.2f}")
    for middle in (torch.mean, lambda x: x.quantile(0.95)):
        assert middle(faults) <= 2 * middle(errors) < middle(lost)
    assert (faults <= bounds).all()
    assert not (lost <= bounds_lost).all()
