"""grpo-async: asynchronous GRPO from one YAML file.

The way of the data; the record on each arrow, the package in each box:

    prompts.jsonl                                                              grpo-async train CONFIG
        | rows                                                                      |  launch (supervisor)
        v            Prompt                RolloutGroup            ScoredGroup      |
    [ data ] ------------------> [ rollout ] ----------> [ scoring ] ----------> [ buffer ]     rank 0, rollout thread
                 chat tools envs   ^     |                 rewards                  |
                        Generation |     | GenerateRequest                          | RolloutSample
                                   |     v  (token ids in, ids + logprobs out)      v
    servers/vllm     [ inference: client | surface ]                           [ batching ] plan, pack
    servers/embedded [ the same HTTP surface       ]                                | MicroBatch
                                   ^                                                v
                                   |      policy_version + 1                   [ training ]     every rank, main thread
                                   +-------------- [ weights ] <--------------------+
                                      start, send, pause, finish, resume            | metrics, checkpoints, model
                                                                                    v
                                                              [ tracking | store ]  runs/NAME  --> [ viewer ]

Layers; imports go down only, packages of one line do not import each other:

    cli                                           commands, nothing else
    launcher                                      the process that starts the others, watches and restarts them
    trainer | cluster                             the trainer's process: connects everything below; several machines
    display                                       what a terminal shows of a run
    checks | evaluation | quickstart              before step 1; beside training; the tasks that need no data
    rollout | training | viewer                   the rollout thread; the loop of every rank; who looks at it afterwards
    scoring | servers | envs | processes          what the processes of a run say to each other
    data | chat | tools | rewards | inference | buffer | batching | weights | store
    findings                                      does it learn, and what bounds it
    user_code | sandbox
    tracking
    records | config | rundir
    utils
    errors

Where to look: what may be configured: config/*sections.py. How a rollout goes and ends: rollout/conversation.py. What a
server must serve: inference/surface.py. How stale a sample may be: buffer/sample_buffer.py and buffer/admission.py. Rewards
to advantages: scoring/advantages.py. The loss: training/loss.py. The order of a weight push:
weights/push.py; who gets the weights, and what follows when a server fails: trainer/weight_sync.py. Which servers are up:
inference/fleet.py; what restarts them: launcher/server_keeper.py. The main loop: training/loop.py. What a checkpoint holds:
training/checkpoint.py (tensors) and buffer/resume.py (rollouts). Which objects are connected to which: trainer/lead.py.
"""

__version__ = "0.1.0"
