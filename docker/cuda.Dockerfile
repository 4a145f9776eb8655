# The image for machines with NVIDIA GPUs: vLLM's own image, which has CUDA, torch and vLLM, and this package.
#
#   docker build -f docker/cuda.Dockerfile -t grpo-async:cuda .
#   docker run --rm -it --gpus all --ipc=host -v "$PWD:/workspace" grpo-async:cuda doctor
FROM vllm/vllm-openai:v0.32.0

WORKDIR /opt/grpo-async
COPY . .
RUN uv pip install --system --no-cache --constraints requirements/constraints.txt ".[vllm,hub,lora,math,parquet]" \
    && install --directory --mode=1777 /workspace

WORKDIR /workspace
ENTRYPOINT ["grpo-async"]
