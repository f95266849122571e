# docker build -t coterie . && docker run -p 8000:8000 -v coterie:/data coterie
FROM python:3.11-slim
# g++ builds the native kernels on first use; without it the torch path serves, slower
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY coterie ./coterie
# On x86 the default index serves torch with CUDA; the CPU build is much smaller.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" .
RUN useradd --create-home coterie && mkdir /data && chown coterie /data
USER coterie
ENV COTERIE_HOME=/data
EXPOSE 8000
HEALTHCHECK --interval=15s --start-period=120s CMD \
  ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
# A container's port must leave loopback. Mount a key file and pass --api-key-file instead of --insecure
# wherever others can reach the port.
ENTRYPOINT ["coterie"]
CMD ["serve", "--host", "0.0.0.0", "--insecure"]
