# certvit on CPUs, installed by the commands of examples/ci:
#   docker build -t certvit .
#   docker run --rm -v "$PWD:/models" certvit audit model.safetensors --dataset digits
FROM python:3.11-slim
ARG TORCH="torch<2.14"
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG CERTVIT=/certvit
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$TORCH" torchvision --index-url "$TORCH_INDEX"
COPY . /certvit
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$CERTVIT" && pip install --no-cache-dir --no-deps "torchattacks>=3.5.1" && certvit doctor && useradd --create-home --uid 1000 auditor
USER 1000
WORKDIR /models
ENTRYPOINT ["certvit"]
