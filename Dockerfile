# docker build -t coterie .
# docker run -p 127.0.0.1:8000:8000 -v coterie:/data coterie     # prints an API key once
# docker run -p 127.0.0.1:8000:8000 -v coterie:/data -e COTERIE_API_KEY coterie
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
# g++ builds the native kernels, below for most CPUs and on first use for the others
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
# packages by digest, and only those listed. torch-cpu.txt needs PyTorch's CPU index; torch-pypi.txt has CUDA
ARG TORCH=torch-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements ./requirements
RUN pip install --no-cache-dir --no-deps --require-hashes --extra-index-url "$TORCH_INDEX" -r "requirements/$TORCH.txt" \
 && pip install --no-cache-dir --no-deps --require-hashes -r requirements/runtime.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY coterie ./coterie
RUN COTERIE_WHEEL_KERNELS=1 pip install --no-cache-dir --no-deps --no-build-isolation .
COPY ops/container_start.sh /usr/local/bin/
RUN useradd --create-home coterie && mkdir --mode 700 /data && chown coterie /data
USER coterie
ENV COTERIE_HOME=/data
EXPOSE 8000
HEALTHCHECK --interval=15s --start-period=120s CMD \
  ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready', timeout=3)"]
ENTRYPOINT ["container_start.sh"]
CMD ["serve", "--host", "0.0.0.0"]
