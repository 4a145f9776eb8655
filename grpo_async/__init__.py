"""grpo-async: asynchronous GRPO from one YAML file.

How data flows. The arrows carry records; the boxes are packages:

    prompts.jsonl                                                                               grpo-async train CONFIG
        | rows                                                                                      | launch
        v            Prompt                RolloutGroup            ScoredGroup                      v
    [ data ] ------------------> [ rollout ] ----------> [ scoring ] ----------> [ buffer ]     rank 0, rollout thread
                 chat tools envs   ^     |                 rewards                  |
                        Generation |     | GenerateRequest                          | RolloutSample
                                   |     v  (token ids in, ids + logprobs out)      v
    servers/vllm     [ inference: client | API     ]                           [ batching ] prefix trees
    servers/embedded [ the same HTTP API           ]                                | MicroBatch
                                   ^                                                v
                                   |      policy_version + 1                   [ training ]     every rank, main thread
                                   +-------------- [ weights ] <--------------------+
                                      pause, start, transfer, finish, resume        | metrics, checkpoints, model
                                                                                    v
                                                                          [ tracking | store ] -> runs/NAME -> [ viewer ]

Layers. Imports only go down; packages on one line do not import each other:

    cli | api                                       commands; the same for notebooks
    launch                                          starts, watches and restarts the other processes; several machines: Ray;
                                                    studies and forks: runs of runs; import --check: TRL's steps beside ours
    trainer                                         the trainer's process, which connects all below; replays a stored step
    display                                         what a terminal shows of a run
    checks | evaluation | quickstart                before step 1; during training; tasks that come with their data
    rollout | training | viewer                     the rollout thread; the loop of every rank; looking at the results
    scoring | servers | envs | processes | agents
        processes                                   how the processes of a run communicate
        agents                                      the endpoint for agents
    data | chat | tools | rewards | buffer | batching | weights | store
        buffer                                      every group from its start to its end: staleness, admission, the queue
    inference                                       requests to the servers, and which servers are up
    findings                                        is it learning, and what is the bottleneck
    user_code | sandbox
    tracking
    records | config | run_directory
        config                                      the sections of the YAML, and TRL's scripts as such a YAML
    utils
    errors

docs/architecture.md goes on to the loss, staleness, the weight push, the end of a rollout, restarts, several machines and
the config.
`api` is what `grpo_async` offers to notebooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_async.api import Run, load_config, train

__version__ = "0.1.0"
__all__ = ["Run", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """Import `api` when one of its names is first used: a command, or a process of a run, needs little of it."""
    if name in __all__:
        from grpo_async import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
