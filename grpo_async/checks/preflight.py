"""The preflight: after the first push and before the first rollout, do trainer and servers fit together?

    context -> scores of the trainer (a collective, on the calling thread) -> each check of each server
            -> preflight.json, list of checks

Reads only: nothing of the run is changed, no rollout is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks.memory import ModelSize, disk_room
from grpo_async.checks.model_files import text_config
from grpo_async.checks.report import Check, Found, run_check, to_json
from grpo_async.config import ExperimentConfig
from grpo_async.errors import BadResponseError, GrpoAsyncError, InferenceError, RequestRejectedError
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.control import ServerControl
from grpo_async.inference.fleet import Server
from grpo_async.inference.token import TOKEN_VARIABLE, token_from_environment
from grpo_async.records import Prompt
from grpo_async.run_directory import RunDir
from grpo_async.training.verify import MAX_RATIO, MAX_ROUNDING, Score, TrainerScores, coarsest_dtype, compare_server
from grpo_async.utils.files import write_atomically
from grpo_async.utils.network import is_loopback
from grpo_async.utils.text import clipped

SAMPLES = (
    "What is 12 + 30? Think first.",
    "Ünïcode: 你好, мир 🙂\n\n\ttabs  and   blanks",
    "def f(x):\n    return x**2  # code",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightContext:
    config: ExperimentConfig
    run_dir: RunDir
    renderer: ChatRenderer
    servers: Sequence[Server]
    prompts: Sequence[Prompt]
    """A few of data.train."""
    probes: Sequence[Sequence[int]]
    """See training.verify.probe_sequences."""
    score_on_trainer: Score
    """Log-probabilities of whole sequences under the trainer's weights, at the rounding of a dtype; a collective, called once, on
    the calling thread."""
    num_parameters: int
    """Parameters of the policy, with adapters merged."""
    num_embeddings: int
    """Rows of the trainer's embedding."""
    policy_version: int
    """Version of the weights that the servers serve."""
    trainer_scores: TrainerScores | None = None
    """Scores of the probes; None: the trainer could not score them."""


def run_preflight(context: PreflightContext) -> list[Check]:
    """Run every check, write them to the run directory, and return them in the order of the table.

    A check that breaks is a failed check; the others go on.
    """
    config = context.config
    checks: list[Check] = []
    try:
        rounding = coarsest_dtype(config, [_info(server).dtype for server in context.servers])
        context = replace(context, trainer_scores=context.score_on_trainer(context.probes, rounding))
    except GrpoAsyncError as error:
        checks.append(Check("logprobs", "fail", f"the trainer could not score the probes: {error}"))
    for name, ask in _SERVER_CHECKS.items():
        if name == "logprobs" and context.trainer_scores is None:
            continue  # said already
        for server in context.servers:
            checks.append(run_check(name, partial(ask, context, server), prefix=f"{server.name}: "))
    checks.append(run_check("disk", partial(check_disk, context)))
    write_atomically(context.run_dir.preflight, to_json(checks))
    return checks


def check_disk(context: PreflightContext) -> Found:
    size = ModelSize.of(text_config(Path(context.config.model.path)), context.num_parameters)
    return disk_room(context.config, context.run_dir, size)


def _info(server: Server) -> ServerInfo:
    assert server.info is not None  # what serves has said what it is
    return server.info


# ---- each server against the trainer ----


