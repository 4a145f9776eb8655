"""The real vLLM server as an inference server of a run.

command.py        argv and environment, and the exec that becomes vLLM
plugin.py         what vLLM loads into each of its processes
middleware.py     token guard, /rollout routes and control routes, in front of vLLM's own app
control.py        pause, resume and weight update, and the policy version they lead to
stream.py         tokens of one request, stamped on arrival, cut into chunks
state.py          policy version and counters
drain.py          when every token of the old policy has arrived
weight_engine.py  receives weights by gloo and applies them all or not at all
mismatch.py       whether an update fits the model
compat.py         every import and call that depends on vLLM's version
"""
