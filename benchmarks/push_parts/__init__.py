"""Parts of benchmarks.push: the server it pushes to, the bare broadcast it is compared with, the streams that are paused."""