def check_logprobs(context: PreflightContext, server: Server) -> Found:
    """Both give the same log-probabilities to the probes, token by token."""
    trainer = context.trainer_scores
    assert trainer is not None
    found = compare_server(
        server.control, context.probes, trainer, config=context.config, version=context.policy_version
    )
    if found.is_same:
        return "pass", found.text
    if found.versions != [context.policy_version]:
        message = f"it serves version {found.versions} and not {context.policy_version}, which was pushed"
        return "fail", f"{message}; does another trainer use this server?"
    if found.difference.mean <= max(MAX_ROUNDING, MAX_RATIO * trainer.rounding.mean):
        cause = (
            f"It may be rounding ({_dtypes(context)}), and is too coarse to train with: set model.head_dtype: float32, or compute "
            "and serve in float32 (model.compute_dtype, inference.dtype); where the difference is known and accepted, raise "
            "weights.verify_tolerance"
        )
    else:
        cause = (
            "So large a difference means other weights or another model function, not rounding: compare the server's model "
            f"({_info(server).model}) with model.path, and look for quantization or overrides in inference.vllm.extra_args"
        )
    return "fail", f"{found.text}. {cause}"


def check_tokenizer(context: PreflightContext, server: Server) -> Found:
    """The trainer's tokenizer, which fits its model (families.check_tokenizer_size), fits the server's, too."""
    tokenizer, info = context.renderer.tokenizer, _info(server)
    sizes = f"{len(tokenizer)} ids, {context.num_embeddings} rows in the trainer's embedding, {info.vocab_size} in the server's"
    if info.vocab_size == 0:
        return "warn", f"it does not say how many ids it knows ({len(tokenizer)} here)"
    if info.vocab_size < len(tokenizer) or info.vocab_size != context.num_embeddings:
        return "fail", f"it serves a model of another vocabulary: {sizes}; start it with this config"
    if info.engine != "vllm":
        return "pass", f"{sizes}; it takes and gives ids only"
    texts = [*SAMPLES, *(message.content for prompt in context.prompts for message in prompt.messages)]
    try:
        problem = next(filter(None, (_differing_ids(tokenizer, server, text) for text in texts)), None)
    except InferenceError as error:
        return "warn", f"{sizes}; its own tokenizer could not be asked ({error})"
    if problem:
        return "fail", f"it has another tokenizer than model.path: {problem}; start it with this config"
    return "pass", f"{sizes}; {len(texts)} texts have the same ids on both sides"


def _differing_ids(tokenizer: Any, server: Server, text: str) -> str:
    ours = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    theirs = server.control.tokenize(text)
    return "" if ours == theirs else f"{clipped(text)!r} is {ours[:12]} here and {theirs[:12]} there"


def check_token(context: PreflightContext, server: Server) -> Found:
    """No server can be used without the run's token."""
    url = urlsplit(server.url)
    local = is_loopback(url.hostname or "")
    if token_from_environment() is None:
        where = "everyone on this machine" if local else "everyone on its network"
        message = f"it asks for no token: {where} can use it; start it with ${TOKEN_VARIABLE} set"
        return ("warn" if local else "fail"), message
    if not _wants_token(context, server):
        message = f"it answers without a token although this run has one (${TOKEN_VARIABLE})"
        return ("warn" if local else "fail"), f"{message}; start it with the same token in its environment"
    if not local and url.scheme != "https":
        message = "it is reached over a network without TLS, the token in clear"
        return "warn", f"{message}; use a tunnel, or a reverse proxy with TLS"
    return "pass", f"it {'is on loopback' if local else 'is encrypted'} and wants the token"


def _wants_token(context: PreflightContext, server: Server) -> bool:
    with ServerControl(server.url, token=None, timeout_s=context.config.weights.timeout_s) as control:
        try:
            control.info()
        except RequestRejectedError as error:
            return error.status == 401
        except BadResponseError:
            return False
    return False


def _dtypes(context: PreflightContext) -> str:
    model, served = context.config.model, sorted({_info(server).dtype for server in context.servers})
    return (
        f"master weights {model.dtype}, trainer computes in {model.resolved_compute_dtype}, sent as "
        f"{context.config.inference.resolved_dtype}, served as {', '.join(served)}"
    )


_SERVER_CHECKS: dict[str, Callable[[PreflightContext, Server], Found]] = {
    "logprobs": check_logprobs,
    "tokenizer": check_tokenizer,
    "token": check_token,
}
