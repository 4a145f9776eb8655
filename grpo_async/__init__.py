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

Layers; imports go down only, packages of one layer do not import each other:

    5  cli
    4  launch                                  the only place that builds and connects objects
    3  rollout  training  viewer  quickstart
    2  scoring  servers  envs
    1  data  chat  tools  rewards  inference  buffer  batching  weights  tracking  store
       below: findings
    0  records  config  rundir  sandbox
       below: references  threads  calls  processes  retry  run_state  timeline
       below all: errors  loopback  growing_file  timeline_file

Where to look: what may be configured: config/*sections.py. How a rollout goes and ends: rollout/conversation.py. What a
server must serve: inference/surface.py. How stale a sample may be: buffer/sample_buffer.py and buffer/admission.py. Rewards
to advantages: scoring/advantages.py. The loss: training/objective.py and training/losses/; the head, in chunks:
training/logprobs.py, its gradient: training/head_gradients.py. How the model is loaded and sharded: training/load.py and
training/shard.py; adapters: training/lora.py. What a checkpoint holds: training/checkpoint.py (tensors) and buffer/resume.py
(rollouts). Evaluation: launch/evaluations.py. Several machines: launch/node_hub.py and launch/slurm.py. A run that stands
still: training/watchdog.py and launch/stall.py. What is stored of a rollout: store/schema.py; figures of each token:
training/token_figures.py. Who did what when: timeline.py. What every metric is: tracking/catalog.py. Whether a run learns:
findings/verdict.py; what bounds it: findings/speed.py. The terminal's inspector: viewer/terminal/app.py, the browser's:
viewer/web/api.py and viewer/static/web/; the report: viewer/report/page.py. The main loop: training/loop.py. The order of a
weight push: weights/push.py. Which servers are up: inference/fleet.py; who gets the weights, and what follows when a server
fails: launch/weight_sync.py. What restarts a server: launch/supervisor.py. The line between launcher and trainer:
launch/control.py. The thread of the embedded engine: servers/embedded/worker.py. What is checked before step 1:
launch/preflight.py. Which objects are connected to which: launch/lead.py, launch/rollout_side.py and launch/participants.py.
"""

__version__ = "0.1.0"
