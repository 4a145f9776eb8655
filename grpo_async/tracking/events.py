"""What every event of events.jsonl is: docs/reference/events.md is made from it, and a test holds it to the names in the code."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_async.tracking.timeline_file import ATTEMPT, DROPPED, LOST


@dataclass(frozen=True, slots=True)
class EventInfo:
    """One kind of event. `track` is without the number of a slot: "rollout" for rollout/3."""

    name: str
    track: str
    help: str


EVENTS = (
    EventInfo(ATTEMPT, "run", "an attempt of the run: an instant when it begins, and a span when it ends by itself"),
    EventInfo("importing", "run", "rank 0 imports its libraries"),
    EventInfo(
        "checking the checkpoint",
        "run",
        "checksums of the checkpoint to resume from; `resume_step` is one that is whole",
    ),
    EventInfo("loading the tokenizer", "run", "the tokenizer and the chat template"),
    EventInfo("loading the model", "run", "all of it: imports, tokenizer, and the weights or a checkpoint"),
    EventInfo("waiting for the server", "run", "until the first server answers"),
    EventInfo("pushing the first weights", "run", "the servers get the trainer's weights"),
    EventInfo("checking trainer and servers against each other", "run", "the comparison before the first step"),
    EventInfo("training", "run", "from the first step to the last"),
    EventInfo("saving", "run", "the last checkpoint, the last evaluation and the model"),
    EventInfo("step", "trainer", "a whole step"),
    EventInfo("wait for samples", "trainer", "the trainer has nothing to train on"),
    EventInfo(
        "plan and pack", "trainer", "samples become rows and micro-batches; while a step trains, those of the next one"
    ),
    EventInfo("train", "trainer", "all optimizer updates of a step"),
    EventInfo("old log-probabilities", "trainer", "the proximal policy's, before the first update"),
    EventInfo("reference", "trainer", "log-probabilities of the reference model"),
    EventInfo("forward", "trainer", "of a micro-batch"),
    EventInfo("backward", "trainer", "of a micro-batch"),
    EventInfo("clip gradients", "trainer", "norm and clip; on a GPU the host waits here for forward and backward"),
    EventInfo("optimizer", "trainer", "one update"),
    EventInfo("close groups", "trainer", "trained groups go to the ledger and to the store"),
    EventInfo("log", "trainer", "metrics of the step"),
    EventInfo("verify weights", "trainer", "servers score sequences that the trainer scores too"),
    EventInfo("copy checkpoint", "trainer", "tensors are copied to the CPU"),
    EventInfo("wait for the checkpoint", "trainer", "until a checkpoint is on the disk"),
    EventInfo("wait for the last checkpoint", "trainer", "until the one before is on the disk"),
    EventInfo("export the model", "trainer", "model/ and adapter/ are written"),
    EventInfo("wait for the push", "trainer", "the training thread pushes weights, and trains nothing meanwhile"),
    EventInfo("push", "weights", "one push of a version to the servers"),
    EventInfo("pause", "weights", "servers stop generating, as `weights.mode` says"),
    EventInfo("connect", "weights", "trainer and servers form the weight group"),
    EventInfo("start", "weights", "servers say whether the update fits"),
    EventInfo("transfer", "weights", "all buckets are sent and loaded"),
    EventInfo("gather", "weights", "the ranks gather a bucket"),
    EventInfo("send", "weights", "a bucket is sent"),
    EventInfo("finish", "weights", "the new version takes effect"),
    EventInfo("resume", "weights", "servers generate again"),
    EventInfo("rollout", "rollout", "one rollout, from its first request to its end"),
    EventInfo("rollout function", "rollout", "one call of your function, for several groups"),
    EventInfo("generate", "rollout", "one turn of a rollout, or one call of an agent"),
    EventInfo("wait for a server", "rollout", "a request waits until a server takes requests"),
    EventInfo("tools", "rollout", "the tool calls of one turn"),
    EventInfo("environment", "rollout", "reset, is_done or get_reward of an environment"),
    EventInfo("wait for the trainer", "rollout", "nothing new is started: it would become stale"),
    EventInfo("score", "scoring", "the rewards of one group; details have the seconds of each"),
    EventInfo("queued", "queue", "a scored group waits until a step takes it"),
    EventInfo("write checkpoint", "checkpoint", "writing, in parallel with training"),
    EventInfo("remove old checkpoints", "checkpoint", "as `checkpoint.keep_last` and its neighbors say"),
    EventInfo("evaluation", "evaluation", "one evaluation, in parallel with training"),
    EventInfo("starting", "server", "a server loads its model; one track for each server"),
    EventInfo("ready", "server", "it answers, and waits for weights"),
    EventInfo("serving", "server", "it has the current weights and gets requests"),
    EventInfo("down", "server", "it failed, and gets no requests; the detail `reason` says why"),
    EventInfo("gone", "server", "it does not come back; the detail `reason` says why"),
    EventInfo(DROPPED, "run", "first line of a file whose older half was dropped to limit its size"),
    EventInfo(LOST, "run", "events that could not be written, or came faster than they are written; detail: `events`"),
)
"""In the order of a step."""
