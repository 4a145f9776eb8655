"""What a server promises, whichever engine it has: test_contract.py, here and in tests/vllm, ask the same of both.

A test brings the weights it needs by pushing them (`version`), and leaves the server running and not paused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from grpo_async.inference.api import GenerateRequest
from grpo_async.records import TOP
from grpo_async.training.verify import score_sequences
from tests.servers.embedded_support import (
    Output,
    Served,
    assert_exact,
    by_version,
    load,
    make_request,
    over_kept_cache,
    teacher_forced,
)
from tests.support.adapter_push import adapted_policy, merged, push
from tests.support.dying_trainer import MOMENTS, killed_trainer
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import eventually
from tests.support.weight_push import WeightPusher, announcement, push_state_dict

NUM_SLOTS = 4
"""Requests that a server of these tests runs at once; more wait in its queue."""
MAX_MODEL_LEN = 1024
PROMPT = [5, 6, 7, 8, 9, 10]
LONG_PROMPT = [20 + position % 200 for position in range(300)]  # more than two cache blocks of vLLM's 128


@pytest.fixture(scope="module")
def model_a(tiny_model: Path) -> Any:
    """The model that servers load at start."""
    return load(tiny_model)


@pytest.fixture(scope="module")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same shape, other weights."""
    return load(build_tiny_model(tmp_path_factory.mktemp("model_b"), seed=1))


@pytest.fixture
def version(server: Served, model_a: Any) -> int:
    """Model A is served, under the version that is returned."""
    version = server.info().policy_version + 1
    push_state_dict(server.url, server.token, weights_of(model_a), version)
    return version


@pytest.fixture
def pusher(server: Served) -> Iterator[WeightPusher]:
    with WeightPusher(server.url, server.token, timeout_s=10.0) as pusher:
        pusher.connect()
        try:
            yield pusher
        finally:
            server.post("/resume")


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """As a trainer sends them: tied ones once."""
    return dict(model.named_parameters())


def scores_of(model: Any, tokens: Sequence[int]) -> list[float]:
    return teacher_forced(model, tokens[:1], tokens[1:]).tolist()


@dataclass
class Running:
    """A request in a separate thread; `began` is set with its first tokens."""

    request: GenerateRequest
    began: threading.Event = field(default_factory=threading.Event)
    done: Future[Output] = field(default_factory=Future)


def start(server: Served, token_ids: Sequence[int], max_tokens: int) -> Running:
    running = Running(make_request(token_ids, max_tokens=max_tokens, seed=len(token_ids), flush_interval_s=0.01))

    def follow() -> Output:
        output = Output()
        for chunk in server.stream(running.request):
            output.add(chunk, chunk.policy_version)
            running.began.set()
        return output

    running.done = server.pool.submit(follow)
    return running


def _exchange_weights(pusher: WeightPusher, model: Any, version: int) -> None:
    """The phases between /pause and /resume."""
    pusher.start(weights_of(model))
    pusher.update(weights_of(model))
    pusher.post("/finish_weight_update", {"weight_version": str(version)})


def serves(server: Served, model: Any, version: int) -> None:
    """With a prompt so long that stale prefix cache would show."""
    request = make_request(LONG_PROMPT, max_tokens=24)
    assert_exact(model, request, server.generate(request), version, server.tolerance)


