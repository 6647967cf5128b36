# The proxy. No GPU, no engine: Python only.
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY constraints/base.txt constraints/base.txt
COPY lifecycle lifecycle
COPY engine_bridge engine_bridge
COPY proxy proxy
COPY migrations migrations
RUN pip install --no-cache-dir -c constraints/base.txt ".[tracing]" \
 && useradd --create-home --uid 10001 kvtether \
 && install -d -o kvtether /var/lib/kvtether
USER kvtether
EXPOSE 8700 8701
CMD ["kvtether", "serve"]
