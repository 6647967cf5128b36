# vLLM, LMCache server and LMCache coordinator: one image, the two versions that were tested together.
ARG VLLM_VERSION=v0.32.0
FROM vllm/vllm-openai:${VLLM_VERSION}
RUN pip install --no-cache-dir lmcache==0.5.6
ENTRYPOINT []
