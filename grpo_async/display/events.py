"""Every event of --json-logs, and its fields as the help lists them. Imports nothing."""

JSON_EVENTS = {
    "start": "run, directory, pid, plan",
    "phase": "name: the current phase, and after a colon how far it is",
    "preflight": "checks: [{name, status: pass|warn|fail, detail}], counts: in words",
    "step": "step, max_steps, eta_s, reward_change, metrics: {name: number or null}",
    "example": "step, prompt, completions: [{reward, text}]: every few\nsteps the best and the worst completion of a prompt",
    "evaluation": 'when: before|after|"step N", metrics',
    "servers": "servers: [{index, url, state, version, running, waiting,\nkv_usage, restarts, reason: what is wrong with one that\n"
    "is not up, ...}], when a state changes",
    "learning": "is_learning: true|false|null, key, text: how the run\nstands, fix: what to do, numbers",
    "note": "text",
    "warning": "text",
    "error": "error, exit_code (also printed to stderr)",
    "end": "exit_code, summary: as in summary.json, or null",
}
