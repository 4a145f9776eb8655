# The image for machines without a GPU: every command, vLLM's CPU build and the embedded engine.
#
#   docker build -f docker/cpu.Dockerfile -t grpo-async:cpu .
#   docker run --rm -it -v "$PWD:/workspace" grpo-async:cpu prepare-quickstart
FROM python:3.12-slim-bookworm

# g++: torch.compile in vLLM; libnuma1: vLLM's CPU kernels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
WORKDIR /opt/grpo-async
COPY . .
RUN GRPO_ASYNC_TORCH=cpu scripts/bootstrap.sh --with-vllm --with hub,lora,math,parquet \
    && useradd --create-home --uid 1000 user \
    && install --directory --owner=user /workspace

ENV PATH=/opt/grpo-async/.venv/bin:$PATH
USER 1000
WORKDIR /workspace
ENTRYPOINT ["grpo-async"]