class Contract:
    """Needs the fixture `server`: model A behind NUM_SLOTS slots and MAX_MODEL_LEN tokens."""

    # ---- requests ----

    def test_tokens_have_the_logprobs_of_the_distribution_they_were_sampled_from_and_are_counted(
        self, server: Served, model_a: Any, version: int
    ) -> None:
        before, began = server.info(), time.monotonic()
        requests = [
            make_request([*PROMPT, 30 + n], seed=n, max_tokens=20 + n, temperature=(1.0, 0.7, 0.0)[n % 3])
            for n in range(12)
        ]
        for request, output in zip(requests, server.pool.map(server.generate, requests), strict=True):
            assert (output.finish_reason, output.error) == ("length", None)
            assert len(output.token_ids) == request.max_tokens
            assert_exact(model_a, request, output, version, server.tolerance)  # greedy: of the unscaled distribution
            if request.temperature == 0.0:
                logits = model_a(torch.tensor([[*request.token_ids, *output.token_ids]])).logits[0]
                assert output.token_ids == logits[len(request.token_ids) - 1 : -1].argmax(-1).tolist()
        after, wall_s = server.info(), time.monotonic() - began
        assert after.generated_tokens - before.generated_tokens == sum(request.max_tokens for request in requests)
        assert 0.0 < after.busy_s - before.busy_s < wall_s
        assert server.info().busy_s == after.busy_s  # idle time does not count
        assert (after.active_requests, after.running_requests, after.waiting_requests) == (0, 0, 0)
        assert (after.kv_usage, after.max_running_requests) == (0.0, NUM_SLOTS)
        assert (after.max_model_len, after.num_workers) == (MAX_MODEL_LEN, 1)

    def test_the_likeliest_tokens_of_each_position_come_with_their_logprobs_to_those_that_ask_for_them(
        self, server: Served, model_a: Any, version: int
    ) -> None:
        """Beside requests that ask for none or for fewer."""
        asking = make_request(PROMPT, max_tokens=60, temperature=0.7, top_logprobs=6, flush_interval_s=0.01)
        requests = [asking, *(make_request([*PROMPT, n], seed=n, max_tokens=20, top_logprobs=n) for n in (0, 1))]
        for request, output in zip(requests, server.pool.map(server.generate, requests), strict=True):
            count = request.top_logprobs
            assert len(output.top) == (len(output.token_ids) if count else 0)
            tokens = [*request.token_ids, *output.token_ids]
            logits = model_a(torch.tensor([tokens])).logits[0, len(request.token_ids) - 1 : -1]
            wanted = (logits / request.temperature).log_softmax(-1)
            for row, logprobs in zip(output.top, wanted, strict=bool(count)):
                top = np.frombuffer(row, TOP)
                assert len({*top["id"]}) == count
                mine = torch.from_numpy(top["logprob"].copy())
                torch.testing.assert_close(mine, logprobs[top["id"].tolist()], rtol=0.0, atol=server.tolerance)
                likeliest = logprobs.topk(count).values
                torch.testing.assert_close(
                    mine.sort(descending=True).values, likeliest, rtol=0.0, atol=server.tolerance
                )
            assert_exact(model_a, request, output, version, server.tolerance)
        too_many = asking.model_dump() | {"top_logprobs": 129}
        assert server.post("/rollout/generate", too_many).status_code == 400

    def test_a_stop_string_ends_generation_after_the_token_that_completes_it(
        self, server: Served, version: int, tiny_model: Path
    ) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tiny_model)

        def generated(max_tokens: int, *stop: str) -> Output:
            return server.generate(make_request(PROMPT, max_tokens=max_tokens, temperature=0.0, stop=list(stop)))

        free = generated(24)
        texts = [tokenizer.decode(free.token_ids[:n], skip_special_tokens=True) for n in range(25)]
        # the text of tokens 9 to 11, or of what makes whole letters around them
        place = next(
            n for n in range(9, 22) if len(texts[n + 2]) - len(texts[n]) >= 2 and "\ufffd" not in texts[n + 2][-4:]
        )
        stop = texts[place + 2][-2:]
        num_kept = next(n for n in range(1, 25) if stop in texts[n])
        stopped = generated(24, "never", stop)
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stopped.token_ids == free.token_ids[:num_kept]
        assert stopped.logprobs == pytest.approx(free.logprobs[:num_kept], abs=1e-4)
        at_the_limit = generated(num_kept, stop)
        assert (at_the_limit.finish_reason, len(at_the_limit.token_ids)) == ("stop", num_kept)
        missed = generated(num_kept - 1, stop)
        assert (missed.finish_reason, missed.stop_reason) == ("length", None)

    @pytest.mark.parametrize(
        "settings",
        [
            {"top_p": 0.3, "temperature": 0.7},
            {"repetition_penalty": 0.6, "temperature": 0.0},
            {"temperature": 1.3, "top_k": 9, "top_p": 0.6, "min_p": 0.2, "repetition_penalty": 1.4},
        ],
    )
    def test_filters_and_a_penalty_leave_the_tokens_that_they_should(
        self, server: Served, model_a: Any, version: int, settings: dict[str, float]
    ) -> None:
        """And logprobs are those of what they leave; of the top_k likeliest, the others have none."""
        prompt, settings, num_top = [*PROMPT, 5, 6], {"temperature": 1.0, **settings}, int(settings.get("top_k", 0))
        output = server.generate(make_request(prompt, max_tokens=40, top_logprobs=num_top, **settings))
        tokens = [*prompt, *output.token_ids]
        logits = model_a(torch.tensor([tokens])).logits[0].float()
        places = range(len(prompt), len(tokens))
        for place, token, logprob in zip(places, output.token_ids, output.logprobs, strict=True):
            expected = reshaped(logits[place - 1], tokens[:place], **settings)  # type: ignore[arg-type]
            assert logprob == pytest.approx(expected[token].item(), abs=1e-4)
            assert settings["temperature"] != 0.0 or token == expected.argmax()
            if num_top:
                top = np.frombuffer(output.top[place - len(prompt)], TOP)
                kept = dict(top[np.isfinite(top["logprob"])].tolist())
                wanted = {each: expected[each].item() for each in expected.isfinite().nonzero()[:, 0].tolist()}
                assert kept == pytest.approx(wanted, abs=1e-4)

    def test_a_client_that_disconnects_frees_its_slot(self, server: Served) -> None:
        before = server.info().generated_tokens
        chunks = server.stream(make_request(PROMPT, max_tokens=1000, flush_interval_s=0.0))
        assert next(chunks).token_ids
        server.post("/pause")  # else it might be over before the connection is
        chunks.close()
        server.wait_until(lambda info: info.active_requests == 0)
        server.post("/resume")
        server.wait_until(lambda info: info.running_requests == info.waiting_requests == 0)
        assert server.info().kv_usage == 0.0
        assert server.info().generated_tokens - before < 1000, "the engine went on to the end"

    def test_a_score_is_that_of_the_served_weights_at_temperature_one_whatever_else_runs(
        self, server: Served, model_a: Any, version: int
    ) -> None:
        answers = server.ask(*(make_request([*PROMPT, n], seed=n, max_tokens=300) for n in range(NUM_SLOTS - 1)))
        for num_tokens in (2, 3, 129, 400, MAX_MODEL_LEN):
            tokens = [20 + position % 200 for position in range(num_tokens)]
            for _ in range(2):
                answer = server.score(tokens)
                assert answer.policy_version == version
                assert answer.logprobs == pytest.approx(scores_of(model_a, tokens), abs=server.tolerance)
        for number, running in enumerate(answers):
            request = make_request([*PROMPT, number])
            assert_exact(model_a, request, running.result(60.0), version, server.tolerance)

    # ---- pauses ----

    def test_a_pause_freezes_between_two_tokens_and_holds_what_arrives_until_the_resume(
        self, server: Served, model_a: Any, version: int
    ) -> None:
        """R6.3: a pause stops generation and dispatch; what arrives meanwhile waits."""
        running = start(server, PROMPT, 600)
        assert running.began.wait(30)
        assert server.post("/pause", mode="keep").status_code == 200
        assert server.is_paused()
        frozen = server.info()
        late = make_request([*PROMPT, 9], max_tokens=3)
        [held] = server.ask(late)
        still = server.info()
        assert (still.generated_tokens, still.busy_s) == (frozen.generated_tokens, frozen.busy_s)
        assert not running.done.done()
        for _ in range(2):  # always allowed
            assert server.post("/resume").status_code == 200
        assert_exact(model_a, running.request, running.done.result(60.0), version, server.tolerance)
        assert_exact(model_a, late, held.result(30.0), version, server.tolerance)

    def test_an_abort_ends_what_is_in_flight_with_what_it_has_and_a_client_goes_on_exactly(
        self, server: Served, model_a: Any, model_b: Any, version: int, pusher: WeightPusher
    ) -> None:
        running = [start(server, [*LONG_PROMPT, 30 + n], 600) for n in range(NUM_SLOTS)]
        assert all(each.began.wait(30) for each in running)
        queued = start(server, [*LONG_PROMPT, 90], 600)
        server.wait_until(lambda info: (info.running_requests, info.waiting_requests) == (NUM_SLOTS, 1))
        pusher.post("/pause", mode="abort", keep_cache="true")
        partial = [each.done.result(30) for each in (*running, queued)]
        again = []
        for each, part in zip((*running, queued), partial, strict=True):  # as the client does, at once
            again.append(start(server, [*each.request.token_ids, *part.token_ids], 600 - len(part.token_ids)))
        server.wait_until(lambda info: info.active_requests == len(again))
        pusher.post("/pause", mode="abort")  # a second time: what is held is not in flight
        _exchange_weights(pusher, model_b, version + 1)
        pusher.post("/resume")
        assert partial[-1].token_ids == []  # it had not begun
        for each, part, rest in zip((*running, queued), partial, again, strict=True):
            assert part.finish_reason == "abort"
            assert len(part.token_ids) < 600
            if part.token_ids:
                assert_exact(model_a, each.request, part, version, server.tolerance)
            assert_exact(model_b, rest.request, rest.done.result(60), version + 1, server.tolerance)

    @pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
    def test_requests_in_flight_go_on_with_the_new_weights_and_queued_ones_start_with_them(
        self, server: Served, model_a: Any, model_b: Any, version: int, pusher: WeightPusher, mode: str
    ) -> None:
        server.generate(make_request(LONG_PROMPT, max_tokens=1))  # its blocks are cached now, made by A
        # the last one ends first: the others still run when those that wait get its slot
        running = [start(server, [*PROMPT, 30 + n], 500 if n == NUM_SLOTS - 1 else 800) for n in range(NUM_SLOTS)]
        assert all(each.began.wait(30) for each in running)
        queued = start(server, LONG_PROMPT, 24)  # no slot is left, so it has no token when the weights change
        server.wait_until(lambda info: (info.running_requests, info.waiting_requests) == (NUM_SLOTS, 1))
        pusher.post("/pause", mode="keep", keep_cache="true" if mode == "keep_kv" else "false")
        assert not queued.began.is_set()
        # arrive during the pause; the second begins as those that run did, with other weights
        held, twin = start(server, LONG_PROMPT, 24), start(server, [*PROMPT, 30], 24)
        server.wait_until(lambda info: info.active_requests == NUM_SLOTS + 3)
        _exchange_weights(pusher, model_b, version + 1)
        assert not held.done.done()
        pusher.post("/resume")
        # with keep_kv vLLM starts the queued one, as it continues those that run, over the cache that there is
        for each in (queued, held, twin) if mode == "recompute" else (held, twin):
            assert_exact(model_b, each.request, each.done.result(60), version + 1, server.tolerance)
        serves(server, model_b, version + 1)
        scored = [*PROMPT, *LONG_PROMPT]
        assert server.score(scored).logprobs == pytest.approx(scores_of(model_b, scored), abs=server.tolerance)
        models = {version: model_a, version + 1: model_b}
        for each in running:
            output = each.done.result(60)
            assert (output.finish_reason, len(output.token_ids)) == ("length", each.request.max_tokens)
            assert output.versions == sorted(output.versions)
            assert set(output.versions) == set(models), "the push did not fall into this request"
            case = models, each.request.token_ids, output.token_ids, output.versions
            kept, recomputed = over_kept_cache(*case), by_version(*case)
            expected, other = (recomputed, kept) if mode == "recompute" else (kept, recomputed)
            assert torch.allclose(expected, torch.tensor(output.logprobs), rtol=0.0, atol=2 * server.tolerance)
            assert (expected - other).abs().max() > 0.01  # the check can fail

    # ---- weights ----

    def test_pushes_serve_the_new_model_under_versions_that_may_jump_and_come_again(
        self, server: Served, model_a: Any, model_b: Any, version: int, pusher: WeightPusher
    ) -> None:
        serves(server, model_a, version)
        pusher.push(weights_of(model_b), version + 40, bucket_bytes=100_000)
        serves(server, model_b, version + 40)
        assert server.info().policy_version == version + 40
        # a trainer that went back to a checkpoint counts its versions again; keep_cache leaves all old blocks where they are
        for model, again in ((model_a, version), (model_b, version + 40), (model_a, version + 40)):
            pusher.push(weights_of(model), again, keep_cache=True)
            serves(server, model, again)

    def test_an_update_that_does_not_fit_is_refused_with_names_before_anything_is_sent(
        self, server: Served, model_a: Any, model_b: Any, version: int, pusher: WeightPusher
    ) -> None:
        served, good = server.parameters(), weights_of(model_b)
        assert served.shapes == {name: list(tensor.shape) for name, tensor in good.items()}
        assert server.info().vocab_size == served.shapes["model.embed_tokens.weight"][0]
        norm = "model.norm.weight"
        for wrong, words in (
            ({**good, "model.tail.weight": good[norm]}, "model.tail.weight is not a parameter"),
            ({name: tensor for name, tensor in good.items() if name != norm}, f"{norm} is missing"),
            ({**good, norm: good[norm][:-1]}, f"{norm} has the shape [63], the server's [64]"),
        ):
            pusher.post("/pause")
            response = server.post("/start_weight_update", announcement(wrong).model_dump())
            assert (response.status_code, words in response.json()["error"]) == (400, True)
            assert server.post("/update_weights").status_code == 409
            # nothing to finish: the new version must not name the old weights
            assert server.post("/finish_weight_update", {"weight_version": str(version + 1)}).status_code == 409
            pusher.post("/resume")
            serves(server, model_a, version)
        pusher.push(good, version + 1)  # the group is as good as before
        serves(server, model_b, version + 1)

    def test_an_update_needs_a_pause_and_serves_only_once_it_is_finished(
        self, server: Served, model_a: Any, model_b: Any, version: int, pusher: WeightPusher
    ) -> None:
        pusher.start(weights_of(model_b))
        refused = server.post("/update_weights")
        assert (refused.status_code, "POST /pause first" in refused.json()["error"]) == (409, True)
        serves(server, model_a, version)
        pusher.post("/pause")
        pusher.start(weights_of(model_b))
        pusher.update(weights_of(model_b))
        assert server.post("/resume").status_code == 409  # no token of new weights under the old version
        for _ in range(2):  # a retry after a lost answer
            pusher.post("/finish_weight_update", {"weight_version": str(version + 4)})
        pusher.post("/resume")
        serves(server, model_b, version + 4)

    @pytest.mark.parametrize("spoiled", ["zeros", "turned around"])
    def test_a_tensor_that_arrives_as_something_else_is_named_and_the_server_waits_for_another_push(
        self, server: Served, model_a: Any, model_b: Any, version: int, pusher: WeightPusher, spoiled: str
    ) -> None:
        name, weights = "model.layers.1.mlp.down_proj.weight", weights_of(model_b)
        group: Any = pusher.group
        send = group.send

        def send_wrongly(bucket: torch.Tensor, **limits: Any) -> Any:
            if bucket.numel() == weights[name].nbytes and torch.equal(
                bucket.view(torch.float32), weights[name].detach().reshape(-1)
            ):
                bucket.copy_(torch.zeros_like(bucket) if spoiled == "zeros" else bucket.flip(0))
            return send(bucket, **limits)

        group.send = send_wrongly
        pusher.post("/pause")
        pusher.start(weights, bucket_bytes=20_000)
        with pytest.raises(httpx.HTTPStatusError, match=f"500: .*other values of {name}"):
            pusher.update(weights, bucket_bytes=20_000)
        assert server.post("/finish_weight_update", {"weight_version": str(version + 1)}).status_code == 409
        assert server.post("/resume").status_code == 409
        assert server.info().policy_version == version
        pusher.connect()
        pusher.push(weights, version + 1)
        serves(server, model_b, version + 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_trainer_that_is_killed_leaves_the_old_weights_exactly_or_none_and_the_next_one_goes_on(
        self, server: Served, tiny_model: Path, model_a: Any, model_b: Any, version: int, moment: str
    ) -> None:
        """None: a server with a part of the new ones waits for the next trainer's."""
        before = server.score(LONG_PROMPT)
        killed_trainer(server.url, server.token, tiny_model, moment)
        assert eventually(server.is_paused)  # once the engine has seen the connection break
        request = make_request(LONG_PROMPT, max_tokens=24)
        [held] = server.ask(request)
        with WeightPusher(server.url, server.token, timeout_s=10.0) as restarted:
            resumed = server.post("/resume")
            if moment in ("pause", "start"):
                assert resumed.status_code == 200
                assert_exact(model_a, request, held.result(60), version, server.tolerance)
                after = server.score(LONG_PROMPT)
                assert (after.policy_version, after.logprobs) == (version, before.logprobs)  # to the last bit
            else:
                assert (resumed.status_code, "part of a weight update" in resumed.json()["error"]) == (409, True)
            if moment == "broadcast":
                refused = server.post("/finish_weight_update", {"weight_version": str(version)})
                assert refused.status_code == 409
            restarted.connect()
            restarted.push(weights_of(model_b), version + 1)
        assert set(held.result(60).versions) <= {version, version + 1}
        serves(server, model_b, version + 1)

    def test_an_adapter_push_serves_what_the_trainer_computes_and_what_a_merged_push_serves(
        self, server: Served, tiny_model: Path, version: int
    ) -> None:
        policy, section = adapted_policy(tiny_model)
        sequences = [[5, 9, 200, 31, 7, 7, 8, 100, 3], list(range(40, 80))]
        expected = score_sequences(policy, sequences, device=torch.device("cpu"))
        found = []
        # the last one starts from the base again, not from what is served
        for number, kind in enumerate((section, merged(section), section), start=1):
            report = push(server.url, server.token, policy, kind, version + number)
            answers = [server.score(sequence) for sequence in sequences]
            assert {answer.policy_version for answer in answers} == {version + number}
            found.append([answer.logprobs for answer in answers])
            # rank 4, float32; a layer: q 64+64, k and v 64+32 each, o 64+64, gate, up and down 64+128 each = 1024 rows and columns
            few = 2 * 4 * 4 * 1024
            assert report["sync/bytes"] == few if kind is section else report["sync/bytes"] > 5 * few
        for other in (expected, *found[1:]):
            for ours, theirs in zip(other, found[0], strict=True):
                assert theirs == pytest.approx(ours, abs=1e-4)


def reshaped(
    logits: torch.Tensor,
    seen: Sequence[int],
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities of one token, as vLLM's documentation describes the settings; in plain steps. [vocab] -> [vocab]"""
    logits = logits.clone()
    for token in set(seen):
        logits[token] *= 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
    probabilities = (logits / (temperature or 1.0)).softmax(-1)
    kept = probabilities >= min_p * probabilities.max()
    order = probabilities.argsort(descending=True)
    kept[order[top_k or len(order) :]] = False
    total, mass = (probabilities * kept).sum().item(), 0.0
    for token in order.tolist():
        if kept[token] and mass >= top_p * total:
            kept[token] = False
        elif kept[token]:
            mass += probabilities[token].item()
    return (probabilities * kept / (probabilities * kept).sum()).log()
